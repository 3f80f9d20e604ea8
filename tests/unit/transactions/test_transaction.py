"""What an open transaction holds, spills and gives; and which buffer holds which."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_parts import part_rows
from xidstream.pipeline.errors import IllegalTransition
from xidstream.pipeline.exchange import (
    InlineMessages,
    MemoryMessages,
    MessageFile,
    Segment,
    SpilledMessages,
    TransactionEnd,
)
from xidstream.pipeline.parquet import RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.transactions.groups import Groups
from xidstream.pipeline.transactions.memory import BufferMemory
from xidstream.pipeline.transactions.sealed import transaction_row
from xidstream.pipeline.transactions.transaction import OpenTransaction


def relation(table: str = "t", relid: int = 1) -> RelationVersion:
    return RelationVersion(relid, "public", table, ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))


T = relation()
U = relation("u", 2)
END = TransactionEnd(Xid(700), Lsn(100), Lsn(104), 1_000, streamed=True)


def block(table: RelationVersion, owners: list[int], first: int) -> tuple[RelationVersion, pa.RecordBatch]:
    n = len(owners)
    return table, pa.RecordBatch.from_arrays(
        [
            pa.array([rows.INSERT] * n, pa.int8()),
            pa.array(owners, pa.uint32()),
            pa.array(range(first, first + n), pa.int64()),
            pa.nulls(n, rows.INTERNAL_FIELDS[3].type),
            pa.nulls(n, rows.INTERNAL_FIELDS[4].type),
            pa.array([f"v{i}" for i in range(first, first + n)]),
        ],
        schema=rows.internal_schema(table),
    )


def runs(owners: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    subxid = np.array(owners, np.uint32)
    starts = np.flatnonzero(np.concatenate((np.ones(min(len(owners), 1), bool), subxid[1:] != subxid[:-1])))
    return subxid[starts], (starts + first).astype(np.int64)


def add(transaction: OpenTransaction, owners: list[int], table: RelationVersion = T) -> None:
    first = transaction.n_rows
    transaction.add_rows(*block(table, owners, first))
    transaction.add(None, runs(owners, first), len(owners))


def spill(transaction: OpenTransaction, table: RelationVersion = T) -> Segment:
    batches = transaction.take_group(table)
    n = sum(b.num_rows for b in batches)
    segment = Segment(f"key-{transaction.n_segments}", table, RowFile(n, 100 * n, "0", 0, ()))
    transaction.spilled(segment, batches)
    return segment


def make() -> OpenTransaction:
    return OpenTransaction(Xid(700), Lsn(1), streamed=True)


class Store(dict):  # type: ignore[type-arg]
    def put(self, table: pa.Table) -> int:
        self[len(self)] = table
        return len(self) - 1


def values(table: pa.Table) -> list[tuple[str, int]]:
    return list(zip(table.column("a").to_pylist(), table.column("_seq").to_pylist(), strict=True))


def test_messages_get_the_commit_lsn_at_the_end() -> None:
    transaction = make()
    message = pa.RecordBatch.from_pylist(
        [{"lsn": 50, "xid": 700, "transactional": True, "prefix": "p", "content": b"c"}],
        schema=rows.MESSAGES_SCHEMA,
    )
    transaction.add(message, runs([], 0), 0)
    sealed = transaction.seal(END, Store().put)
    (part,) = sealed.messages
    assert isinstance(part, InlineMessages) and part.rows.to_pylist()[0]["commit_lsn"] == 100
    assert sealed.transactions.num_rows == 1
    assert sealed.n_bytes == part.n_bytes > 0


def test_prepared_record_holds_everything_and_refuses_rows_in_memory() -> None:
    transaction = make()
    add(transaction, [700, 701])
    with pytest.raises(IllegalTransition):
        transaction.prepared("g", Lsn(10), Lsn(14), None)
    segment = spill(transaction)
    record = transaction.prepared("g", Lsn(10), Lsn(14), "upstream")
    assert record.segments == (segment,) and record.origin == "upstream"


@pytest.mark.parametrize("how", ["sealed", "prepared"])
def test_what_gave_its_content_away_takes_and_gives_nothing_more(how: str) -> None:
    transaction, store = make(), Store()
    add(transaction, [700])
    if how == "sealed":
        transaction.seal(END, store.put)
    else:
        spill(transaction)
        transaction.prepared("g", Lsn(10), Lsn(14), None)
    illegal = (
        lambda: add(transaction, [700]),
        lambda: transaction.roll_back([701]),
        lambda: transaction.take_group(T),
        transaction.take_messages,
        lambda: transaction.seal(END, store.put),
        lambda: transaction.prepared("g", Lsn(10), Lsn(14), None),
    )
    for step in illegal:
        with pytest.raises(IllegalTransition, match="transaction 700 sealed"):
            step()


def wide(transaction: OpenTransaction, owner: int, n_bytes: int) -> None:
    """One row of so many bytes."""
    first = transaction.n_rows
    relation, batch = block(T, [owner], first)
    batch = batch.set_column(5, batch.schema.field(5), pa.array(["x" * n_bytes]))
    transaction.add_rows(relation, batch)
    transaction.add(None, runs([owner], first), 1)


def test_what_is_large_is_given_away_in_parts_and_each_row_once() -> None:
    transaction, store = make(), Store()
    for n in range(4):
        wide(transaction, 700, (3 << 20) + n)
    sealed = transaction.seal(END, store.put)
    assert [part.n_rows for part in sealed.memory] == [3, 1] == [t.num_rows for t in store.values()]
    got = [(len(a), seq) for table in store.values() for a, seq in values(table)]
    assert got == [((3 << 20) + n, n) for n in range(4)]
    assert sealed.n_rows == 4
    assert sealed.n_bytes == sum(part.n_bytes for part in sealed.memory) > 12 << 20


def test_what_is_in_storage_counts_as_what_is_in_memory_does() -> None:
    transaction, store = make(), Store()
    add(transaction, [700, 700], U)
    segment = spill(transaction, U)
    add(transaction, [700], T)
    sealed = transaction.seal(END, store.put)
    assert sealed.n_bytes == segment.n_bytes + sealed.memory[0].n_bytes > segment.n_bytes
    assert sealed.n_rows == 3
    assert sealed.transactions.to_pylist()[0]["tables"] == ["public.t", "public.u"]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_record_of_a_prepare_says_what_its_commit_will_need(streamed: bool) -> None:
    transaction = OpenTransaction(Xid(700), Lsn(1), streamed=streamed)
    message(transaction, b"x", b"y", b"z")
    with pytest.raises(IllegalTransition, match="messages still in memory"):
        transaction.prepared("gid", Lsn(10), Lsn(14), "upstream")
    file = spill_messages(transaction)
    record = transaction.prepared("gid", Lsn(10), Lsn(14), "upstream")
    assert (record.xid, record.gid, record.streamed, record.origin) == (700, "gid", streamed, "upstream")
    assert (record.prepare_lsn, record.prepare_end_lsn) == (10, 14)
    assert record.messages == (file,) and record.stored_keys() == [file.key]


@pytest.mark.parametrize(("gid", "origin", "streamed"), [(None, None, True), ("g", "upstream", False)])
def test_the_row_of_a_transaction_says_what_its_end_said(
    gid: str | None, origin: str | None, streamed: bool
) -> None:
    end = TransactionEnd(Xid(700), Lsn(100), Lsn(104), 1_000_000, streamed, gid, origin)
    assert transaction_row(end, 3, ["public.t"], with_messages=False).to_pylist() == [
        {
            "xid": 700,
            "commit_lsn": 100,
            "end_lsn": 104,
            "commit_timestamp": datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.timezone.utc),
            "gid": gid,
            "origin": origin,
            "streamed": streamed,
            "rows": 3,
            "tables": ["public.t"],
        }
    ]
    assert transaction_row(end, 0, [], with_messages=False).num_rows == 0
    assert transaction_row(end, 0, [], with_messages=True).num_rows == 1


def test_largest_group_is_spilled_first_until_the_rest_fits() -> None:
    small, large = make(), OpenTransaction(Xid(800), Lsn(2), streamed=True)
    add(small, [700] * 10)
    add(large, [800] * 1000)
    add(large, [800] * 100, U)
    n_run_bytes = large.n_bytes - large.n_row_bytes
    memory = BufferMemory(limit_bytes=small.n_bytes + large.group_sizes()[U] + n_run_bytes)
    order = memory.next_spill([small, large])
    assert order is not None and order.transaction is large and order.relation == T
    spill(large)
    assert memory.next_spill([small, large]) is None


def test_what_tells_whose_rows_they_are_counts_and_leaves_rows_half_of_the_limit() -> None:
    """A transaction of ten million savepoints kept 120 MB that nobody counted."""
    transaction = make()
    add(transaction, list(range(700, 10_700)))
    n_row_bytes, n_run_bytes = transaction.n_row_bytes, transaction.n_bytes - transaction.n_row_bytes
    assert 120_000 <= n_run_bytes <= 130_000
    assert BufferMemory(n_row_bytes + n_run_bytes).next_spill([transaction]) is None
    assert BufferMemory(n_row_bytes + n_run_bytes // 2).next_spill([transaction]) is not None
    many = make()
    add(many, [700])
    many._survivors.n_bytes = 1 << 30
    assert BufferMemory(2 * many.n_row_bytes).next_spill([many]) is None, "it would spill each row by itself"
    transaction.roll_back(range(800, 10_700))
    assert transaction.n_bytes - transaction.n_row_bytes <= 2_000


def spill_messages(transaction: OpenTransaction) -> MessageFile:
    n_messages = sum(batch.num_rows for batch in transaction.take_messages())
    file = MessageFile(f"key-{transaction.n_segments}", n_messages, 100 * n_messages, "0")
    transaction.messages_spilled(file)
    return file


def message(transaction: OpenTransaction, *contents: bytes) -> None:
    """As written under a subtransaction's xid."""
    columns = [[v] * len(contents) for v in (None, 50, 701, True, "p")]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(v, f.type) for v, f in zip([*columns, contents], rows.MESSAGES_SCHEMA, strict=True)],
        schema=rows.MESSAGES_SCHEMA,
    )
    transaction.add(batch, runs([], 0), 0)


