"""What is as large as PostgreSQL sends it: values of a gigabyte, and messages of more than two in one batch.

From the stream to the Parquet files of the Delta sink, with no server and no JVM: neither looks at the values. The
server cannot send more than one message of 1 GB (``MaxAllocSize``), with the header of 25 bytes in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.differential.local_stages import InProcess, LocalBuffers, batches_of
from tests.unit.decode.builder import U, update
from tests.wire import Wire
from xidstream.pipeline.exchange import Batch, MemoryMessages, Sealed, SlotIdentity, SpilledMessages, Tenure
from xidstream.pipeline.log_tables.batch_parts import tables_of
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WriteOutput
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.spark.executor_tasks import SegmentRows, WriteSegments
from xidstream.pipeline.spark.frames import SinkBatch, union_layout
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import StreamCutter
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.event_router import EventRouter, OrderedEvent
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.transactions.buffer_calls import BufferSettings

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

GIB = 1 << 30
LARGEST = GIB - 1 - 25 - 17
"""A text in a row of one column: the rest is the headers of XLogData, Insert and tuple."""


def read_memory(ref: InProcess) -> Iterator[pa.RecordBatch]:
    yield from batches_of(ref)


class Chain:
    """Reader and buffer, in one process and with nobody to wait for."""

    def __init__(self, folder: Path) -> None:
        self.storage = Storage(str(folder / "segments"))
        # More than any test has: what goes to storage goes there because it is large.
        settings = BufferSettings(self.storage.uri, Layout(1, "s", "e"), 1 << 40)
        buffers = LocalBuffers(settings, lambda sealed: sealed)
        ledger = TransactionLedger()
        self.routing = EventRouter(buffers, self._submit, Backlog(1 << 40), ledger)
        self.cutter = StreamCutter(
            block_bytes=4 << 20, pending_limit_bytes=64 << 20, parallel=False, ledger=ledger
        )
        self.sink = DeltaSink(str(folder / "delta"), SlotIdentity(1, "d", "s"))
        self.delta = folder / "delta"
        self.sealed: list[Sealed] = []

    def take(self, wire: Wire) -> None:
        messages = wire.take()[::-1]
        while messages:
            self.routing.send(self.cutter.feed(messages.pop()))

    def feed(self, data: bytes) -> None:
        self.routing.send(self.cutter.feed(data))

    def flush(self) -> None:
        self.routing.send(self.cutter.flush())

    def _submit(self, entries: list[OrderedEvent]) -> None:
        self.sealed += [entry.result for entry in entries if entry.result is not None]

    def batch(self) -> SinkBatch:
        units = tuple(self.sealed)
        lsn = Lsn(0x900000)
        handed = Batch(
            0, units, lsn, lsn, lsn, 1, sum(u.n_rows for u in units), sum(u.n_bytes for u in units)
        )
        return SinkBatch(handed, None, None, SegmentReader(self.storage.uri), read_memory, None)  # type: ignore[arg-type]

    def write_messages(self) -> pa.Table:
        """What ``_messages`` holds then, with the length of each content and its first byte in place of it."""
        self.sink.claim(Tenure(1, "epoch-1", 1, {}, Lsn(1 << 40)))
        commit = self.sink._messages_of(self.batch(), [])
        assert commit is not None
        commit.alone()
        table = DeltaTable(str(self.delta / "_messages"))
        found = []
        for action in pa.table(table.get_add_actions()).column("path").to_pylist():
            with pq.ParquetFile(self.delta / "_messages" / action) as file:
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group)
                    content = rows.column("content")
                    found.append(
                        rows.drop_columns(["content"])
                        .append_column("n", pc.binary_length(content))
                        .append_column("head", pc.binary_slice(content, 0, 1))
                    )
        return pa.concat_tables(found).sort_by("lsn")


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def test_rows_of_a_gigabyte_reach_parquet_as_they_are(chain: Chain, tmp_path: Path) -> None:
    wire = Wire()
    wire.begin(700, 0x900000)
    wire.relation()
    for value in ("a", "b"):
        wire.insert(value * LARGEST)
        chain.take(wire)
    wire.insert("small")
    wire.commit(0x900000)
    chain.take(wire)
    (sealed,) = chain.sealed
    assert sealed.n_rows == 3
    assert sum(part.n_rows for part in sealed.segments) == 2, "a gigabyte is not put into the object store"
    assert sum(part.n_rows for part in sealed.memory) == 1
    assert written(chain, tmp_path) == [(0, LARGEST, b"a"), (1, LARGEST, b"b")]


def test_an_old_value_of_a_gigabyte_that_fills_the_new_row_too_is_in_both(
    chain: Chain, tmp_path: Path
) -> None:
    """REPLICA IDENTITY FULL and an unchanged value: two gigabytes of one column come of one message."""
    size = LARGEST - 16
    wire = Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("x" * (1 << 20))
    chain.take(wire)
    change = update([U], old=["o" * size], subxid=700, relid=1)
    chain.feed(b"w" + struct.pack(">QQQ", 0x5000, 0x5000, 0) + change)
    del change
    wire.stop()
    wire.stream_commit(700, 0x900000)
    chain.take(wire)
    (sealed,) = chain.sealed
    assert sealed.n_rows == 3
    assert written(chain, tmp_path)[-2:] == [(1, size, b"o"), (2, size, b"o")]


def written(chain: Chain, tmp_path: Path) -> list[tuple[int, int, bytes]]:
    """``_seq``, size and first byte of the rows that the sink's task writes of the segments."""
    ((_, parts),) = tables_of(chain.batch().content).items()
    columns, mappings = union_layout(parts)
    segments = tuple(part for _, part in parts.segments())
    rows = SegmentRows(
        SegmentReader(chain.storage.uri),
        segments,
        (0,) * len(segments),
        (Conform.of(columns, mappings[0].names),),
        (tuple(range(len(segments))),),
    )
    table = Location.parse(str(tmp_path / "table"))
    write = WriteSegments(WriteOutput(table, "job", 0), rows)
    (reports,) = write([pa.record_batch({"id": [0]})])
    found = []
    for path in reports.column("path").to_pylist():
        with pq.ParquetFile(tmp_path / "table" / path) as file:
            for group in range(file.num_row_groups):
                for value, seq in zip(*file.read_row_group(group, ["a", "_seq"]).columns, strict=True):
                    found.append(
                        (seq.as_py(), pc.binary_length(value).as_py(), value.as_buffer()[:1].to_pybytes())
                    )
    return sorted(found)


