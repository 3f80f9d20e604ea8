"""The journal's part of the commit order: what is written, released again and confirmed, by scenario and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.commits.test_joining import SOON, together
from tests.unit.commits.test_order import add, content
from xidstream.pipeline.commits import journal_merging
from xidstream.pipeline.commits.entries import NO_TICKET, Entry, EntryKind, EntryState
from xidstream.pipeline.commits.journal import DamagedFile, Journal
from xidstream.pipeline.commits.journal_merging import FREE_FILES, WHOLE_BYTES, is_small
from xidstream.pipeline.commits.journal_policy import BEHIND_WAL_BYTES, PACE_S, JournalPolicy
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.errors import PoisonedChange, SlotLost
from xidstream.pipeline.exchange import (
    PART_BYTES,
    UNIT_BYTES,
    JournalFile,
    JournalSpan,
    MemoryPart,
    Sealed,
    UnitEnd,
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.transactions.sealed import undeliverable_unit

RELATION = RelationVersion(7, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 23, -1, True),))


def in_memory(xid: int, n_bytes: int = 1000) -> Sealed:
    """A unit with rows in a buffer's memory; its ``xid`` tells it apart."""
    base = content(xid=xid)
    part = MemoryPart(RELATION, 1, n_bytes, 1, f"ref {xid}")
    return Sealed(base.transactions, (part,), (), (), 1, n_bytes)


def file_of(
    number: int, entries: Sequence[Entry], epoch: str = "e1", keys: tuple[str, ...] = ()
) -> JournalFile:
    ends = [entry.end for entry in entries]
    commits = [end for end in ends if end.last_commit_lsn]
    return JournalFile(
        number=number,
        epoch=epoch,
        first_commit_lsn=commits[0].first_commit_lsn if commits else INVALID_LSN,
        last_commit_lsn=commits[-1].last_commit_lsn if commits else INVALID_LSN,
        end_lsn=max((end.end_lsn for end in ends), default=INVALID_LSN),
        first_commit_timestamp_us=0,
        n_units=len(ends),
        n_transactions=len(commits),
        n_rows=len(ends),
        n_bytes=100 * len(ends),
        stored_keys=keys,
    )


def ready(order: CommitOrder, *tickets: int) -> None:
    """Units whose commits are at 100, 200, …, each ready."""
    for ticket in tickets:
        add(order, ticket, 100 * (ticket + 1))
        order.content_arrived(ticket, in_memory(700 + ticket), now_s=float(ticket))


def make_order(journal: Journal | None = None, rows: int = 100) -> CommitOrder:
    return CommitOrder(batch_rows=rows, batch_bytes=10**6, journal=journal)


def write(order: CommitOrder, number: int = 0, n_units: int = 100) -> JournalFile:
    entries = order.to_write(10**9, n_units)
    file = file_of(number, entries)
    order.written(file, entries)
    return file


def xids(units: Sequence[Sealed]) -> list[int]:
    return [xid for unit in units for xid in unit.transactions.column("xid").to_pylist()]


def test_what_is_written_is_confirmed_and_still_released_in_its_place() -> None:
    order = make_order()
    ready(order, 0, 1)
    write(order)
    assert (order.confirmed_lsn, order.delivered_lsn, order.done_ticket) == (204, 0, 1)
    ready(order, 2)
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [700, 701, 702]
    order.batch_done(batch.number)
    assert (order.confirmed_lsn, order.delivered_lsn) == (304, 304) and not order.journal


def test_a_batch_that_the_sink_has_is_written_with_what_is_behind_it() -> None:
    order = make_order(rows=1)
    ready(order, 0, 1, 2)
    first = order.next_batch()
    assert first is not None
    write(order)
    assert (order.confirmed_lsn, order.delivered_lsn) == (304, 0)
    order.batch_done(first.number)
    assert (order.confirmed_lsn, order.delivered_lsn) == (304, 104)
    second = order.next_batch()
    assert second is not None and xids(second.units) == [701]


