"""Batches as the sequencer hands them over, made by hand: relations, parts in memory, parts in local files.

``memory_frame`` stands in for RayDP's object-store path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from xidstream.pipeline.exchange import (
    Batch,
    InlineMessages,
    MemoryMessages,
    MemoryPart,
    MessageFile,
    MessagePart,
    Sealed,
    Segment,
    SegmentPart,
    SlotIdentity,
    SpilledMessages,
)
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import (
    INSERT,
    MESSAGES_SCHEMA,
    TRANSACTIONS_SCHEMA,
    Stamp,
    internal_schema,
    release,
)
from xidstream.pipeline.storage.segment_file import SegmentReader, write_messages, write_segment
from xidstream.pipeline.storage.storage import Storage

IDENTITY = SlotIdentity(7_000_000_000_000_000_001, "shop", "orders")
COMMIT_US = 1_700_000_000_000_000
INT2, INT4, INT8, TEXT, FLOAT4, FLOAT8, NUMERIC = 21, 23, 20, 25, 700, 701, 1700


def numeric(precision: int, scale: int) -> int:
    """The type modifier of numeric(precision, scale)."""
    return (precision << 16 | scale) + 4


def relation(
    name: str, *columns: tuple[str, int] | tuple[str, int, int], relid: int = 16384
) -> RelationVersion:
    schema, table = name.split(".", 1)
    return RelationVersion(
        relid,
        schema,
        table,
        ReplicaIdentity.DEFAULT,
        tuple(Column(c[0], c[1], (*c, -1)[2], False) for c in columns),
    )


def internal(version: RelationVersion, rows: Sequence[dict[str, Any]], ordinal: int = 0) -> pa.RecordBatch:
    """Internal layout; ``_change``, ``_owner``, ``_ordinal``, ``_unchanged``, ``_text`` are optional."""
    schema = internal_schema(version)
    own: list[list[Any]] = [
        [row.get("_change", INSERT) for row in rows],
        [row.get("_owner", 0) for row in rows],
        [row.get("_ordinal", ordinal + i) for i, row in enumerate(rows)],
        [row.get("_unchanged") for row in rows],
        [row.get("_text") for row in rows],
    ]
    columns = own + [[row.get(f.name) for row in rows] for f in version.arrow_fields]
    arrays = [pa.array(values, f.type) for values, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def stream_bytes(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class LocalSegments:
    """A storage in a local directory, and ``read_segment`` over it."""

    root: str

    @property
    def storage(self) -> Storage:
        return Storage(self.root)

    def __call__(self, stored: SegmentPart | MessageFile) -> Iterator[pa.RecordBatch]:
        return SegmentReader(self.root)(stored)

    def write(
        self, key: str, version: RelationVersion, batches: Sequence[pa.RecordBatch], xid: int = 7
    ) -> Segment:
        return write_segment(self.storage, key, version, xid, batches)

    def write_messages(self, key: str, batches: Sequence[pa.RecordBatch]) -> MessageFile:
        return write_messages(self.storage, key, batches)


@dataclass(frozen=True)
class _Streams:
    streams: tuple[bytes, ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                with pa.ipc.open_stream(self.streams[number]) as reader:
                    yield from reader


def memory_frame(spark: Any, schema: pa.Schema, refs: Sequence[bytes]) -> Any:
    """Stands in for RayDP: the refs are the bytes themselves."""
    from xidstream.pipeline.spark.spark_schemas import spark_schema

    return spark.range(0, len(refs), 1, len(refs)).mapInArrow(_Streams(tuple(refs)), spark_schema(schema))


def read_memory(ref: bytes) -> Iterator[pa.RecordBatch]:
    """Stands in for Ray's own store, as ``memory_frame`` does."""
    with pa.ipc.open_stream(ref) as reader:
        yield from reader


def put_memory(table: pa.Table) -> bytes:
    return stream_bytes(table.to_batches(), table.schema)


