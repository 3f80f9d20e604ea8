"""What an open transaction holds, spills and gives; and which buffer holds which."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import rows
from pipeline.buffer import BufferMemory, OpenTransaction
from pipeline.errors import IllegalTransition
from pipeline.handoff import Segment, TransactionEnd
from pipeline.pg import Lsn, Xid
from pipeline.relations import Column, RelationVersion, ReplicaIdentity


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


def runs(owners: list[int], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    subxid = np.array(owners, np.uint32)
    starts = np.flatnonzero(np.concatenate(([True], subxid[1:] != subxid[:-1])))
    counts = np.diff(np.concatenate((starts, [len(owners)])))
    return subxid[starts], (starts + first).astype(np.int64), counts.astype(np.int64)


def add(transaction: OpenTransaction, owners: list[int], table: RelationVersion = T) -> None:
    first = transaction.n_rows
    transaction.add([block(table, owners, first)], None, runs(owners, first), len(owners))


def spill(transaction: OpenTransaction, table: RelationVersion = T) -> Segment:
    batches = transaction.take_group(table)
    n = sum(b.num_rows for b in batches)
    segment = Segment(f"key-{transaction.n_segments}", table, n, 100 * n, "0")
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


def test_nested_rollback_to_savepoint_keeps_505_rows() -> None:
    transaction, store = make(), Store()
    add(transaction, [700] * 500)
    add(transaction, [701] * 500)
    transaction.abort_subtransactions([Xid(701)])
    add(transaction, [702] * 5)
    sealed = transaction.seal(END, store.put)
    assert sealed.n_rows == 505
    kept = values(store[0])
    assert [seq for _, seq in kept] == list(range(505))
    assert kept[500][0] == "v1000"


def test_rolled_back_rows_in_segments_are_counted_out_and_described_not_rewritten() -> None:
    transaction, store = make(), Store()
    add(transaction, [700, 701, 701, 700])
    spill(transaction)
    add(transaction, [702, 700])
    transaction.abort_subtransactions([Xid(701), Xid(702), Xid(999)])
    sealed = transaction.seal(END, store.put)
    (part,) = sealed.segments
    assert part.n_rows == 2 and part.segment.n_rows == 4
    assert part.dropped.first.tolist() == [1, 4] and part.dropped.count.tolist() == [2, 1]
    assert values(store[0]) == [("v5", 2)]
    assert sealed.n_rows == 3
    row = sealed.transactions.to_pylist()[0]
    assert (row["rows"], row["tables"], row["streamed"], row["commit_lsn"]) == (3, ["public.t"], True, 100)


def test_transaction_that_rolled_back_everything_leaves_no_row_and_no_transaction() -> None:
    transaction, store = make(), Store()
    add(transaction, [701, 701])
    spill(transaction)
    transaction.abort_subtransactions([Xid(701)])
    sealed = transaction.seal(END, store.put)
    assert sealed.n_rows == 0 and sealed.segments == () and sealed.transactions.num_rows == 0
    assert transaction.segment_keys() == ["key-0"]


def test_messages_get_the_commit_lsn_at_the_end() -> None:
    transaction = make()
    message = pa.RecordBatch.from_pylist(
        [{"lsn": 50, "xid": 700, "transactional": True, "prefix": "p", "content": b"c"}],
        schema=rows.MESSAGES_SCHEMA,
    )
    transaction.add(
        [], message, runs([700], 0)[:0] or (np.empty(0, np.uint32), np.empty(0, int), np.empty(0, int)), 0
    )
    sealed = transaction.seal(END, Store().put)
    assert sealed.messages is not None and sealed.messages.to_pylist()[0]["commit_lsn"] == 100
    assert sealed.transactions.num_rows == 1


def test_prepared_record_holds_everything_and_refuses_rows_in_memory() -> None:
    transaction = make()
    add(transaction, [700, 701])
    transaction.abort_subtransactions([Xid(701)])
    with pytest.raises(IllegalTransition):
        transaction.prepared("g", Lsn(10), Lsn(14), None, None)
    segment = spill(transaction)
    record = transaction.prepared("g", Lsn(10), Lsn(14), "upstream", None)
    assert record.segments == (segment,) and record.segment_rows == (1,)
    assert record.dropped.first.tolist() == [1] and record.origin == "upstream"


def test_sealed_transaction_takes_nothing_more() -> None:
    transaction = make()
    add(transaction, [700])
    transaction.seal(END, Store().put)
    for illegal in (
        lambda: add(transaction, [700]),
        lambda: transaction.abort_subtransactions([Xid(1)]),
        lambda: transaction.seal(END, Store().put),
    ):
        with pytest.raises(IllegalTransition, match="transaction 700"):
            illegal()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(700, 706), min_size=1, max_size=12), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.sets(st.integers(700, 706)),
)
def test_kept_rows_and_their_numbers_equal_a_naive_model(
    blocks: list[tuple[list[int], bool]], aborted: set[int]
) -> None:
    """Random blocks, spills and aborts; in memory or in segments, each row gets the number a list would give."""
    transaction, store, segments = make(), Store(), {}
    model: list[int] = []
    for owners, then_spill in blocks:
        add(transaction, owners)
        model += owners
        if then_spill:
            batches = transaction.take_group(T)
            n = sum(b.num_rows for b in batches)
            segment = Segment(f"key-{len(segments)}", T, n, n, "0")
            segments[segment.key] = batches
            transaction.spilled(segment, batches)
    transaction.abort_subtransactions(Xid(a) for a in aborted)
    sealed = transaction.seal(END, store.put)
    got = [row for table in store.values() for row in values(table)]
    for part in sealed.segments:
        released = [rows.release(b, T, part.stamp, part.dropped) for b in segments[part.segment.key]]
        assert sum(r.num_rows for r in released) == part.n_rows
        got += [row for r in released for row in values(pa.table(r))]
    kept = [f"v{i}" for i, owner in enumerate(model) if owner not in aborted]
    assert sorted(got, key=lambda row: row[1]) == [(v, seq) for seq, v in enumerate(kept)]
    assert sealed.n_rows == len(kept)


def test_largest_group_is_spilled_first_until_the_rest_fits() -> None:
    small, large = make(), OpenTransaction(Xid(800), Lsn(2), streamed=True)
    add(small, [700] * 10)
    add(large, [800] * 1000)
    add(large, [800] * 100, U)
    memory = BufferMemory(limit_bytes=small.n_bytes + large.group_sizes()[U])
    order = memory.next_spill([small, large])
    assert order is not None and order.transaction is large and order.relation == T
    spill(large)
    assert memory.next_spill([small, large]) is None


def message(transaction: OpenTransaction, content: bytes) -> None:
    values = [None, 50, None, True, "p", content]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([v], f.type) for v, f in zip(values, rows.MESSAGES_SCHEMA, strict=True)],
        schema=rows.MESSAGES_SCHEMA,
    )
    empty = np.array([], np.int64)
    transaction.add([], batch, (empty.astype(np.uint32), empty, empty), 0)


def test_messages_are_spilled_as_a_group_of_their_own_and_rows_stay() -> None:
    """They counted, but could not go: every group of rows was spilled at once instead, however small."""
    transaction = OpenTransaction(Xid(700), Lsn(1), streamed=True)
    add(transaction, [700] * 3)
    rows_bytes = transaction.n_bytes
    message(transaction, b"x" * 10_000)
    memory = BufferMemory(rows_bytes + 5_000)
    order = memory.next_spill([transaction])
    assert order is not None and order.relation is None
    stored = {"k": transaction.take_messages()}
    transaction.messages_spilled("k")
    assert transaction.n_bytes == rows_bytes and memory.next_spill([transaction]) is None
    message(transaction, b"later")
    assert transaction.segment_keys() == ["k"] and transaction.n_segments == 1
    transaction.give_messages_back(stored.__getitem__)
    sealed = transaction.seal(END, lambda table: table)
    assert sealed.messages is not None
    assert [len(m) for m in sealed.messages.column("content").to_pylist()] == [10_000, 5]
    assert sealed.messages.column("commit_lsn").to_pylist() == [100, 100]


def test_many_small_batches_count_as_the_memory_that_they_take() -> None:
    """A hundred open transactions made a buffer grow to four times its limit: only values were counted."""
    few, many = (OpenTransaction(Xid(n), Lsn(1), streamed=True) for n in (700, 800))
    add(few, [700] * 1000)
    for _ in range(100):
        add(many, [800] * 10)
    columns = len(rows.internal_schema(T))
    assert many.n_bytes - few.n_bytes > 99 * columns * 500