def test_messages_of_a_gigabyte_in_and_between_transactions_are_written_once(chain: Chain) -> None:
    wire = Wire()
    size = LARGEST - 64
    wire.message(b"n" * size, transactional=False)
    chain.take(wire)
    chain.flush()
    wire.begin(700, 0x900000)
    wire.message(b"t" * size, transactional=True)
    chain.take(wire)
    wire.commit(0x900000)
    chain.take(wire)
    parts = [part for unit in chain.sealed for part in unit.messages]
    assert all(isinstance(part, SpilledMessages) for part in parts) and len(parts) == 2
    for _ in range(2):
        found = chain.write_messages()
        assert found.column("n").to_pylist() == [size, size]
        assert found.column("head").to_pylist() == [b"n", b"t"]
        assert found.column("commit_lsn").to_pylist() == [None, 0x900000]
    chain.storage.delete([key for unit in chain.sealed for key in unit.stored_keys()])
    assert chain.storage.list_keys("1") == []


def test_more_than_two_gigabytes_of_messages_in_one_transaction_are_all_kept(chain: Chain) -> None:
    """They could not be stamped in one batch; of several batches' worth the sink wrote the first chunk alone."""
    n, size = 40, 60 << 20
    wire = Wire()
    wire.begin(700, 0x90000000)
    for i in range(n):
        wire.message(bytes([i]) * size, transactional=True)
        chain.take(wire)
    wire.commit(0x90000000)
    chain.take(wire)
    (sealed,) = chain.sealed
    assert sealed.n_bytes > n * size > 2 * GIB
    assert {type(part) for part in sealed.messages} == {MemoryMessages}
    found = chain.write_messages()
    assert found.schema.names == [*MESSAGES_SCHEMA.names[:-1], "n", "head"]
    assert found.column("n").to_pylist() == [size] * n
    assert found.column("head").to_pylist() == [bytes([i]) for i in range(n)]
    files = pa.table(DeltaTable(str(chain.delta / "_messages")).get_add_actions())
    assert DeltaTable(str(chain.delta / "_messages")).version() == 1, "one commit"
    assert files.num_rows >= 1