def test_what_the_sink_took_while_the_file_was_written_stays_with_the_sink() -> None:
    order = make_order(rows=1)
    ready(order, 0, 1)
    entries = order.to_write(10**9, 100)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert order.confirmed_lsn == 104
    order.written(file_of(0, entries), entries)
    assert (order.confirmed_lsn, order.delivered_lsn) == (204, 104)
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [701]


def test_a_file_that_the_sink_has_overtaken_is_no_part_of_the_journal() -> None:
    order = make_order()
    ready(order, 0)
    entries = order.to_write(10**9, 100)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    file = file_of(0, entries)
    order.written(file, entries)
    assert order.journal.spans == () and order.journal.take_removed() == [file]
    assert order.waiting_bytes == 0


def test_nothing_is_written_past_a_unit_that_is_not_ready_a_hold_or_poison() -> None:
    order = make_order()
    ready(order, 0)
    order.add_hold(1, Lsn(150))
    add(order, 2, 300)
    order.content_arrived(2, in_memory(702))
    assert [entry.ticket for entry in order.to_write(10**9, 100)] == [0]
    order.resolve(1)
    add(order, 3, 400)
    assert [entry.ticket for entry in order.to_write(10**9, 100)] == [0, 2]
    order.content_arrived(3, undeliverable_unit(PoisonedChange("bad")))
    write(order)
    assert order.confirmed_lsn == 304 and order.oldest_ready_s is None
    assert order.undeliverable is None, "what is before it is not in the sink"
    assert isinstance(order.unwritable, PoisonedChange)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert isinstance(order.undeliverable, PoisonedChange)


def test_a_position_behind_the_journal_is_confirmed_and_not_delivered_before_it() -> None:
    order = make_order()
    ready(order, 0)
    order.add_position(1, Lsn(900))
    write(order)
    assert (order.confirmed_lsn, order.delivered_lsn) == (900, 0)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert order.delivered_lsn == 900


def test_the_delivered_position_does_not_go_back_when_a_journal_begins() -> None:
    order = make_order()
    ready(order, 0)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    ready(order, 1)
    write(order)
    assert (order.confirmed_lsn, order.delivered_lsn) == (204, 104)


def test_a_lost_sink_gets_again_what_it_did_not_report() -> None:
    order = make_order(rows=1)
    ready(order, 0, 1, 2)
    for _ in range(2):
        assert order.next_batch() is not None
    write(order, n_units=1)
    order.put_back()
    released = []
    while (batch := order.next_batch()) is not None:
        released += xids(batch.units)
        order.batch_done(batch.number)
    assert released == [700, 701, 702] and order.delivered_lsn == 304


def test_memory_beyond_the_horizon_is_let_go_and_loaded_when_the_sink_comes_near() -> None:
    order = make_order(Journal(horizon_bytes=UNIT_BYTES + PART_BYTES + 1500))
    files = []
    for ticket in range(4):
        ready(order, ticket)
        files.append(write(order, ticket))
    journal = order.journal
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [700, 701], "the others are not in memory"
    assert order.next_batch() is None
    order.batch_done(batch.number)
    assert order.free_ticket == order.done_ticket == 3, "nothing needs a buffer any more"
    assert journal.to_load() is files[2] and journal.to_load() is None, "one at a time"
    journal.loaded(files[2], [(UnitEnd(Lsn(300), Lsn(300), Lsn(304), 1), in_memory(702))], 0.0)
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [702]


def test_buffers_are_needed_while_the_journal_has_what_they_put() -> None:
    order = make_order()
    ready(order, 0, 1)
    write(order)
    assert (order.done_ticket, order.free_ticket) == (1, -1)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert order.free_ticket == 1