@dataclass
class Transaction:
    """A transaction to be: ``rows`` are (relation, rows) in order; ``spilled`` puts them into segments."""

    commit_lsn: int
    rows: Sequence[tuple[RelationVersion, Sequence[dict[str, Any]]]] = ()
    spilled: bool = False
    messages: Sequence[tuple[int, str, bytes]] = ()
    """(lsn, prefix, content)"""
    messages_in: str = "line"
    """``line``, ``memory`` or ``storage``."""
    xid: int = field(default=0)
    gid: str | None = None

    def seal(self, segments: LocalSegments | None) -> Sealed:
        xid = self.xid or self.commit_lsn % 1_000_003
        stamp = Stamp.of_one(self.commit_lsn, COMMIT_US + self.commit_lsn, xid)
        memory, spilled, tables = [], [], []
        ordinal = n_released = 0
        for number, (version, rows) in enumerate(self.rows):
            batch = internal(version, rows, ordinal)
            ordinal += len(rows)
            out = release(batch, version, stamp)
            n_released += out.num_rows
            if out.num_rows and version.name not in tables:
                tables.append(version.name)
            if self.spilled:
                assert segments is not None
                halves = [batch.slice(0, len(rows) // 2), batch.slice(len(rows) // 2)]
                segment = segments.write(f"{self.commit_lsn}/{number}.parquet", version, halves, xid)
                spilled.append(
                    SegmentPart(segment, CommitStamp(self.commit_lsn, COMMIT_US + self.commit_lsn))
                )
            else:
                ref = stream_bytes([out], out.schema)
                memory.append(MemoryPart(version, out.num_rows, out.nbytes, self.commit_lsn, ref))
        row = {
            "xid": xid,
            "commit_lsn": self.commit_lsn,
            "end_lsn": self.commit_lsn + 8,
            "commit_timestamp": COMMIT_US + self.commit_lsn,
            "gid": self.gid,
            "origin": None,
            "streamed": self.spilled,
            "rows": n_released,
            "tables": tables,
        }
        present = [row] if n_released or self.messages else []
        messages = [
            {
                "commit_lsn": self.commit_lsn,
                "lsn": lsn,
                "xid": xid,
                "transactional": True,
                "prefix": p,
                "content": c,
            }
            for lsn, p, c in self.messages
        ]
        return Sealed(
            record_batch(present, TRANSACTIONS_SCHEMA),
            tuple(memory),
            tuple(spilled),
            (self._message_part(record_batch(messages, MESSAGES_SCHEMA), xid, segments),) if messages else (),
            n_released,
            0,
        )

    def _message_part(self, batch: pa.RecordBatch, xid: int, segments: LocalSegments | None) -> MessagePart:
        if self.messages_in == "line":
            return InlineMessages(batch)
        if self.messages_in == "memory":
            return MemoryMessages(batch.nbytes, stream_bytes([batch], batch.schema))
        assert segments is not None
        unstamped = batch.set_column(0, batch.schema.field(0), pa.nulls(batch.num_rows, pa.int64()))
        file = segments.write_messages(f"{self.commit_lsn}/messages.arrow", [unstamped])
        return SpilledMessages(file, Lsn(self.commit_lsn), Xid(xid))


def record_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([r[f.name] for r in rows], f.type) for f in schema], schema=schema
    )


def plain_messages(*messages: tuple[int, str, bytes]) -> Sealed:
    """A unit of non-transactional logical messages: (lsn, prefix, content)."""
    rows = [
        {"commit_lsn": None, "lsn": lsn, "xid": None, "transactional": False, "prefix": p, "content": c}
        for lsn, p, c in messages
    ]
    inline = (InlineMessages(record_batch(rows, MESSAGES_SCHEMA)),)
    return Sealed(record_batch([], TRANSACTIONS_SCHEMA), (), (), inline, 0, 0)


def batch_of(
    units: Sequence[Transaction | Sealed], segments: LocalSegments | None = None, number: int = 0
) -> Batch:
    sealed = [u.seal(segments) if isinstance(u, Transaction) else u for u in units]
    lsns = [lsn for s in sealed for lsn in s.transactions.column("commit_lsn").to_pylist()]
    return Batch(
        number,
        tuple(sealed),
        Lsn(min(lsns, default=0)),
        Lsn(max(lsns, default=0)),
        Lsn(max(lsns, default=0) + 8),
        len(lsns),
        sum(s.n_rows for s in sealed),
        0,
    )


def expected_rows(
    transactions: Sequence[Transaction], table: str
) -> list[tuple[int, int, str, dict[str, Any]]]:
    """(commit_lsn, seq, change type, given values) of one table, by the definition of ``_seq``."""
    from xidstream.pipeline.schema.rows import CHANGE_TYPES

    out = []
    for transaction in transactions:
        seq = 0
        for version, rows in transaction.rows:
            for row in rows:
                if version.name == table:
                    given = {k: v for k, v in row.items() if not k.startswith("_")}
                    change = CHANGE_TYPES[row.get("_change", INSERT)]
                    out.append((transaction.commit_lsn, seq, change, given))
                seq += 1
    return out


MakeBatch = Callable[..., Any]
