"""Which tables are parked, from which commit on, and what is counted: whatever the cuts, crashes and resumes."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest

from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.parking import Parking
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.exchange import MemoryPart, Sealed, Segment, SegmentPart, Undeliverable
from xidstream.pipeline.parked import BadTable, ParkedTable, behind_sink, resumed
from xidstream.pipeline.parquet import CommitStamp, RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA

COLUMNS = (Column("id", 23, -1, True),)
BAD = RelationVersion(5, "public", "bad", ReplicaIdentity.DEFAULT, COLUMNS)
GOOD = RelationVersion(6, "public", "good", ReplicaIdentity.DEFAULT, COLUMNS)
NEWER = dataclasses.replace(BAD, columns=(*COLUMNS, Column("note", 25, -1, False)))
N_BYTES = 1000


def lines(*commits: tuple[int, int, list[str]]) -> pa.RecordBatch:
    """Of ``_transactions``: commit LSN, rows, tables."""
    values = [
        {"xid": lsn, "commit_lsn": lsn, "end_lsn": lsn + 4, "commit_timestamp": 0, "streamed": False}
        | {"rows": n_rows, "tables": tables}
        for lsn, n_rows, tables in commits
    ]
    return pa.RecordBatch.from_pylist(values, schema=TRANSACTIONS_SCHEMA)


def in_memory(relation: RelationVersion, n_rows: int, first_lsn: int) -> MemoryPart:
    return MemoryPart(relation, n_rows, N_BYTES, first_lsn, f"{relation.table} {first_lsn}")


def spilled(relation: RelationVersion, n_rows: int, lsn: int) -> SegmentPart:
    file = RowFile(n_rows, N_BYTES, "0", 0, ())
    return SegmentPart(Segment(f"{relation.table}-{lsn}", relation, file), CommitStamp(lsn, 0))


def unit(
    transactions: pa.RecordBatch,
    *parts: MemoryPart | SegmentPart,
    bad: tuple[BadTable, ...] = (),
) -> Sealed:
    memory = tuple(p for p in parts if isinstance(p, MemoryPart))
    segments = tuple(p for p in parts if isinstance(p, SegmentPart))
    n_rows = sum(p.n_rows for p in parts)
    return Sealed(transactions, memory, segments, (), n_rows, N_BYTES * len(parts), bad_tables=bad)


def bad_from(lsn: int, n_changes: int = 1) -> BadTable:
    return BadTable(
        5, "public.bad", Lsn(lsn - 1), "a value that is not valid UTF-8", n_changes, Xid(lsn), Lsn(lsn)
    )


def order_of(*tables: ParkedTable) -> CommitOrder:
    return CommitOrder(batch_rows=100, batch_bytes=10**6, parking=Parking(tables))


def parts_of(content: Sealed) -> list[str]:
    return [p.ref for p in content.memory] + [p.segment.key for p in content.segments]


def test_a_table_is_parked_from_its_first_bad_commit_on_whichever_unit_is_ready_first() -> None:
    """The unit after the bad one is filled before it, and still has nothing of the table."""
    order = order_of()
    for ticket, lsn in enumerate((100, 200, 300)):
        order.add_unit(ticket, Lsn(lsn), Lsn(lsn), Lsn(lsn + 4), 1)
    order.content_arrived(
        2,
        unit(
            lines((300, 5, ["public.bad", "public.good"])), in_memory(NEWER, 3, 300), in_memory(GOOD, 2, 300)
        ),
    )
    order.content_arrived(0, unit(lines((100, 1, ["public.bad"])), in_memory(BAD, 1, 100)))
    assert order.parking.version == 0
    order.content_arrived(1, unit(lines((200, 4, ["public.bad"])), bad=(bad_from(200, 4),)))
    batch = order.next_batch()
    assert batch is not None
    assert [parts_of(each) for each in batch.units] == [["bad 100"], [], ["good 300"]]
    assert batch.n_rows == 3 and batch.n_bytes == 2 * N_BYTES
    (parked,) = batch.parked
    assert (parked.table, parked.since_lsn, parked.xid, parked.is_parked) == ("public.bad", 200, 200, True)
    assert (parked.n_transactions, parked.n_changes) == (0, 0), "nothing of it is confirmed yet"
    order.batch_done(batch.number)
    (parked,) = order.parking.tables
    assert (parked.n_transactions, parked.n_changes) == (2, 7)
    assert order.waiting_bytes == 0


def test_a_unit_of_many_transactions_keeps_what_committed_before_and_its_transactions_are_counted() -> None:
    order = order_of()
    order.add_unit(0, Lsn(100), Lsn(300), Lsn(304), 3)
    order.add_unit(1, Lsn(400), Lsn(500), Lsn(504), 2)
    said = [(lsn, 2, ["public.bad", "public.good"]) for lsn in (100, 200, 300)]
    # The buffer has left out what it found: the part has the first transaction's row alone.
    order.content_arrived(
        0, unit(lines(*said), in_memory(BAD, 1, 100), in_memory(GOOD, 3, 100), bad=(bad_from(200, 2),))
    )
    order.content_arrived(
        1,
        unit(
            lines((400, 1, ["public.good"]), (500, 2, ["public.bad"])),
            in_memory(BAD, 2, 500),
            in_memory(GOOD, 1, 400),
        ),
    )
    batch = order.next_batch()
    assert batch is not None
    assert [parts_of(each) for each in batch.units] == [["bad 100", "good 100"], ["good 400"]]
    order.batch_done(batch.number)
    (parked,) = order.parking.tables
    assert (parked.since_lsn, parked.n_transactions, parked.n_changes) == (200, 3, 4)


def test_what_a_table_has_in_segments_is_left_out_and_its_files_are_nobodys() -> None:
    order = order_of(ParkedTable(5, "public.bad", Lsn(50), Xid(1), "why"))
    order.add_unit(0, Lsn(100), Lsn(100), Lsn(104), 1)
    order.content_arrived(
        0, unit(lines((100, 9, ["public.bad", "public.good"])), spilled(BAD, 7, 100), spilled(GOOD, 2, 100))
    )
    batch = order.next_batch()
    assert batch is not None and parts_of(batch.units[0]) == ["good-100"] and batch.n_rows == 2
    assert order.take_dropped_keys() == ["bad-100"] and order.take_dropped_keys() == []


def test_a_run_that_is_repeated_parks_at_the_same_commit_and_counts_nothing_twice() -> None:
    """What was recorded before a crash: the park at 200, with the position still before it."""
    recorded = ParkedTable(5, "public.bad", Lsn(200), Xid(200), "why")
    order = order_of(recorded)
    order.add_unit(0, Lsn(100), Lsn(200), Lsn(204), 2)
    order.content_arrived(
        0,
        unit(
            lines((100, 1, ["public.bad"]), (200, 1, ["public.bad"])),
            in_memory(BAD, 1, 100),
            bad=(bad_from(200),),
        ),
    )
    order.add_unit(1, Lsn(300), Lsn(300), Lsn(304), 1)
    order.content_arrived(1, unit(lines((300, 1, ["public.bad"])), in_memory(BAD, 1, 300)))
    batch = order.next_batch()
    assert batch is not None and [parts_of(each) for each in batch.units] == [["bad 100"], []]
    order.batch_done(batch.number)
    (parked,) = order.parking.tables
    assert (parked.since_lsn, parked.n_transactions, parked.n_changes) == (200, 2, 2)
    assert order.parking.version == 0, "nothing new is to be recorded"


def test_what_the_journal_takes_is_settled_and_counted_before_the_sink_has_it() -> None:
    order = order_of()
    order.add_unit(0, Lsn(100), Lsn(100), Lsn(104), 1)
    order.content_arrived(
        0, unit(lines((100, 2, ["public.bad", "public.good"])), in_memory(GOOD, 1, 100), bad=(bad_from(100),))
    )
    (entry,) = order.to_write(10**6, 10)
    assert (
        entry.content is not None and parts_of(entry.content) == ["good 100"] and not entry.content.bad_tables
    )


def test_a_park_below_what_a_batch_ends_with_goes_with_it_and_a_later_one_does_not() -> None:
    old = ParkedTable(7, "public.old", Lsn(10), Xid(1), "why", until_lsn=Lsn(50))
    later = ParkedTable(5, "public.bad", Lsn(900), Xid(2), "why")
    order = order_of(old, later)
    order.add_unit(0, Lsn(100), Lsn(100), Lsn(104), 1)
    order.content_arrived(0, unit(lines((100, 1, ["public.bad"])), in_memory(BAD, 1, 100)))
    batch = order.next_batch()
    assert batch is not None and batch.parked == (old,) and parts_of(batch.units[0]) == ["bad 100"]


def test_a_table_that_was_resumed_is_delivered_and_parked_anew_at_its_next_bad_change() -> None:
    (ended,) = resumed([ParkedTable(5, "public.bad", Lsn(50), Xid(1), "why")], {5}, Lsn(90))
    order = order_of(ended)
    for ticket, lsn in enumerate((100, 200)):
        order.add_unit(ticket, Lsn(lsn), Lsn(lsn), Lsn(lsn + 4), 1)
    order.content_arrived(0, unit(lines((100, 1, ["public.bad"])), in_memory(BAD, 1, 100)))
    order.content_arrived(1, unit(lines((200, 1, ["public.bad"])), bad=(bad_from(200),)))
    batch = order.next_batch()
    assert batch is not None and parts_of(batch.units[0]) == ["bad 100"]
    assert [(each.since_lsn, each.until_lsn) for each in order.parking.tables] == [(50, 90), (200, None)]


@pytest.mark.parametrize(("watermark", "until"), [(0, 90), (80, 90), (120, 121)])
def test_a_table_is_known_again_only_behind_what_the_sink_holds_already(watermark: int, until: int) -> None:
    """The sink takes nothing a second time: what it got without the table's rows it never gets with them."""
    tables = resumed([ParkedTable(5, "public.bad", Lsn(50), Xid(1), "why")], {5}, Lsn(90))
    parking = Parking(tables)
    parking.sink_opened(Lsn(watermark))
    (ended,) = parking.tables
    assert (ended.until_lsn, ended.awaits_sink, parking.version) == (until, False, 1)
    parking.sink_opened(Lsn(1000))
    assert parking.tables == (ended,), "it is settled once"
    assert ended.spoils(until - 16) and not ended.spoils(until)
    assert behind_sink(tables, Lsn(watermark)) == (ended,)