def test_buffers_are_needed_while_a_file_with_what_they_put_is_written() -> None:
    """The sink may have all of it by then, and the file is written all the same."""
    order = make_order()
    ready(order, 0, 1)
    entries = order.to_write(10**9, 100)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert (order.done_ticket, order.free_ticket) == (1, -1)
    order.written(file_of(0, entries), entries)
    assert order.free_ticket == 1


def test_a_file_that_was_delivered_while_it_was_loaded_is_no_error() -> None:
    order = make_order(Journal(horizon_bytes=UNIT_BYTES + PART_BYTES + 1500), rows=1)
    ready(order, 0, 1, 2)
    taken = [order.next_batch() for _ in range(2)]
    files = [write(order, i, 1) for i in range(3)]
    order.put_back()
    assert all(taken) and order.journal.to_load() is None, "what was taken is in memory still"
    batch = order.next_batch()
    assert batch is not None
    released = xids(batch.units)
    order.batch_done(batch.number)
    file = order.journal.to_load()
    assert file is files[2]
    while (batch := order.next_batch()) is not None:
        released += xids(batch.units)
        order.batch_done(batch.number)
    order.journal.loaded(file, [(UnitEnd(Lsn(300), Lsn(300), Lsn(304), 1), in_memory(702))], 0.0)
    batch = order.next_batch()
    assert batch is not None
    order.batch_done(batch.number)
    assert [*released, *xids(batch.units)] == [700, 701, 702]
    order.journal.loaded(file, [], 0.0)
    order.journal.damaged(file, SlotLost("too late"))
    assert order.undeliverable is None and order.delivered_lsn == 304


def test_an_earlier_epochs_journal_is_released_from_where_its_sink_was() -> None:
    ends = [UnitEnd(Lsn(i), Lsn(i), Lsn(i + 4), 1) for i in (100, 200, 300)]
    entries = [Entry(i, None, end) for i, end in enumerate(ends)]  # type: ignore[arg-type]
    files = [file_of(4, entries[:2], "e1"), file_of(5, entries[2:], "e2")]
    order = make_order(Journal(files, Lsn(104)))
    assert order.journal.spans == (JournalSpan("e1", 4, 4), JournalSpan("e2", 5, 5))
    assert order.journal.next_number == 6 and order.next_batch() is None
    ready_file = order.journal.to_load()
    assert ready_file is files[0]
    order.journal.loaded(files[0], list(zip(ends[:2], map(in_memory, (700, 701)), strict=True)), 0.0)
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [701], "the sink has the first one"
    add(order, 0, 400)
    order.content_arrived(0, in_memory(703))
    assert order.next_batch() is None, "the second file is not loaded, and comes first"
    order.batch_done(batch.number)
    assert order.journal.spans == (JournalSpan("e2", 5, 5),) and order.delivered_lsn == 204


def test_spans_join_the_numbers_of_one_epoch() -> None:
    files = [file_of(n, (), epoch) for n, epoch in ((0, "a"), (1, "a"), (3, "a"), (4, "b"), (5, "b"))]
    spans = Journal(files).spans
    assert spans == (JournalSpan("a", 0, 1), JournalSpan("a", 3, 3), JournalSpan("b", 4, 5))