def test_messages_are_spilled_as_a_group_of_their_own_and_rows_stay() -> None:
    """They counted, but could not go: every group of rows was spilled at once instead, however small."""
    transaction = OpenTransaction(Xid(700), Lsn(1), streamed=True)
    add(transaction, [700] * 3)
    rows_bytes = transaction.n_bytes
    message(transaction, b"x" * 10_000)
    memory = BufferMemory(rows_bytes + 5_000)
    order = memory.next_spill([transaction])
    assert order is not None and order.relation is None
    file = spill_messages(transaction)
    assert transaction.n_bytes == rows_bytes and memory.next_spill([transaction]) is None
    message(transaction, b"later")
    assert transaction.segment_keys() == [file.key] and transaction.n_segments == 1
    sealed = transaction.seal(END, lambda table: table)
    spilled, inline = sealed.messages
    assert spilled == SpilledMessages(file, Lsn(100), Xid(700))
    assert isinstance(inline, InlineMessages)
    (row,) = inline.rows.to_pylist()
    assert (row["content"], row["commit_lsn"], row["xid"]) == (b"later", 100, 700)
    assert sealed.stored_keys() == [file.key]
    assert sealed.n_bytes == sealed.memory[0].n_bytes + file.n_bytes + inline.n_bytes


def test_messages_in_memory_are_given_by_reference_in_parts_and_each_once() -> None:
    """They went by value, in one batch: through the object store, the sequencer and the driver at their whole size."""
    transaction, store = OpenTransaction(Xid(700), Lsn(1), streamed=True), Store()
    sizes = [(3 << 20) + n for n in range(7)]
    for size in sizes:
        message(transaction, b"x" * size)
    sealed = transaction.seal(END, store.put)
    assert all(isinstance(part, MemoryMessages) for part in sealed.messages)
    assert [table.num_rows for table in store.values()] == [3, 3, 1]
    assert [len(c) for t in store.values() for c in t.column("content").to_pylist()] == sizes
    assert {lsn for t in store.values() for lsn in t.column("commit_lsn").to_pylist()} == {100}
    assert sealed.n_bytes == sum(part.n_bytes for part in sealed.messages) > sum(sizes)


