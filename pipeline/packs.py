"""Small parts of many tables in one stored object: what a unit has of thousands of tables.

An object in the store costs its owner, whoever holds the reference, and the raylet some kilobytes and about a
millisecond, however small it is. So where a unit has rows of many tables, its small parts share objects. A *pack* is a
table with one binary column, and each value is the Arrow message of one part's record batch. The message has no schema,
because the part's relation version gives it (``rows.contract_schema``).

Buffers make packs (``PartsBuilder``). The driver takes from them what it needs of one table (``PackReader``), because
Spark's executors read an object as one stream of one schema. A unit of few tables has no packs: there, an object for
each part lets the executors read what the buffer stored, and the driver touches no row.

Rejected: all parts by value inside ``Sealed``. Reader, sequencer and driver each would unpickle the rows of all tables,
and the sequencer would keep them until the sink has them. Of few tables, and few rows, that costs less than an object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pyarrow as pa

from xidstream.pipeline.exchange import ArrowRef, MemoryPart
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema

FEW_TABLES: Final = 16
"""Tables of a unit that makes no packs: a unit of small transactions mostly has one to three."""

SMALL_BYTES: Final = 64 << 10
"""The most bytes of a part's rows in a pack; what is larger is an object of its own, also among many."""

PACK_BYTES: Final = 4 << 20
"""About the size of a pack: a buffer holds one that is not full, and the driver fetches whole ones."""

PACK_SCHEMA: Final = pa.schema([pa.field("rows", pa.binary(), nullable=False)])


class PartsBuilder:
    """Makes the parts in memory of one unit. ``put`` stores a table and returns its reference;
    ``n_tables``: how many relation versions the unit may have rows of."""

    def __init__(self, put: Callable[[pa.Table], ArrowRef], n_tables: int) -> None:
        self._put = put
        self._is_packing = n_tables > FEW_TABLES
        self._parts: list[MemoryPart] = []
        self._open: list[tuple[RelationVersion, int, int, bytes]] = []
        self._open_bytes = 0

    def add(self, relation: RelationVersion, released: pa.Table) -> None:
        """Rows of ``relation`` in contract layout. Nothing is kept of a table without rows."""
        n_rows, n_bytes = released.num_rows, released.nbytes
        if not n_rows:
            return
        # Rows are in commit order.
        first_lsn = released.column("_commit_lsn")[0].as_py()
        if not self._is_packing or n_bytes > SMALL_BYTES:
            self._parts.append(MemoryPart(relation, n_rows, n_bytes, first_lsn, self._put(released)))
            return
        (batch,) = released.combine_chunks().to_batches()
        message = batch.serialize().to_pybytes()
        self._open.append((relation, n_rows, first_lsn, message))
        self._open_bytes += len(message)
        if self._open_bytes >= PACK_BYTES:
            self._close_pack()

    def finish(self) -> tuple[MemoryPart, ...]:
        """All parts; those of one relation version in the order in which they were added."""
        if self._open:
            self._close_pack()
        return tuple(self._parts)

    def _close_pack(self) -> None:
        messages = pa.array([message for *_, message in self._open], pa.binary())
        ref = self._put(pa.Table.from_arrays([messages], schema=PACK_SCHEMA))
        for pack_index, (relation, n_rows, first_lsn, message) in enumerate(self._open):
            # In the store a small part is larger than its rows: its message counts.
            self._parts.append(MemoryPart(relation, n_rows, len(message), first_lsn, ref, pack_index))
        self._open, self._open_bytes = [], 0


class PackReader:
    """Reads the packs of one batch, each once, when the first of its parts is asked for. Safe for several threads.

    ``read`` gives the record batches of a reference. What was read stays: at most the ``batch_bytes`` of the batch.
    """

    def __init__(self, read: Callable[[ArrowRef], Iterator[pa.RecordBatch]]) -> None:
        self._read = read
        self._messages: dict[ArrowRef, pa.ChunkedArray] = {}
        self._lock = threading.Lock()

    def rows(self, parts: Iterable[MemoryPart]) -> Iterator[pa.RecordBatch]:
        """The rows of each part, which is in a pack, in contract layout. Raises what ``read`` raises."""
        for part in parts:
            message = self._pack(part.ref)[part.pack_index]
            yield pa.ipc.read_record_batch(message.as_buffer(), contract_schema(part.relation))

    def _pack(self, ref: ArrowRef) -> pa.ChunkedArray:
        with self._lock:
            if ref not in self._messages:
                self._messages[ref] = pa.Table.from_batches(self._read(ref), PACK_SCHEMA).column(0)
            return self._messages[ref]