def test_everything_before_a_damaged_file_is_released_and_nothing_behind_it() -> None:
    order = make_order()
    ready(order, 0)
    first = write(order, 0)
    ready(order, 1)
    journal = Journal([first, DamagedFile("e1", 1, SlotLost("gone"))])
    order = make_order(journal)
    add(order, 0, 900)
    order.content_arrived(0, in_memory(708))
    journal.to_load()
    journal.loaded(first, [(UnitEnd(Lsn(100), Lsn(100), Lsn(104), 1), in_memory(700))], 0.0)
    batch = order.next_batch()
    assert batch is not None and xids(batch.units) == [700]
    assert order.undeliverable is None
    order.batch_done(batch.number)
    assert isinstance(order.undeliverable, SlotLost) and order.next_batch() is None


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_releases_each_unit_once_and_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several epochs. What is recorded at a crash is all that the next epoch has. Files absorb others as soon as
    there are some."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(journal_merging, "FREE_FILES", rng.choice([0, 1, 3, 100]))
    sink: list[int] = []
    stored: dict[int, list[tuple[UnitEnd, Sealed, list[int]]]] = {}
    record: tuple[Lsn, Lsn, list[JournalFile]] = (INVALID_LSN, INVALID_LSN, [])
    n_units, next_number = 60, -1
    while len(sink) < n_units:
        confirmed, delivered, files = record
        horizon_bytes = rng.choice([0, 3 * UNIT_BYTES, 10**6])
        order = CommitOrder(
            batch_rows=rng.choice([1, 3]),
            batch_bytes=10**6,
            journal=Journal(files, delivered, horizon_bytes=horizon_bytes),
            confirmed_lsn=confirmed,
        )
        coming = [i for i in range(n_units) if 100 * (i + 1) >= confirmed]
        assert not coming or all(
            i in sink or any((i in _numbers(stored, f)) for f in files) for i in range(coming[0])
        )
        waiting: list[int] = []
        taken: dict[int, list[int]] = {}
        writing: tuple[JournalFile, list[Entry], tuple[JournalFile, ...]] | None = None
        crash_after = rng.randint(5, 200)
        tickets: dict[int, int] = {}
        order.join_rule = SOON
        joining: list[Entry] = []
        for _ in range(crash_after):
            step = rng.choice("aaffttddwwlrpjj")
            if step == "a" and coming:
                i = coming.pop(0)
                tickets[order.next_ticket] = i
                waiting.append(order.next_ticket)
                add(order, order.next_ticket, 100 * (i + 1))
                if rng.random() < 0.2:
                    order.add_position(order.next_ticket, Lsn(100 * (i + 1) + 50))
            elif step == "f" and waiting:
                ticket = waiting.pop(rng.randrange(len(waiting)))
                order.content_arrived(ticket, in_memory(tickets[ticket]))
            elif step == "t" and not taken and (batch := order.next_batch()) is not None:
                taken[batch.number] = xids(batch.units)
            elif step == "d" and taken:
                number, got = taken.popitem()
                sink += got
                order.batch_done(number)
            elif step == "p" and rng.random() < 0.3:
                taken.clear()
                order.put_back()
            elif step == "w" and writing is None:
                entries = order.to_write(rng.choice([1, 10**6]), 5)
                if entries:
                    absorbed = order.journal.to_absorb(0)
                    before = [unit for each in absorbed for unit in stored[each.number]]
                    new = [(e.end, e.content, xids([e.content])) for e in entries if e.content is not None]
                    ends = [Entry(NO_TICKET, EntryKind.UNIT, end) for end, _, _ in (*before, *new)]
                    next_number = max(next_number, *stored, -1) + 1
                    file = file_of(next_number, ends)
                    stored[file.number] = [*before, *new]
                    writing = (file, entries, absorbed)
            elif step == "w" and writing is not None:
                if not order.written(*writing):
                    order.not_written()
                    order.journal.drop(writing[0])
                writing = None
            elif step == "l" and (wanted := order.journal.to_load()) is not None:
                units = [(end, unit) for end, unit, _ in stored[wanted.number]]
                order.journal.loaded(wanted, units, 0.0)
            elif step == "j" and not joining:
                joining = order.to_join()
                contents = [e.content for e in joining if e.content is not None]
            elif step == "j":
                order.joined(joining, contents, together(contents))
                joining = []
            elif step == "r":
                record = (order.confirmed_lsn, order.delivered_lsn, order.journal.files)
                for gone in order.journal.take_removed():
                    del stored[gone.number]
            assert order.delivered_lsn <= order.confirmed_lsn
            held = {i for f in order.journal.files for i in _numbers(stored, f)}
            safe = set(sink) | held
            assert all(i in safe for i in range(n_units) if 100 * (i + 1) + 4 <= order.confirmed_lsn)
            assert all(i in sink for i in range(n_units) if 100 * (i + 1) + 4 <= order.delivered_lsn)
        # The sink knows what it holds: an epoch's repetitions are dropped by it, and nothing may come out of order.
        sink = _deduplicated(sink)
        stored = {n: units for n, units in stored.items() if n in {f.number for f in record[2]}}
    assert sink == list(range(n_units))


