"""Commit order and confirmed position, by scenario and against a naive model."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.prepared import PreparedBook, stamp_segments
from xidstream.pipeline.errors import IllegalTransition, PoisonedChange, ProtocolViolation, SlotLost
from xidstream.pipeline.exchange import (
    Pace,
    PrepareCover,
    PreparedTransaction,
    Sealed,
    Segment,
    SegmentPart,
    TransactionEnd,
    Undeliverable,
)
from xidstream.pipeline.parquet import CommitStamp, RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.transactions.sealed import transaction_row, undeliverable_unit


def content(n_rows: int = 1, n_bytes: int = 10, xid: int = 700) -> Sealed:
    end = TransactionEnd(Xid(xid), Lsn(1), Lsn(2), 0)
    return Sealed(transaction_row(end, n_rows, (), with_messages=False), (), (), (), n_rows, n_bytes)


def make_order(rows: int = 100, n_bytes: int = 10_000) -> CommitOrder:
    return CommitOrder(batch_rows=rows, batch_bytes=n_bytes)


def add(order: CommitOrder, ticket: int, commit_lsn: int) -> None:
    order.add_unit(ticket, Lsn(commit_lsn), Lsn(commit_lsn), Lsn(commit_lsn + 4), 1)


def test_transaction_that_is_sealed_first_waits_for_the_one_that_committed_first() -> None:
    order = make_order()
    add(order, 0, 100)
    add(order, 1, 200)
    order.content_arrived(1, content())
    assert order.next_batch() is None
    order.content_arrived(0, content())
    batch = order.next_batch()
    assert batch is not None and (batch.first_commit_lsn, batch.last_commit_lsn) == (100, 200)


def test_what_may_grow_is_few_rows_in_memory_that_committed_just_now() -> None:
    pace, now_us = Pace(hold_s=1.0, large_rows=20, behind_s=3.0), 10_000_000

    def is_pressing(*contents: Sealed, rows: int = 100, n_bytes: int = 10_000) -> bool:
        order = make_order(rows, n_bytes)
        for i, each in enumerate(contents):
            add(order, i, 100 * (i + 1))
            order.content_arrived(i, each)
        add(order, len(contents), 900)  # it is not filled yet
        return order.is_pressing(pace, now_us)

    def of(n_rows: int, committed_us: int = now_us) -> Sealed:
        end = TransactionEnd(Xid(700), Lsn(1), Lsn(2), committed_us)
        return Sealed(transaction_row(end, n_rows, (), with_messages=False), (), (), (), n_rows, 10)

    assert not is_pressing()
    assert not is_pressing(of(10), of(9))
    assert is_pressing(of(10), of(10)), "many rows"
    assert not is_pressing(of(10), rows=11) and is_pressing(of(10), of(1), rows=11), (
        "no more rows fit into it"
    )
    assert not is_pressing(of(1), n_bytes=11) and is_pressing(of(1), of(1), n_bytes=20), "nor more bytes"
    table = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))
    part = SegmentPart(Segment("key", table, RowFile(1, 1000, "0", 0, ())), CommitStamp(100, now_us))
    assert is_pressing(of(1), dataclasses.replace(of(1), segments=(part,))), "a large transaction"
    assert not is_pressing(of(1, now_us - 3_000_000))
    assert is_pressing(of(1, now_us - 3_000_001)), "the sink is behind"
    nothing = dataclasses.replace(of(0), transactions=of(0).transactions.slice(1))
    assert is_pressing(nothing, of(1, 0)), "messages outside of transactions say no time"


def test_poison_stands_in_the_order_behind_all_that_committed_before_it() -> None:
    order = make_order(rows=1)
    for ticket in range(4):
        add(order, ticket, 100 * (ticket + 1))
    order.content_arrived(2, undeliverable_unit(PoisonedChange("bad")))
    order.content_arrived(3, content())
    assert order.undeliverable is None and order.next_batch() is None, "what came first is not there yet"
    order.content_arrived(1, content())
    order.content_arrived(0, content())
    first, second = order.next_batch(), order.next_batch()
    assert first is not None and second is not None and order.next_batch() is None
    order.batch_done(first.number)
    assert order.undeliverable is None, "the sink has not all yet"
    order.batch_done(second.number)
    assert isinstance(order.undeliverable, PoisonedChange)
    assert (order.confirmed_lsn, order.done_ticket) == (204, 1)
    assert order.next_batch() is None, "nothing behind it is released"


def test_a_block_with_poison_gives_the_transactions_before_it_and_confirms_no_further() -> None:
    order = make_order()
    order.add_unit(0, Lsn(100), Lsn(300), Lsn(304), 3)
    add(order, 1, 400)
    order.add_position(2, Lsn(500))
    halt = Undeliverable(PoisonedChange("bad"), Lsn(100), Lsn(104), 1)
    order.content_arrived(0, dataclasses.replace(content(), undeliverable=halt))
    order.content_arrived(1, content())
    batch = order.next_batch()
    assert batch is not None
    assert (batch.first_commit_lsn, batch.last_commit_lsn, batch.end_lsn) == (100, 100, 104)
    assert batch.n_transactions == 1
    assert order.next_batch() is None, "what follows the block waits behind its poison"
    order.batch_done(batch.number)
    assert isinstance(order.undeliverable, PoisonedChange)
    assert (order.confirmed_lsn, order.done_ticket) == (104, -1)
    with pytest.raises(IllegalTransition):
        order.batch_done(batch.number)


def test_position_is_confirmed_only_behind_the_sink() -> None:
    order = make_order()
    add(order, 0, 100)
    order.add_position(1, Lsn(500))
    order.content_arrived(0, content())
    batch = order.next_batch()
    assert batch is not None and order.confirmed_lsn == 0
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 500 and order.done_ticket == 1


def test_batches_reported_out_of_order_confirm_the_contiguous_prefix_only() -> None:
    order = make_order(rows=1)
    for ticket in range(3):
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, content())
    first, second, third = (order.next_batch() for _ in range(3))
    assert first and second and third
    order.batch_done(third.number)
    order.batch_done(second.number)
    assert order.confirmed_lsn == 0
    order.batch_done(first.number)
    assert order.confirmed_lsn == 304


def test_idle_positions_are_confirmed_at_once_and_never_go_back() -> None:
    order = make_order()
    order.add_position(0, Lsn(500))
    order.add_position(1, Lsn(400))
    assert order.confirmed_lsn == 500


def test_prepare_holds_the_position_until_its_content_is_durable_but_not_the_release() -> None:
    order = make_order()
    order.add_hold(0, Lsn(50))
    add(order, 1, 100)
    order.content_arrived(1, content())
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 0 and order.holds_before(1)
    order.resolve(0)
    assert order.confirmed_lsn == 104 and not order.holds_before(1)


def test_batch_is_bounded_and_a_larger_transaction_is_a_batch_of_its_own() -> None:
    order = make_order(rows=10)
    for ticket, n in enumerate((4, 4, 4, 1000, 1)):
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, content(n_rows=n))
    sizes = []
    while (batch := order.next_batch()) is not None:
        sizes.append(batch.n_rows)
    assert sizes == [8, 4, 1000, 1]


def test_commit_lsn_that_does_not_grow_is_refused() -> None:
    order = make_order()
    add(order, 0, 200)
    with pytest.raises(IllegalTransition, match=r"0/64.*0/C8"):
        add(order, 1, 100)


def test_lost_ticket_is_noticed() -> None:
    order = make_order()
    with pytest.raises(IllegalTransition):
        add(order, 1, 100)


def test_illegal_moves_raise_and_change_nothing() -> None:
    order = make_order()
    add(order, 0, 100)
    with pytest.raises(IllegalTransition):
        order.resolve(0)
    order.content_arrived(0, content())
    with pytest.raises(IllegalTransition):
        order.content_arrived(0, content())
    with pytest.raises(IllegalTransition):
        order.batch_done(0)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    with pytest.raises(IllegalTransition):
        order.batch_done(batch.number)
    assert order.confirmed_lsn == 104


def test_a_transaction_is_done_by_the_sink_alone_and_a_prepare_by_its_record_alone() -> None:
    order = make_order()
    add(order, 0, 100)
    order.content_arrived(0, content())
    with pytest.raises(IllegalTransition):
        order.resolve(0)
    batch = order.next_batch()
    assert batch is not None
    with pytest.raises(IllegalTransition):
        order.resolve(0)
    assert order.confirmed_lsn == 0
    order.add_hold(1, Lsn(150))
    with pytest.raises(IllegalTransition):
        order.content_arrived(1, content())
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 104 and order.next_batch() is None
    order.resolve(1)
    with pytest.raises(IllegalTransition):
        order.resolve(1)
    assert order.confirmed_lsn == 150


@pytest.mark.parametrize(
    ("first", "last"),
    [(300, 300), (200, 200), (100, 400), (400, 350)],
    ids=["same", "inside", "before", "reversed"],
)
def test_what_does_not_begin_behind_the_last_commit_of_all_is_refused_and_changes_nothing(
    first: int, last: int
) -> None:
    order = make_order()
    order.add_unit(0, Lsn(100), Lsn(300), Lsn(304), 2)
    with pytest.raises(IllegalTransition):
        order.add_unit(1, Lsn(first), Lsn(last), Lsn(last + 4), 2)
    assert order.n_waiting == 1 and order.next_ticket == 1
    add(order, 1, 301)


def test_a_unit_of_messages_alone_takes_its_place_and_confirms_nothing() -> None:
    order = make_order()
    add(order, 0, 100)
    order.add_unit(1, Lsn(0), Lsn(0), Lsn(0), 0)
    add(order, 2, 200)
    order.add_unit(3, Lsn(0), Lsn(0), Lsn(0), 0)
    for ticket in range(1, 4):
        order.content_arrived(ticket, content(xid=700 + ticket))
    assert order.next_batch() is None
    order.content_arrived(0, content())
    batch = order.next_batch()
    assert batch is not None and len(batch.units) == 4
    assert (batch.first_commit_lsn, batch.last_commit_lsn, batch.end_lsn) == (100, 200, 204)
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 204 and order.done_ticket == 3


def test_a_batch_of_messages_alone_has_no_position() -> None:
    order = make_order()
    order.add_unit(0, Lsn(0), Lsn(0), Lsn(0), 0)
    order.content_arrived(0, content())
    batch = order.next_batch()
    assert batch is not None
    assert (batch.first_commit_lsn, batch.last_commit_lsn, batch.end_lsn, batch.n_transactions) == (
        0,
        0,
        0,
        0,
    )
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 0 and order.done_ticket == 0


def test_a_batch_says_what_its_units_hold_together() -> None:
    order = make_order()
    order.add_unit(0, Lsn(0), Lsn(0), Lsn(0), 0)
    order.add_unit(1, Lsn(100), Lsn(300), Lsn(304), 3)
    add(order, 2, 400)
    for ticket, (rows, n_bytes) in enumerate(((0, 5), (7, 70), (2, 20))):
        order.content_arrived(ticket, content(rows, n_bytes))
    batch = order.next_batch()
    assert batch is not None
    assert (batch.first_commit_lsn, batch.last_commit_lsn, batch.end_lsn) == (100, 400, 404)
    assert (batch.n_transactions, batch.n_rows, batch.n_bytes) == (4, 9, 95)


@pytest.mark.parametrize(
    ("rows", "n_bytes", "n_units"), [(9, 1000, 3), (8, 1000, 2), (100, 90, 3), (100, 89, 2)]
)
def test_a_batch_is_filled_up_to_its_bounds_and_not_beyond(rows: int, n_bytes: int, n_units: int) -> None:
    order = make_order(rows, n_bytes)
    for ticket in range(4):
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, content(3, 30))
    batch = order.next_batch()
    assert batch is not None and len(batch.units) == n_units


def test_a_small_transaction_behind_a_large_one_does_not_overtake_it() -> None:
    order = make_order(rows=10)
    for ticket, n_rows in enumerate((5, 100, 1)):
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, content(n_rows, xid=ticket))
    released = []
    while (batch := order.next_batch()) is not None:
        released += [u.transactions.column(0)[0].as_py() for u in batch.units]
    assert released == [0, 1, 2]


@pytest.mark.parametrize("kind", ["unit", "hold", "position"])
@pytest.mark.parametrize("ticket", [0, 2], ids=["repeated", "lost"])
def test_an_entry_out_of_turn_is_noticed_whatever_it_is(kind: str, ticket: int) -> None:
    order = make_order()
    add(order, 0, 100)
    with pytest.raises(IllegalTransition):
        if kind == "unit":
            add(order, ticket, 200)
        elif kind == "hold":
            order.add_hold(ticket, Lsn(200))
        else:
            order.add_position(ticket, Lsn(200))
    assert (order.next_ticket, order.n_waiting, order.confirmed_lsn) == (1, 1, 0)


def test_only_a_hold_that_came_before_and_is_not_resolved_is_waited_for() -> None:
    order = make_order()
    add(order, 0, 100)
    order.add_hold(1, Lsn(150))
    add(order, 2, 200)
    order.add_hold(3, Lsn(250))
    assert [order.holds_before(ticket) for ticket in range(5)] == [False, False, True, True, True]
    order.resolve(1)
    assert [order.holds_before(ticket) for ticket in range(5)] == [False, False, False, False, True]
    order.resolve(3)
    assert not any(order.holds_before(ticket) for ticket in range(5))
    assert order.confirmed_lsn == 0, "the transaction before them is not through"


def test_what_is_done_is_forgotten() -> None:
    order = make_order()
    add(order, 0, 100)
    order.content_arrived(0, content())
    batch = order.next_batch()
    assert batch is not None
    (given_back,) = order.batch_done(batch.number)
    assert given_back is batch.units[0] and order.n_waiting == 0
    with pytest.raises(IllegalTransition, match="unknown or already done"):
        order.content_arrived(0, content())


def test_errors_survive_the_way_between_processes() -> None:
    order = make_order()
    with pytest.raises(IllegalTransition) as caught:
        order.content_arrived(7, content())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.remedy == caught.value.remedy


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_interleaving_releases_in_order_and_confirms_only_the_done_prefix(data: st.DataObject) -> None:
    """Entries arrive in order; fills, resolutions and reports come in any order: judged by plain lists."""
    order = make_order(rows=data.draw(st.integers(1, 5)))
    plan = data.draw(st.lists(st.sampled_from(["unit", "hold", "position"]), min_size=1, max_size=14))
    ends = {ticket: 100 * (ticket + 1) + 4 for ticket in range(len(plan))}
    arrived, filled, done, taken, released = 0, set(), set(), {}, []
    for _ in range(200):
        moves = []
        if arrived < len(plan):
            moves.append("arrive")
        unfilled = [t for t in range(arrived) if plan[t] == "unit" and t not in filled]
        unresolved = [t for t in range(arrived) if plan[t] == "hold" and t not in done]
        moves += (
            ["fill"] * bool(unfilled) + ["resolve"] * bool(unresolved) + ["report"] * bool(taken) + ["take"]
        )
        move = data.draw(st.sampled_from(moves))
        if move == "arrive":
            ticket = arrived
            arrived += 1
            if plan[ticket] == "unit":
                add(order, ticket, 100 * (ticket + 1))
            elif plan[ticket] == "hold":
                order.add_hold(ticket, Lsn(ends[ticket]))
            else:
                order.add_position(ticket, Lsn(ends[ticket]))
                done.add(ticket)
        elif move == "fill":
            ticket = data.draw(st.sampled_from(unfilled))
            order.content_arrived(ticket, content(xid=ticket))
            filled.add(ticket)
        elif move == "resolve":
            ticket = data.draw(st.sampled_from(unresolved))
            order.resolve(ticket)
            done.add(ticket)
        elif move == "report":
            number = data.draw(st.sampled_from(sorted(taken)))
            order.batch_done(number)
            done.update(taken.pop(number))
        else:
            batch = order.next_batch()
            units = [t for t in range(arrived) if plan[t] == "unit"]
            ready = []
            for ticket in units[len(released) :]:
                if ticket not in filled:
                    break
                ready.append(ticket)
            assert (batch is None) == (not ready)
            if batch is not None:
                got = [u.transactions.column(0)[0].as_py() for u in batch.units]
                assert got == ready[: len(got)]
                released += got
                taken[batch.number] = got
        prefix = 0
        while prefix < arrived and prefix in done:
            prefix += 1
        expected = max((ends[t] for t in range(prefix)), default=0)
        assert order.confirmed_lsn == expected
        assert order.done_ticket == prefix - 1


def prepared(xid: int = 700, gid: str = "g") -> PreparedTransaction:
    return PreparedTransaction(Xid(xid), gid, Lsn(10), Lsn(14), False, None, ())


def end(commit_lsn: int = 100, xid: int = 700, gid: str = "g") -> TransactionEnd:
    return TransactionEnd(Xid(xid), Lsn(commit_lsn), Lsn(commit_lsn + 4), 0, gid=gid)


def test_commit_prepared_finds_its_record_once() -> None:
    book = PreparedBook([prepared()])
    assert book.commit(end(), Lsn(0)) is not None
    with pytest.raises(SlotLost):
        book.commit(end(), Lsn(0))


def test_commit_prepared_of_an_unknown_prepare_is_nothing_at_or_below_the_watermark() -> None:
    assert PreparedBook().commit(end(100), Lsn(100)) is None


def test_commit_prepared_of_an_unknown_prepare_above_the_watermark_is_terminal() -> None:
    with pytest.raises(SlotLost, match="0/64"):
        PreparedBook().commit(end(100), Lsn(99))


def test_commit_prepared_of_an_unknown_prepare_is_nothing_where_the_storage_covers_it() -> None:
    """PostgreSQL 16 and 17 send K alone for a transaction that only locked rows."""
    book = PreparedBook(cover=PrepareCover(Lsn(100), frozenset({Xid(699)})))
    assert book.commit(end(100), Lsn(0)) is None
    for lost in (end(99), end(100, xid=699)):
        with pytest.raises(SlotLost):
            book.commit(lost, Lsn(0))


def test_commit_prepared_with_another_gid_is_refused_and_keeps_the_record() -> None:
    book = PreparedBook([prepared()])
    with pytest.raises(ProtocolViolation):
        book.commit(end(gid="other"), Lsn(0))
    assert len(book) == 1


def test_a_repeated_prepare_replaces_its_record_and_gives_the_old_one_back() -> None:
    book, again = PreparedBook(), prepared()
    first = prepared()
    assert book.add(first) is None
    assert book.add(again) is first
    assert book.commit(end(), Lsn(0)) is again
    assert len(book) == 0


def test_rollback_prepared_of_an_unknown_prepare_is_nothing() -> None:
    book = PreparedBook([prepared()])
    assert book.roll_back(Xid(1), "g") is None and book.roll_back(Xid(700), "other") is None
    assert book.roll_back(Xid(700), "g") is not None and len(book) == 0


def test_segments_of_a_prepared_transaction_are_stamped_with_its_commit() -> None:
    t = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))
    segments = tuple(Segment(f"key-{n}", t, RowFile(10 + n, 1000, "0", 0, ())) for n in range(3))
    record = PreparedTransaction(Xid(700), "g", Lsn(10), Lsn(14), True, None, segments)
    parts = stamp_segments(record, TransactionEnd(Xid(700), Lsn(100), Lsn(104), 5_000, gid="g"))
    assert tuple(part.segment for part in parts) == segments
    assert [part.n_rows for part in parts] == [10, 11, 12]
    assert {part.commit for part in parts} == {CommitStamp(100, 5_000)}