def test_a_block_too_large_for_memory_is_spilled_whatever_the_limit_leaves() -> None:
    rows_, messages = make(), OpenTransaction(Xid(800), Lsn(2), streamed=True)
    wide(rows_, 700, 65 << 20)
    message(messages, b"x" * (65 << 20))
    small = make()
    for _ in range(3):
        wide(small, 700, 30 << 20)
        message(small, b"x" * (30 << 20))
    memory = BufferMemory(1 << 40)
    assert memory.next_spill([small]) is None
    order = memory.next_spill([small, rows_])
    assert order is not None and order.transaction is rows_ and order.relation == T
    order = memory.next_spill([small, messages])
    assert order is not None and order.transaction is messages and order.relation is None


def test_many_small_batches_count_as_the_memory_that_they_take() -> None:
    """A hundred open transactions made a buffer grow to four times its limit: only values were counted."""
    few, many = (OpenTransaction(Xid(n), Lsn(1), streamed=True) for n in (700, 800))
    add(few, [700] * 1000)
    for _ in range(100):
        add(many, [800] * 10)
    columns = len(rows.internal_schema(T))
    assert many.n_bytes - few.n_bytes > 99 * columns * 500


def test_rows_of_thousands_of_tables_are_given_away_in_few_objects() -> None:
    transaction, store = make(), Store()
    tables = [relation(f"t{n}", n) for n in range(2_000)]
    for table in tables:
        add(transaction, [700], table)
    wide_rows = ["x" * 100_000]
    version, batch = block(tables[7], [700], transaction.n_rows)
    batch = batch.set_column(5, batch.schema.field(5), pa.array(wide_rows))
    transaction.add_rows(version, batch)
    transaction.add(None, runs([700], transaction.n_rows), 1)
    sealed = transaction.seal(END, store.put)
    alone = [part for part in sealed.memory if part.pack_index is None]
    assert [(part.relation, part.n_rows) for part in alone] == [(tables[7], 2)], "what is large has its own"
    assert len(store) == 2
    read = [part_rows(part, lambda ref: iter(store[ref].to_batches())) for part in sealed.memory]
    got = {part.relation: values(table) for part, table in zip(sealed.memory, read, strict=True)}
    assert got == {
        table: [(f"v{n}", n), (wide_rows[0], 2_000)] if n == 7 else [(f"v{n}", n)]
        for n, table in enumerate(tables)
    }
    assert sealed.n_rows == 2_001
    stored = sum(table.nbytes for table in store.values())
    assert 0.9 * stored < sealed.n_bytes <= stored, "all bytes count, those of the Arrow messages, too"