def _numbers(stored: dict[int, list[tuple[UnitEnd, Sealed, list[int]]]], file: JournalFile) -> list[int]:
    return [i for _, _, numbers in stored[file.number] for i in numbers]


def _deduplicated(sink: list[int]) -> list[int]:
    kept: list[int] = []
    for i in sink:
        if i == len(kept):
            kept.append(i)
        else:
            assert i < len(kept), "nothing is left out"
    return kept


def journal_of(*numbers: int, file_bytes: int = 4_000) -> Journal:
    ends = [
        [Entry(NO_TICKET, EntryKind.UNIT, UnitEnd(Lsn(100 * n), Lsn(100 * n), Lsn(100 * n + 4), 1))]
        for n in numbers
    ]
    keys = [(f"segment {n}",) for n in numbers]
    files = [
        replace(file_of(n, end, keys=key), file_bytes=file_bytes)
        for n, end, key in zip(numbers, ends, keys, strict=True)
    ]
    return Journal(files, horizon_bytes=1000)


def absorb(order: CommitOrder, number: int) -> tuple[JournalFile, tuple[JournalFile, ...]]:
    entries = order.to_write(10**9, 100)
    absorbed = order.journal.to_absorb(0)
    keys = tuple(key for each in absorbed for key in each.stored_keys)
    first_lsn = absorbed[0].first_commit_lsn if absorbed else entries[0].end.first_commit_lsn
    file = replace(file_of(number, entries, keys=keys), first_commit_lsn=first_lsn, file_bytes=130_000)
    assert order.written(file, entries, absorbed)
    return file, absorbed


def test_the_files_of_a_long_capture_stay_few() -> None:
    """3.6 files a second stayed: after a night no run could read them all before the server lost patience."""
    journal, most = Journal(horizon_bytes=0), 0
    n_bytes, lsn, n_files = 15_000, 0, 10_000
    for number in range(n_files):
        absorbed = journal.to_absorb(n_bytes)
        lsn += 100
        file_bytes = n_bytes + sum(each.file_bytes for each in absorbed)
        entry = Entry(0, EntryKind.UNIT, UnitEnd(Lsn(lsn), Lsn(lsn), Lsn(lsn + 4), 1))
        entry.state, entry.content = EntryState.READY, in_memory(7)
        file = replace(
            file_of(number, [entry]), file_bytes=file_bytes, n_bytes=file_bytes, first_commit_lsn=Lsn(lsn)
        )
        journal.append(file, [entry], absorbed)
        journal.take_removed()
        most = max(most, len(journal.files))
    n_whole = sum(not is_small(file) for file in journal.files)
    assert n_whole <= n_files * n_bytes / WHOLE_BYTES
    assert most <= FREE_FILES + 10 + n_whole
    assert journal.n_bytes == n_files * n_bytes


def test_files_between_large_ones_stay_few() -> None:
    """What is before a large file can be absorbed by that one alone."""
    journal = Journal(horizon_bytes=0)
    for number in range(4_000):
        new_bytes = 9 << 20 if number % 10 == 9 else 2_000
        absorbed = journal.to_absorb(new_bytes)
        lsn = Lsn(100 * (number + 1))
        entry = Entry(0, EntryKind.UNIT, UnitEnd(lsn, lsn, Lsn(lsn + 4), 1), EntryState.READY, in_memory(7))
        file_bytes = new_bytes + sum(each.file_bytes for each in absorbed)
        journal.append(replace(file_of(number, [entry]), file_bytes=file_bytes), [entry], absorbed)
    assert len(journal.files) <= 400 + FREE_FILES + 20


