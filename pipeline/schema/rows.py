"""The Arrow layout of rows: as buffered (internal) and as released (the contract), and the step between.

*Internal* layout, one record batch per relation version and block: ``INTERNAL_FIELDS`` first, then the
table's columns in wire order. Internal columns are found by position, never by name, because a table may
well have a column called ``ordinal``.

*Contract* layout: the table's columns, then ``CONTRACT_FIELDS``.

``release`` takes what is in a buffer's memory from one to the other, at the commit. It needs what is known only
then (the commit LSN and timestamp), and is pure, vectorised and cheap. What is spilled before is in contract layout
at once, but for these two (``pipeline.parquet``).

``_seq`` is dense over the rows of a transaction, and known when a row is decoded: what a rollback takes is taken
before the rows after it are numbered (``pipeline.transactions.survivors``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS

CHANGE_TYPES = ("insert", "update_preimage", "update_postimage", "delete", "truncate")
"""``change_type: int8`` of the internal layout indexes this tuple."""
INSERT, UPDATE_PREIMAGE, UPDATE_POSTIMAGE, DELETE, TRUNCATE = range(5)
SNAPSHOT = "snapshot"
"""The ``_change_type`` of a row that a table had before its changes. It never is in the internal layout."""

INTERNAL_FIELDS = (
    pa.field("change_type", pa.int8(), nullable=False),
    # Transaction block: the subxid (0 when not streamed). Plain block: the row's transaction, as an index.
    pa.field("owner", pa.uint32(), nullable=False),
    # The row's place among all rows of its transaction, over all tables, from 0.
    pa.field("ordinal", pa.int64(), nullable=False),
    pa.field("unchanged", pa.list_(pa.string())),
    pa.field("text", pa.map_(pa.string(), pa.string())),
)
N_INTERNAL = len(INTERNAL_FIELDS)

CONTRACT_FIELDS = (
    pa.field("_change_type", pa.string()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_commit_timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("_xid", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_unchanged", pa.list_(pa.string())),
    pa.field("_text", pa.map_(pa.string(), pa.string())),
)
assert tuple(f.name for f in CONTRACT_FIELDS) == CONTRACT_COLUMNS

TRANSACTIONS_SCHEMA = pa.schema(
    [
        pa.field("xid", pa.int64()),
        pa.field("commit_lsn", pa.int64()),
        pa.field("end_lsn", pa.int64()),
        pa.field("commit_timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("gid", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("streamed", pa.bool_()),
        pa.field("rows", pa.int64()),
        pa.field("tables", pa.list_(pa.string())),
    ]
)
"""One row per transaction, in commit order."""

MESSAGES_SCHEMA = pa.schema(
    [
        pa.field("commit_lsn", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("transactional", pa.bool_()),
        pa.field("prefix", pa.string()),
        pa.field("content", pa.binary()),
    ]
)
"""One row per logical message, in stream order; ``commit_lsn`` and ``xid`` null when not transactional."""


def internal_schema(relation: RelationVersion) -> pa.Schema:
    return pa.schema([*INTERNAL_FIELDS, *relation.arrow_fields])


def contract_schema(relation: RelationVersion) -> pa.Schema:
    return pa.schema([*relation.arrow_fields, *CONTRACT_FIELDS])


@dataclass(frozen=True)
class Stamp:
    """What the commit adds to rows: arrays with one entry per transaction.

    ``commit_lsn: int64[n]``, ``commit_timestamp_us: int64[n]`` (Unix epoch, UTC), ``xid: int64[n]``. A
    transaction block has n = 1 and its rows' owner is a subxid; a plain block has one entry for each of its
    transactions and its rows' owner is the index here.
    """

    commit_lsn: npt.NDArray[np.int64]
    commit_timestamp_us: npt.NDArray[np.int64]
    xid: npt.NDArray[np.int64]

    @classmethod
    def of_one(cls, commit_lsn: int, commit_timestamp_us: int, xid: int) -> Stamp:
        return cls(
            np.array([commit_lsn], np.int64),
            np.array([commit_timestamp_us], np.int64),
            np.array([xid], np.int64),
        )


def first_seq(batch: pa.RecordBatch) -> int:
    """The first ``_seq`` of an internal batch with rows."""
    return int(batch.column(2)[0].as_py())


def last_seq(batch: pa.RecordBatch) -> int:
    """The last ``_seq`` of an internal batch with rows."""
    return int(batch.column(2)[-1].as_py())


def up_to(batch: pa.RecordBatch, n_rows: int) -> pa.RecordBatch:
    """The rows of an internal batch with numbers below ``n_rows``: a view."""
    return batch.slice(0, int(np.searchsorted(batch.column(2).to_numpy(), n_rows)))


@functools.cache
def change_type_values() -> pa.Array:
    """``CHANGE_TYPES`` as an array. It is made at first use, because the first array of a process imports pandas, which
    takes 0.2 s. The slot reader never makes one."""
    return pa.array(CHANGE_TYPES, pa.string())


_TIMESTAMP = CONTRACT_FIELDS[2].type
_FILLED_ROWS, _MOST_FILLED_ROWS = 4 << 10, 128 << 10


def release(
    batch: pa.RecordBatch,
    relation: RelationVersion,
    stamp: Stamp,
    *,
    plain: bool = False,
) -> pa.RecordBatch:
    """Turn an internal batch into the contract's layout.

    ``plain`` says that ``owner`` indexes ``stamp`` (a plain block). The columns of the table are shared with ``batch``,
    not copied.
    """
    n = batch.num_rows
    if plain:
        owner = batch.column(1).to_numpy()
        stamped = [pa.array(values[owner]) for values in (stamp.commit_lsn, stamp.xid)]
        timestamp = pa.array(stamp.commit_timestamp_us[owner]).cast(_TIMESTAMP)
    else:
        stamped = [constant(int(values[0]), n, pa.int64()) for values in (stamp.commit_lsn, stamp.xid)]
        timestamp = constant(int(stamp.commit_timestamp_us[0]), n, _TIMESTAMP)
    columns: Sequence[pa.Array] = [
        *batch.columns[N_INTERNAL:],
        _change_types(batch.column(0)),
        stamped[0],
        timestamp,
        stamped[1],
        batch.column(2),
        batch.column(3),
        batch.column(4),
    ]
    return pa.RecordBatch.from_arrays(list(columns), schema=contract_schema(relation))


def snapshot_rows(
    relation: RelationVersion,
    columns: Sequence[pa.Array],
    text: pa.Array,
    *,
    snapshot_lsn: int,
    taken_at_us: int,
    first_seq: int,
) -> pa.RecordBatch:
    """Rows of a table's snapshot in the contract's layout. ``columns`` and ``text`` are shared, not copied.

    ``snapshot_lsn`` and ``taken_at_us`` stand where a change has its commit's LSN and timestamp.
    """
    n = len(text)
    return pa.RecordBatch.from_arrays(
        [
            *columns,
            constant(SNAPSHOT, n, pa.string()),
            constant(snapshot_lsn, n, pa.int64()),
            constant(taken_at_us, n, _TIMESTAMP),
            pa.nulls(n, pa.int64()),
            pa.array(np.arange(first_seq, first_seq + n, dtype=np.int64)),
            pa.nulls(n, CONTRACT_FIELDS[5].type),
            text,
        ],
        schema=contract_schema(relation),
    )


def stamp_messages(batch: pa.RecordBatch, commit_lsn: int, xid: int) -> pa.RecordBatch:
    """A transaction's logical messages (``MESSAGES_SCHEMA``) with what its commit adds, and the top-level xid. Prefix
    and content are shared with ``batch``."""
    n = batch.num_rows
    stamped = {0: constant(commit_lsn, n, pa.int64()), 2: constant(xid, n, pa.int64())}
    columns = [stamped.get(i, column) for i, column in enumerate(batch.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES_SCHEMA)


def _change_types(codes: pa.Array) -> pa.Array:
    kinds = codes.to_numpy()
    if len(kinds) and kinds.min() == kinds.max():
        return constant(CHANGE_TYPES[kinds[0]], len(kinds), pa.string())
    return pc.take(change_type_values(), codes)


def constant(value: int | str, n: int, arrow: pa.DataType) -> pa.Array:
    """``n`` times ``value``. A transaction's batches share what is made for the first of them: memory that is
    touched for the first time was most of what a release cost."""
    if n > _MOST_FILLED_ROWS:
        return pa.repeat(pa.scalar(value, arrow), n)
    return _repeated(value, -(-n // _FILLED_ROWS) * _FILLED_ROWS, arrow)[:n]


@functools.lru_cache(maxsize=8)
def _repeated(value: int | str, n: int, arrow: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, arrow), n)