def test_thousands_of_groups_are_spilled_without_a_look_at_all_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transaction = make()
    tables = [relation(f"t{n}", n) for n in range(2_000)]
    for table in tables:
        add(transaction, [700], table)
    looks, size = [0], Groups.size

    def counting(groups: Groups, key: RelationVersion | None) -> int:
        looks[0] += 1
        return size(groups, key)

    monkeypatch.setattr(Groups, "size", counting)
    memory, spilled = BufferMemory(0), set()
    while (order := memory.next_spill([transaction])) is not None:
        assert order.relation is not None
        transaction.take_group(order.relation)
        spilled.add(order.relation)
    assert (spilled, transaction.n_row_bytes) == (set(tables), 0)
    assert looks[0] <= 3 * len(tables)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["add", "spill", "take"]), st.integers(1, 9)),
        max_size=200,
    )
)
def test_the_largest_group_is_that_of_a_naive_model(steps: list[tuple[int, str, int]]) -> None:
    groups, model = Groups(), {}
    tables = [relation(f"t{n}", n) for n in range(6)]
    for which, step, n_rows in steps:
        table = tables[which]
        if step == "add":
            before = groups.n_bytes
            groups.add(table, block(table, [700] * n_rows, 0)[1])
            model[table] = model.get(table, 0) + groups.n_bytes - before
        elif step == "take" and table in model:
            groups.take(table)
            del model[table]
        elif step == "spill" and (found := groups.to_spill()) is not None:
            assert found[0] == model.pop(found[1]) >= max(model.values(), default=0)
            groups.take(found[1])
        assert groups.n_bytes == sum(model.values())
        assert {key: groups.size(key) for key in groups} == model
        assert (groups.to_spill() is None) == (not model)