def test_a_file_that_absorbs_others_takes_their_place_and_what_they_name() -> None:
    order = make_order(journal_of(*range(1, FREE_FILES + 2)))
    olds = order.journal.files
    add(order, 0, 100 * FREE_FILES + 500)
    order.content_arrived(0, in_memory(700))
    file, absorbed = absorb(order, FREE_FILES + 2)
    assert absorbed == tuple(olds) and order.journal.files == [file]
    assert order.journal.names("segment 5")
    removed = order.journal.take_removed()
    assert [each.number for each in removed] == [each.number for each in olds]
    assert not any(each.stored_keys for each in removed), "the new file needs them"
    assert order.journal.names("segment 5")
    assert order.journal.n_bytes == file.n_bytes and order.confirmed_lsn == file.end_lsn
    assert order.free_ticket == 0, "what buffers have of it is in the storage"


@pytest.mark.parametrize("what", ["taken", "done", "damaged"])
def test_files_that_the_sink_came_to_meanwhile_are_not_absorbed(what: str) -> None:
    order = make_order(journal_of(*range(1, FREE_FILES + 2)), rows=1)
    add(order, 0, 100 * FREE_FILES + 500)
    order.content_arrived(0, in_memory(700))
    entries = order.to_write(10**9, 100)
    absorbed = order.journal.to_absorb(0)
    assert len(absorbed) == FREE_FILES + 1
    first = order.journal.to_load()
    assert first is absorbed[0]
    if what == "damaged":
        order.journal.damaged(first, SlotLost("gone"))
    else:
        order.journal.loaded(first, [(UnitEnd(Lsn(100), Lsn(100), Lsn(104), 1), in_memory(1))], 0.0)
        batch = order.next_batch()
        assert batch is not None
        if what == "done":
            order.batch_done(batch.number)
    before, waiting_bytes = order.journal.files, order.waiting_bytes
    assert not order.written(file_of(99, entries), entries, absorbed)
    assert (order.journal.files, order.waiting_bytes) == (before, waiting_bytes)
    order.not_written()
    assert order.to_write(10**9, 100) == entries, "they are written again"


def test_of_a_file_that_an_earlier_sink_has_in_part_nothing_is_absorbed() -> None:
    files = journal_of(*range(1, FREE_FILES + 2)).files
    begun = replace(files[-1], first_commit_lsn=Lsn(50))
    assert Journal([*files[:-1], begun], Lsn(60)).to_absorb(0) == ()
    assert Journal([*files[:-1], begun], Lsn(50)).to_absorb(0) != ()


def test_files_that_could_not_be_read_are_left_alone() -> None:
    journal = journal_of(*range(1, FREE_FILES + 3))
    journal.leave_alone(journal.files[:5])
    assert journal.to_absorb(0) == tuple(journal.files[5:])


def policy(**changed: object) -> JournalPolicy:
    settings: dict[str, object] = {"after_bytes": 100, "after_s": 5.0, "max_bytes": 1000, "has_sink": True}
    return JournalPolicy(**{**settings, **changed})  # type: ignore[arg-type]


def test_nothing_is_due_while_the_sink_keeps_up() -> None:
    assert policy().due_in_s(10.0, None, 0, 0, 0, is_ending=False) is None
    assert policy().due_in_s(10.0, 9.0, 100, 10**9, 0, is_ending=False) == 4.0


@pytest.mark.parametrize(
    ("changed", "oldest_s", "waiting_bytes", "is_ending"),
    [({}, 5.0, 0, False), ({}, 9.9, 101, False), ({"after_bytes": 0}, 10.0, 0, False), ({}, 9.9, 0, True)],
    ids=["waited", "many bytes", "forced", "the end of a run"],
)
def test_a_file_is_due(
    changed: dict[str, object], oldest_s: float, waiting_bytes: int, is_ending: bool
) -> None:
    assert policy(**changed).due_in_s(10.0, oldest_s, waiting_bytes, 0, 0, is_ending=is_ending) == 0.0


