"""Neighbouring units that wait become one: when, which, and that nothing else changes by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa

from tests.unit.commits.test_order import add, content
from xidstream.pipeline.commits.entries import Entry
from xidstream.pipeline.commits.joining import JoinRule
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.parking import Parking
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.exchange import SINGLE_UNITS, MemoryMessages, MemoryPart, Sealed
from xidstream.pipeline.parked import BadTable, ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.transactions.sealed import undeliverable_unit

RELATION = RelationVersion(7, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 23, -1, True),))
SOON = JoinRule(step=1, single_entries=3, least_units=2, most_units=4)
"""Joins whatever can be."""


def together(contents: Sequence[Sealed]) -> Sealed:
    """What ``commits.joined_units`` makes of them, without rows."""
    transactions = pa.Table.from_batches([each.transactions for each in contents]).combine_chunks()
    return Sealed(
        transactions.to_batches()[0],
        tuple(part for each in contents for part in each.memory),
        (),
        (),
        sum(each.n_rows for each in contents),
        sum(each.n_bytes for each in contents),
        skipped=tuple(pair for each in contents for pair in each.skipped),
    )


def make_order(rows: int = 100, parking: Parking | None = None) -> CommitOrder:
    order = CommitOrder(batch_rows=rows, batch_bytes=10**6, parking=parking)
    order.join_rule = SOON
    return order


def ready(order: CommitOrder, *tickets: int) -> None:
    """Units whose commits are at 100, 200, …, by ticket."""
    for ticket in tickets:
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, content(xid=700 + ticket), now_s=float(ticket))


def line(ticket: int) -> pa.RecordBatch:
    """The line of ``_transactions`` of a unit with a row of the table."""
    lsn = 100 * (ticket + 1)
    row = [{"xid": 700 + ticket, "commit_lsn": lsn, "end_lsn": lsn + 4, "tables": [RELATION.name]}]
    return pa.RecordBatch.from_pylist(row, schema=TRANSACTIONS_SCHEMA)


def join_all(order: CommitOrder) -> list[list[int]]:
    """The tickets of each run that was joined."""
    runs = []
    while run := order.to_join():
        runs.append([entry.ticket for entry in run])
        join(order, run)
    return runs


def join(order: CommitOrder, run: list[Entry]) -> None:
    contents = [entry.content for entry in run if entry.content is not None]
    order.joined(run, contents, together(contents))


def delivered(order: CommitOrder) -> list[int]:
    """The xids that the sink gets, and is done with."""
    xids = []
    while (batch := order.next_batch()) is not None:
        xids += [x for unit in batch.units for x in unit.transactions.column("xid").to_pylist()]
        order.batch_done(batch.number)
    return xids


def test_few_units_are_left_as_they_are() -> None:
    order = CommitOrder(batch_rows=10**6, batch_bytes=10**9)
    ready(order, *range(SINGLE_UNITS - JoinRule().step - 1))
    assert order.to_join() == []
    ready(order, order.next_ticket)
    assert len(order.to_join()) == JoinRule().single_entries


def test_joined_units_are_released_and_confirmed_as_they_would_have_been() -> None:
    order = make_order()
    ready(order, *range(6))
    bytes_before = order.waiting_bytes
    assert join_all(order) == [[0, 1, 2, 3], [3, 4, 5]], "a joined unit that is small is joined again"
    assert order.n_waiting == 1 and order.waiting_bytes < bytes_before
    assert (order.confirmed_lsn, order.done_ticket) == (INVALID_LSN, -1)
    batch = order.next_batch()
    assert batch is not None
    assert (batch.first_commit_lsn, batch.last_commit_lsn, batch.end_lsn) == (100, 600, 604)
    assert (batch.n_transactions, batch.n_rows) == (6, 6)
    order.batch_done(batch.number)
    assert (order.confirmed_lsn, order.done_ticket, order.n_waiting) == (604, 5, 0)
    assert order.waiting_bytes == 0


def test_a_joined_unit_fits_into_a_batch() -> None:
    order = make_order(rows=3)
    ready(order, *range(6))
    assert join_all(order) == [[0, 1, 2], [3, 4, 5]]
    assert delivered(order) == [*range(700, 706)]


def test_a_unit_that_is_not_there_yet_is_not_gone_over_and_what_is_behind_it_is_joined() -> None:
    order = make_order()
    for ticket in range(5):
        add(order, ticket, 100 * (ticket + 1))
    for ticket in (0, 1, 3, 4):
        order.content_arrived(ticket, content(xid=700 + ticket))
    assert join_all(order) == [[0, 1], [3, 4]]
    order.content_arrived(2, content(xid=702))
    assert join_all(order) == [[1, 2, 4]]
    assert delivered(order) == [*range(700, 705)]


def test_a_hold_that_waits_keeps_its_place() -> None:
    order = make_order()
    ready(order, 0, 1)
    order.add_hold(2, Lsn(250))
    ready(order, 3, 4)
    assert join_all(order) == [[0, 1], [3, 4]]
    assert delivered(order) == [700, 701, 703, 704]
    assert order.confirmed_lsn == 204
    order.resolve(2)
    assert order.confirmed_lsn == 504


def test_positions_within_a_run_go_with_it() -> None:
    order = make_order()
    ready(order, 0, 1)
    order.add_position(2, Lsn(250))
    ready(order, 3)
    order.add_position(4, Lsn(450))
    assert join_all(order) == [[0, 1, 3]]
    assert delivered(order) == [700, 701, 703] and (order.confirmed_lsn, order.done_ticket) == (450, 4)


def test_positions_behind_a_head_that_is_stuck_are_one_entry() -> None:
    """A server that idles sends eight of them a second, for as long as the sink hangs."""
    order = make_order()
    ready(order, 0)
    for ticket in range(1, 1000):
        order.add_position(ticket, Lsn(200 + ticket))
    assert order.n_waiting == 2 and len(order._by_ticket) == 2
    assert delivered(order) == [700] and (order.confirmed_lsn, order.done_ticket) == (1199, 999)


def test_what_the_sink_has_taken_meanwhile_is_left_as_it_is() -> None:
    order = make_order(rows=2)
    ready(order, 0, 1, 2)
    run = order.to_join()
    batch = order.next_batch()
    assert run and batch is not None
    join(order, run)
    assert order.n_waiting == 3
    order.batch_done(batch.number)
    assert delivered(order) == [702]


def test_a_batch_that_was_put_back_is_joined_as_any_other() -> None:
    order = make_order()
    ready(order, 0, 1, 2)
    assert order.next_batch() is not None and order.to_join() == []
    order.put_back()
    order._n_arrived = 1
    assert join_all(order) == [[0, 1, 2]]
    assert delivered(order) == [700, 701, 702]


def test_what_is_being_written_to_the_journal_is_left_as_it_is() -> None:
    order = make_order()
    ready(order, 0, 1, 2, 3, 4)
    run = order.to_join()
    order.to_write(10**9, 2)
    contents = [entry.content for entry in run if entry.content is not None]
    order.joined(run, contents, together(contents))
    assert order.n_waiting == 5, "the journal has begun with some of it"
    assert join_all(order) == [[2, 3, 4]]


def test_what_cannot_be_delivered_is_not_joined() -> None:
    order = make_order()
    ready(order, 0, 1)
    add(order, 2, 300)
    order.content_arrived(2, undeliverable_unit(PoisonedChange("bad")))
    ready(order, 3, 4)
    join_all(order)
    assert delivered(order) == [700, 701]
    assert isinstance(order.undeliverable, PoisonedChange) and order.confirmed_lsn == 204


def test_messages_that_a_buffer_holds_are_left_where_they_are() -> None:
    order = make_order()
    ready(order, 0, 1)
    add(order, 2, 300)
    order.content_arrived(2, dataclasses.replace(content(xid=702), messages=(MemoryMessages(10, "ref"),)))
    assert join_all(order) == [[0, 1]]


def test_a_table_that_an_earlier_unit_parks_is_taken_out_of_units_that_were_joined_before_its_turn() -> None:
    order = make_order(parking=Parking())
    for ticket in range(3):
        add(order, ticket, 100 * (ticket + 1))
    for ticket in (1, 2):
        part = MemoryPart(RELATION, 1, 10, 100 * (ticket + 1), f"ref {ticket}")
        order.content_arrived(ticket, Sealed(line(ticket), (part,), (), (), 1, 10))
    assert join_all(order) == [[1, 2]]
    bad = BadTable(RELATION.relid, RELATION.name, Lsn(99), "bad", 1, Xid(700), Lsn(100))
    order.content_arrived(0, Sealed(line(0), (), (), (), 0, 0, bad_tables=(bad,)))
    batch = order.next_batch()
    assert batch is not None
    assert not any(unit.memory for unit in batch.units)
    order.batch_done(batch.number)
    (parked,) = order.parking.tables
    assert (parked.since_lsn, parked.n_transactions, parked.n_changes) == (100, 3, 3)


def test_where_a_table_was_parked_before_units_are_joined_behind_their_turn_alone() -> None:
    """Whether its rows are left out of a unit depends on where the unit ends."""
    table = ParkedTable(7, "public.t", Lsn(50), Xid(1), "bad", until_lsn=Lsn(250))
    order = make_order(parking=Parking([table]))
    for ticket in range(4):
        add(order, ticket, 100 * (ticket + 1))
    for ticket in (1, 2, 3):
        order.content_arrived(ticket, content(xid=700 + ticket))
    assert order.to_join() == []
    order.content_arrived(0, content(xid=700))
    assert join_all(order) == [[0, 1, 2, 3]]