@pytest.mark.parametrize("before", [1, 2])
def test_a_park_spoils_no_snapshot_that_is_taken_where_the_table_is_delivered_again(before: int) -> None:
    """On an idle server both are where the WAL ends. The table was read again and again. (An earlier xidstream's place
    was one byte before that, and is two now.)"""
    (ended,) = resumed([ParkedTable(5, "public.bad", Lsn(48), Xid(1), "why")], {5}, Lsn(0x60))
    assert not ended.spoils(0x60 - before) and ended.spoils(0x58 - before)


def recorded_and_resumed() -> ParkedTable:
    """Parked at 200, resumed at 304, with two transactions counted."""
    table = ParkedTable(5, "public.bad", Lsn(200), Xid(200), "why", n_transactions=2, n_changes=2)
    return resumed([table], {5}, Lsn(304))[0]


def sent_again(parking: Parking) -> tuple[CommitOrder, list[list[str]]]:
    """A bad commit at 200 and good ones at 300 and 400, delivered; what of the table each unit had then."""
    order = CommitOrder(batch_rows=100, batch_bytes=10**6, parking=parking)
    for ticket, lsn in enumerate((200, 300, 400)):
        order.add_unit(ticket, Lsn(lsn), Lsn(lsn), Lsn(lsn + 4), 1)
    order.content_arrived(0, unit(lines((200, 1, ["public.bad"])), bad=(bad_from(200),)))
    order.content_arrived(1, unit(lines((300, 1, ["public.bad"])), in_memory(BAD, 1, 300)))
    order.content_arrived(2, unit(lines((400, 1, ["public.bad"])), in_memory(BAD, 1, 400)))
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    return order, [parts_of(each) for each in batch.units]