def test_behind_a_journal_much_wal_is_not_waited_for() -> None:
    """A large transaction has little in memory, and five seconds of a load are hundreds of megabytes of WAL."""
    assert policy().due_in_s(10.0, 9.9, 0, BEHIND_WAL_BYTES + 1, 1, is_ending=False) == 0.0
    assert policy().due_in_s(10.0, 9.9, 0, BEHIND_WAL_BYTES, 1, is_ending=False) == pytest.approx(4.9)


def test_the_wal_of_what_waits_is_told_until_a_file_has_it() -> None:
    order = CommitOrder(batch_rows=100, batch_bytes=10**6, confirmed_lsn=Lsn(50))
    assert order.unconfirmed_wal_bytes == 0
    add(order, 0, 100)
    assert order.unconfirmed_wal_bytes == 0, "the server keeps it, but it is not there yet"
    order.content_arrived(0, in_memory(700))
    assert order.unconfirmed_wal_bytes == 104 - 50
    write(order)
    assert order.unconfirmed_wal_bytes == 0


def test_without_a_sink_only_a_moment_is_waited() -> None:
    due_in_s = policy(has_sink=False).due_in_s(10.0, 9.9, 0, 0, 0, is_ending=False)
    assert due_in_s == pytest.approx(0.1)


@pytest.mark.parametrize("max_bytes", [0, 1000])
def test_a_full_journal_and_one_that_is_off_take_nothing(max_bytes: int) -> None:
    assert policy(max_bytes=max_bytes).due_in_s(10.0, 0.0, 10**9, 10**9, 1000, is_ending=True) is None


def test_without_a_sink_files_follow_each_other_once_a_second_unless_much_waits() -> None:
    capture = policy(has_sink=False)
    assert capture.due_in_s(10.0, 9.9, 0, 0, 0, is_ending=False, last_file_s=9.5) == pytest.approx(
        PACE_S - 0.5
    )
    assert capture.due_in_s(10.0, 9.9, 0, 0, 0, is_ending=False, last_file_s=1.0) == pytest.approx(0.1)
    assert capture.due_in_s(10.0, 9.9, 101, 0, 0, is_ending=False, last_file_s=9.9) == 0
    assert capture.due_in_s(10.0, 9.9, 0, 0, 0, is_ending=True, last_file_s=9.9) == 0


def test_a_damaged_file_that_the_sink_holds_all_of_is_no_loss() -> None:
    """The storage was restored to an older state than the sink: the run ended with status 4, with nothing lost."""
    order = make_order()
    ready(order, 0, 1, 2)
    files = [write(order, number, 1) for number in range(3)]
    gone = DamagedFile("e1", 0, SlotLost("gone"), up_to_lsn=files[1].first_commit_lsn)
    journal = Journal([gone, files[1], DamagedFile("e1", 2, SlotLost("gone, too"), up_to_lsn=Lsn(400))])
    order = CommitOrder(batch_rows=100, batch_bytes=10**6, journal=journal, confirmed_lsn=Lsn(400))
    assert journal.awaits_sink and isinstance(order.undeliverable, SlotLost)
    journal.sink_opened(Lsn(199))
    assert journal.error is gone.error, "it may have a commit that the sink lacks"
    journal.sink_opened(Lsn(200))
    assert order.undeliverable is None and journal.to_load() is files[1]
    journal.damaged(files[1], SlotLost("a segment is missing"))
    assert isinstance(order.undeliverable, SlotLost)
    journal.sink_opened(Lsn(300))
    assert journal.spans == (JournalSpan("e1", 2, 2),) and journal.take_removed() == [files[1]]
    journal.sink_opened(Lsn(400))
    assert not journal and order.undeliverable is None
    assert (order.delivered_lsn, order.confirmed_lsn) == (400, 400)
