"""Journal files: units come back as they were, or the file is refused by its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa
import pytest

from tests.memory_parts import part_rows
from tests.unit.segments.conftest import COMMIT, XID, make_batch, read
from xidstream.pipeline import rows
from xidstream.pipeline.exchange import (
    ArrowRef,
    InlineMessages,
    MemoryMessages,
    Sealed,
    SegmentPart,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.packs import FEW_TABLES, UnitParts
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.relations import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.segments import (
    Layout,
    Storage,
    load_journal_units,
    write_journal_file,
    write_messages,
    write_segment,
)

TIMESTAMP_US = 1_700_000_000_123_456


class Store(dict[str, pa.Table]):
    """An object store whose references are strings."""

    n_reads = 0

    def put(self, table: pa.Table) -> str:
        ref = f"ref {id(self)} {len(self)}"
        self[ref] = table
        return ref

    def fetch(self, ref: ArrowRef) -> pa.Table:
        self.n_reads += 1
        return self[ref]


def message_rows(n: int, lsn: int = 0x100) -> pa.RecordBatch:
    message = {
        "commit_lsn": 7,
        "lsn": lsn,
        "xid": 700,
        "transactional": True,
        "prefix": "p",
        "content": b"c\0",
    }
    return pa.RecordBatch.from_pylist([message] * n, schema=rows.MESSAGES_SCHEMA)


def transaction_rows(*commit_lsns: int) -> pa.RecordBatch:
    made = [
        {
            "xid": 700 + i,
            "commit_lsn": lsn,
            "end_lsn": lsn + 0x30,
            "commit_timestamp": TIMESTAMP_US + i,
            "gid": "g" if i % 2 else None,
            "streamed": False,
            "rows": i,
            "tables": ["public.t"] * i,
        }
        for i, lsn in enumerate(commit_lsns)
    ]
    return pa.RecordBatch.from_pylist(made, schema=rows.TRANSACTIONS_SCHEMA)


def unit(transactions: pa.RecordBatch, n_rows: int = 0, **parts: tuple) -> Sealed:
    empty = {"memory": (), "segments": (), "messages": ()}
    return Sealed(transactions, **{**empty, **parts}, n_rows=n_rows, n_bytes=10 * n_rows)  # type: ignore[arg-type]


def table(n: int) -> RelationVersion:
    return RelationVersion(n, "public", f"t{n}", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))


def rows_of(relation: RelationVersion, n: int, lsn: int) -> pa.Table:
    row = {"_change_type": "insert", "_commit_lsn": lsn, "_commit_timestamp": 0, "_xid": 7}
    made = [{"a": f"{relation.table} {i}", **row, "_seq": i, "_text": [("a", "x")]} for i in range(n)]
    return pa.Table.from_pylist(made, schema=rows.contract_schema(relation))


class Written:
    """A file with each kind of part, and what it was written from."""

    def __init__(self, storage: Storage, layout: Layout, relation: RelationVersion) -> None:
        self.storage, self.layout, self.store = storage, layout, Store()
        self.units, self.ends = zip(*self._units(relation), strict=True)
        self.file = write_journal_file(storage, layout, 3, self.units, self.ends, self.store.fetch)
        self.key = layout.journal_key(3)

    def _units(self, relation: RelationVersion) -> Sequence[tuple[Sealed, UnitEnd]]:
        layout, storage = self.layout, self.storage
        of_few = UnitParts(self.store.put, 1)
        of_few.add(table(1), rows_of(table(1), 5, 0x1000))
        of_few.add(table(1), pa.concat_tables([rows_of(table(1), 1, 0x1100), rows_of(table(1), 2, 0x1100)]))
        of_many = UnitParts(self.store.put, FEW_TABLES + 4)
        for n in range(FEW_TABLES + 4):
            of_many.add(table(n), rows_of(table(n), n + 1, 0x3000))
        batches = [make_batch(relation, 0, 300), make_batch(relation, 300, 7)]
        segment_keys = [layout.segment_key(Xid(XID), Lsn(0x1800), n) for n in (0, 1)]
        segments = [write_segment(storage, key, relation, XID, batches) for key in segment_keys]
        of_transaction = write_messages(
            storage, layout.messages_key(Xid(XID), Lsn(0x1800), 2), [message_rows(3)]
        )
        outside = write_messages(storage, layout.messages_key(Xid(0), Lsn(0x1900), 0), [message_rows(2)])
        messages = (
            InlineMessages(message_rows(2)),
            SpilledMessages(of_transaction, Lsn(0x2000), Xid(XID)),
            MemoryMessages(17, self.store.put(pa.Table.from_batches([message_rows(4)]))),
            InlineMessages(message_rows(1, 0x200)),
        )
        yield (
            dataclasses.replace(
                unit(transaction_rows(0x1000, 0x1100), 8, memory=of_few.finish()),
                left_out=((Xid(9), Lsn(0x1080)),),
            ),
            UnitEnd(Lsn(0x1000), Lsn(0x1100), Lsn(0x1130), 2),
        )
        yield (
            unit(
                transaction_rows(0x2000),
                614,
                segments=tuple(SegmentPart(segment, COMMIT) for segment in segments),
                messages=messages,
            ),
            UnitEnd(Lsn(0x2000), Lsn(0x2000), Lsn(0x2030), 1),
        )
        yield (
            unit(transaction_rows(), messages=(SpilledMessages(outside), InlineMessages(message_rows(1)))),
            UnitEnd(INVALID_LSN, INVALID_LSN, Lsn(0x2400), 0),
        )
        yield (
            unit(transaction_rows(0x3000), 210, memory=of_many.finish()),
            UnitEnd(Lsn(0x3000), Lsn(0x3000), Lsn(0x3030), 1),
        )

    def load(self, store: Store | None = None) -> list[tuple[UnitEnd, Sealed]]:
        store = Store() if store is None else store
        return load_journal_units(self.storage, self.layout, self.file, store.put)


@pytest.fixture
def written(storage, layout, relation) -> Written:
    return Written(storage, layout, relation)


def without_refs(unit: Sealed) -> Sealed:
    return dataclasses.replace(
        unit,
        memory=tuple(dataclasses.replace(part, ref=None) for part in unit.memory),
        messages=tuple(
            dataclasses.replace(part, ref=None) if isinstance(part, MemoryMessages) else part
            for part in unit.messages
        ),
    )


def test_units_come_back_as_written_but_for_their_references(written, relation) -> None:
    loaded_into = Store()
    loaded = written.load(loaded_into)
    assert [end for end, _ in loaded] == list(written.ends)
    for (_, found), unit in zip(loaded, written.units, strict=True):
        assert without_refs(found) == without_refs(unit)
        for part, before in zip(found.memory, unit.memory, strict=True):
            original = part_rows(before, lambda ref: written.store[ref].to_batches())
            assert part_rows(part, lambda ref: loaded_into[ref].to_batches()) == original
        for part, before in zip(found.messages, unit.messages, strict=True):
            if isinstance(part, MemoryMessages):
                assert loaded_into[part.ref] == written.store[before.ref]
    (_, large), *_ = loaded[1:]
    assert read(written.storage, large.segments[0].segment).num_rows == 307