def test_what_the_server_sends_again_below_the_recorded_position_is_not_counted_again() -> None:
    table = ParkedTable(5, "public.bad", Lsn(200), Xid(200), "why", n_transactions=2, n_changes=2)
    order, delivered = sent_again(Parking([table], Lsn(304)))
    assert delivered == [[], [], []]
    (parked,) = order.parking.tables
    assert (parked.n_transactions, parked.n_changes) == (3, 3)


def test_a_bad_commit_that_is_sent_again_before_the_place_of_the_resume_parks_nothing() -> None:
    order, delivered = sent_again(Parking([recorded_and_resumed()]))
    assert delivered == [[], [], ["bad 400"]], "what was left out stays left out"
    assert order.parking.tables == (recorded_and_resumed(),) and order.parking.version == 0


def test_a_unit_across_the_place_of_the_resume_that_has_the_bad_commit_parks_the_table_again() -> None:
    """Its buffer has left out the rows from behind the place, too: to deliver the table's next rows would hide that."""
    order = order_of(recorded_and_resumed())
    order.add_unit(0, Lsn(200), Lsn(400), Lsn(404), 2)
    order.content_arrived(
        0, unit(lines((200, 1, ["public.bad"]), (400, 1, ["public.bad"])), bad=(bad_from(200, n_changes=2),))
    )
    assert [(each.since_lsn, each.is_parked) for each in order.parking.tables] == [(200, False), (200, True)]


def test_what_was_left_out_before_a_transaction_that_ends_the_run_is_counted_once() -> None:
    order = order_of(ParkedTable(5, "public.bad", Lsn(50), Xid(1), "why"))
    order.add_unit(0, Lsn(100), Lsn(300), Lsn(304), 3)
    content = unit(lines((100, 1, ["public.bad"]), (200, 1, ["public.bad"])), in_memory(BAD, 2, 100))
    halt = Undeliverable(PoisonedChange("x"), last_commit_lsn=Lsn(200), end_lsn=Lsn(204), n_transactions=2)
    order.content_arrived(0, dataclasses.replace(content, undeliverable=halt))
    batch = order.next_batch()
    assert batch is not None and parts_of(batch.units[0]) == []
    order.batch_done(batch.number)
    order.add_position(1, Lsn(900))
    (parked,) = order.parking.tables
    assert order.confirmed_lsn == 204 and (parked.n_transactions, parked.n_changes) == (2, 2)


def test_a_park_that_is_resumed_before_its_commit_is_confirmed_ends_where_it_began() -> None:
    (ended,) = resumed([ParkedTable(5, "public.bad", Lsn(200), Xid(1), "why")], {5}, Lsn(100))
    assert ended.until_lsn == 200
