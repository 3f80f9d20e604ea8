"""The sequencer's body on a loop of the test's: what it says before it has a slot, and whose its state is."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.opened import opened_at
from tests.unit.storage.conftest import relation
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.confirming import Confirming
from xidstream.pipeline.commits.journal_policy import JournalPolicy
from xidstream.pipeline.commits.journaling import Journaling
from xidstream.pipeline.commits.prepared import FinishedPrepares
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import Action, ExitStatus, SegmentCorrupt, SlotLost, Superseded, XidstreamError
from xidstream.pipeline.exchange import (
    JournalFile,
    JournalSpan,
    Pace,
    PreparedTransaction,
    Sealed,
    Segment,
    SegmentPart,
    TransactionEnd,
)
from xidstream.pipeline.parked import BadTable, ParkedTable
from xidstream.pipeline.parquet import CommitStamp, RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import internal_schema
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import write_prepared
from xidstream.pipeline.storage.progress import read_progress, write_progress
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import Committed, CommittedPrepared, Prepared, RolledBackPrepared
from xidstream.pipeline.stream.event_router import OrderedEvent
from xidstream.pipeline.transactions.sealed import empty_unit, transaction_row

__all__ = ["relation"]


def sequence(config: Config) -> CommitSequence:
    return CommitSequence(config, "e", lambda error: error, fetch=lambda ref: ref, put=lambda table: table)


def test_there_are_no_figures_before_the_slot_is_open() -> None:
    """They once showed 0/0 as confirmed while the slot was still being made: a user's transaction came too early."""

    async def ask() -> object:
        return await sequence(Config()).account(with_prepared=True)

    assert asyncio.run(ask()) is None


def test_the_call_of_a_driver_that_died_takes_nothing_from_the_next_one(tmp_path: Path) -> None:
    """It waits on in the sequencer. What it took then nobody would ever report, and nothing after it was confirmed."""
    end = TransactionEnd(Xid(700), Lsn(20), Lsn(24), 0)

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        await sequencer.open(reader.tell, AT_5, None)
        dead = (await sequencer.sink_opened(Lsn(0), 0)).loop
        of_the_dead = asyncio.ensure_future(sequencer.next_batch(60, dead))
        await asyncio.sleep(0)
        living = (await sequencer.sink_opened(Lsn(0), 0)).loop
        await sequencer.submit([OrderedEvent(0, Committed(end, False))])
        with pytest.raises(Superseded, match="loop 2 has the sink"):
            await of_the_dead
        batch = await sequencer.next_batch(60, living)
        assert batch is not None and batch.n_transactions == 1

    asyncio.run(work())


def test_a_late_call_of_a_loop_that_was_replaced_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """It took a batch that nobody reported: nothing after it was confirmed any more."""
    ends = [TransactionEnd(Xid(700 + i), Lsn(20 + 10 * i), Lsn(24 + 10 * i), 0) for i in range(2)]

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path), batch_rows=1)), Reader()
        await sequencer.open(reader.tell, AT_5, Lsn(34))
        await sequencer.submit([OrderedEvent(i, Committed(end, False)) for i, end in enumerate(ends)])
        dead = (await sequencer.sink_opened(Lsn(0), 0)).loop
        taken = await sequencer.next_batch(60, dead)
        assert taken is not None
        living = (await sequencer.sink_opened(Lsn(0), 0)).loop
        for late in (sequencer.next_batch(60, dead), sequencer.batch_done(taken.number, dead)):
            with pytest.raises(Superseded, match="batch loop 1 of epoch e was given up"):
                await late
        while not await sequencer.finished():
            batch = await sequencer.next_batch(1, living)
            if batch is not None:
                await sequencer.batch_done(batch.number, living)

    asyncio.run(asyncio.wait_for(work(), 60))


AT_5 = opened_at(5, 100)


def test_what_commits_while_a_batch_may_grow_is_in_it_and_what_the_sink_has_is_confirmed_at_once(
    tmp_path: Path,
) -> None:
    """The wait was in the sink once, with the batch in hand: who came meanwhile had another one before it."""
    now_us = time.time_ns() // 1000

    async def work() -> list[int]:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        await sequencer.open(reader.tell, AT_5, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        n = 0

        async def commit() -> None:
            nonlocal n
            lsn = 100 * (n + 1)
            end = TransactionEnd(Xid(700), Lsn(lsn), Lsn(lsn + 4), now_us)
            row = transaction_row(end, 1, (), with_messages=False)
            result: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
            result.set_result(Sealed(row, (), (), (), 1, 10))
            await sequencer.submit([OrderedEvent(n, Committed(end, True), result)])
            n += 1

        await commit()
        first = await sequencer.next_batch(10, loop)
        assert first is not None
        await commit()
        began_s = time.monotonic()
        pace = Pace(0.5, 10, 1e9)
        waiting = asyncio.ensure_future(sequencer.next_batch(10, loop, first.number, pace))
        while max(reader.confirmed, default=0) < 104:
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_s < 0.5 and not waiting.done()
        await commit()
        second = await waiting
        assert second is not None and time.monotonic() - began_s >= 0.5
        # A wait that ends before the pace does has nothing.
        await commit()
        assert await sequencer.next_batch(0.05, loop, second.number, Pace(60, 10, 1e9)) is None
        third = await sequencer.next_batch(10, loop, None, Pace(60, 10, 0.0))
        assert third is not None, "it is behind"
        return [batch.n_transactions for batch in (first, second, third)]

    assert asyncio.run(asyncio.wait_for(work(), 60)) == [1, 2, 1]


def test_whoever_claims_the_sink_is_told_of_the_parks_that_it_has_behind_it_and_of_no_later_one(
    tmp_path: Path,
) -> None:
    """A snapshot that was committed before the next batch was taken for the table, though rows were left out."""
    delivered, later = (
        ParkedTable(relid, "public.t", Lsn(lsn), Xid(9), "why") for relid, lsn in ((1, 3), (2, 8))
    )
    was_parked = ParkedTable(3, "public.u", Lsn(2), Xid(9), "why", until_lsn=Lsn(4), awaits_sink=True)
    layout = Layout(AT_5.identity.system_identifier, AT_5.identity.slot, "before")
    write_progress(Storage(str(tmp_path)), layout, Lsn(5), parked=[delivered, was_parked, later])

    async def work() -> tuple[ParkedTable, ...]:
        sequencer = sequence(Config(storage=str(tmp_path)))
        await sequencer.open(Reader().tell, AT_5, None)
        return (await sequencer.sink_opened(Lsn(6), 0)).parked

    told = asyncio.run(asyncio.wait_for(work(), 60))
    assert told == (delivered, dataclasses.replace(was_parked, until_lsn=Lsn(7), awaits_sink=False))


@pytest.mark.parametrize("is_being_written", [False, True])
def test_a_transaction_that_the_sink_cannot_read_stays_in_the_slot(
    tmp_path: Path, is_being_written: bool
) -> None:
    """The run looked 5 s for a deeper cause. By then the journal had taken the damaged file, and it was confirmed."""
    end = TransactionEnd(Xid(700), Lsn(20), Lsn(24), 0)
    may_end = threading.Event()

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        await sequencer.open(reader.tell, AT_5, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        write = sequencer._storage.write_journal
        sequencer._storage.write_journal = lambda *given: (may_end.wait(60), write(*given))[1]  # type: ignore[method-assign]
        await sequencer.submit([OrderedEvent(0, Committed(end, False))])
        assert await sequencer.next_batch(60, loop) is not None
        if is_being_written:
            await sequencer.stop()
            while not sequencer._journaling._writing:
                await asyncio.sleep(0.01)
        await sequencer.withhold_journal()
        may_end.set()
        await sequencer.stop()
        while not await sequencer.finished():
            await asyncio.sleep(0.01)
        record = read_progress(Storage(str(tmp_path)), Layout(1, "s", "e"))
        assert record is not None and (record.confirmed_lsn, record.journal) == (5, ())
        assert max(reader.confirmed, default=5) <= 5

    asyncio.run(asyncio.wait_for(work(), 60))


def test_nothing_behind_a_parked_tables_first_commit_is_released_before_the_park_is_recorded(
    tmp_path: Path,
) -> None:
    """A crash after the release, and a later run that takes the change, would leave a hole that nobody knows of."""
    end = TransactionEnd(Xid(700), Lsn(20), Lsn(24), 0)
    bad = BadTable(5, "public.bad", Lsn(19), "why", 3, Xid(700), Lsn(20))

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        await sequencer.open(reader.tell, AT_5, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        filled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        filled.set_result(dataclasses.replace(empty_unit(end), bad_tables=(bad,)))
        await sequencer.submit([OrderedEvent(0, Committed(end, False), filled)])
        batch = await sequencer.next_batch(60, loop)
        record = read_progress(Storage(str(tmp_path)), Layout(1, "s", "e"))
        assert batch is not None and record is not None
        (parked,) = record.parked
        assert (parked.since_lsn, parked.n_changes, record.confirmed_lsn) == (20, 0, 5)
        await sequencer.batch_done(batch.number, loop)
        while (record := read_progress(Storage(str(tmp_path)), Layout(1, "s", "e"))) is not None:
            if record.confirmed_lsn == 24:
                break
            await asyncio.sleep(0.01)
        assert record is not None and record.parked[0].n_changes == 3, "the count belongs to the position"

    asyncio.run(work())


def test_content_that_comes_with_its_entry_has_its_place_in_the_order(tmp_path: Path) -> None:
    """Calls that carry their content are made when it is there, and may overtake each other."""
    ends = [TransactionEnd(Xid(700 + i), Lsn(20 + 10 * i), Lsn(24 + 10 * i), 0) for i in range(3)]

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        await sequencer.open(reader.tell, AT_5, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        entries = [
            OrderedEvent(i, Committed(end, True), dataclasses.replace(empty_unit(end), n_rows=i + 1))
            for i, end in enumerate(ends)
        ]
        assert all(entry.has_content for entry in entries)
        await sequencer.submit(entries[2:])
        assert await sequencer.next_batch(0, loop) is None
        await sequencer.submit(entries[:1])
        first = await sequencer.next_batch(60, loop)
        assert first is not None and [unit.n_rows for unit in first.units] == [1]
        await sequencer.submit(entries[1:2])
        second = await sequencer.next_batch(60, loop, first.number)
        assert second is not None and [unit.n_rows for unit in second.units] == [2, 3]
        while sequencer._confirming.delivered_lsn < ends[0].end_lsn:
            await asyncio.sleep(0.01)
        assert sequencer._confirming.delivered_lsn == ends[0].end_lsn, "the pull has reported the first"

    asyncio.run(work())


@pytest.mark.parametrize("watermark", [0x1800, 0x3000])
def test_a_missing_file_of_the_journal_is_told_when_the_sink_has_said_whether_it_holds_it(
    tmp_path: Path, relation: RelationVersion, watermark: int
) -> None:
    storage, mine = Storage(str(tmp_path)), Layout(1, "s", "earlier")
    at = opened_at(0x100, 0x10_000)
    first = SlotStorage(str(tmp_path), at, "earlier")
    first.take_over()
    made = Made(storage, mine, relation)
    made.write(0, 0x2000)
    made.write(1, 0x3000)
    first.record(Lsn(0x3030), [], Lsn(0x100), [JournalSpan("earlier", 0, 1)])
    storage.delete([mine.journal_key(0)])

    async def work() -> None:
        sequencer, reader = sequence(Config(storage=str(tmp_path))), Reader()
        opened = dataclasses.replace(at, confirmed_flush_lsn=Lsn(0x3030), start_lsn=Lsn(0x3030))
        await sequencer.open(reader.tell, opened, Lsn(0x3030))
        assert not await sequencer.finished()
        loop = (await sequencer.sink_opened(Lsn(watermark), 0)).loop
        if watermark < 0x2000:
            with pytest.raises(SlotLost, match="it alone had the transactions"):
                await sequencer.next_batch(60, loop)
            return
        batch = await sequencer.next_batch(60, loop)
        assert batch is not None
        (unit,) = batch.units
        assert unit.transactions.column("commit_lsn").to_pylist() == [0x3000]
        await sequencer.batch_done(batch.number, loop)
        while not await sequencer.finished():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 60))


class Reader:
    """As far as the sequencer knows one: it is told what may be confirmed."""

    def __init__(self) -> None:
        self.confirmed: list[Lsn] = []

    async def tell(self, confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
        self.confirmed.append(confirmed_lsn)


class WatchedPrepares(FinishedPrepares):
    """Notes which thread comes in by each of its ways."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, set[int]] = {}

    def _note(self, way: str) -> None:
        self.threads.setdefault(way, set()).add(threading.get_ident())

    def add(self, ticket: int, prepared: PreparedTransaction) -> None:
        self._note("add")
        super().add(ticket, prepared)

    def without_kept(self, keys: Iterable[str]) -> list[str]:
        self._note("without_kept")
        return super().without_kept(keys)

    def due(self, done_ticket: int) -> dict[int, PreparedTransaction]:
        self._note("due")
        return super().due(done_ticket)

    def forget(self, tickets: Iterable[int]) -> None:
        self._note("forget")
        super().forget(tickets)


def test_finished_prepares_belong_to_the_event_loop_while_positions_are_recorded_beside_it(
    tmp_path: Path,
) -> None:
    """The thread that records took them out of a dictionary that the loop was iterating over: RuntimeError."""
    prepared = Prepared(Xid(700), "g", Lsn(10), Lsn(14), False, None, False)
    record = PreparedTransaction(Xid(700), "g", Lsn(10), Lsn(14), False, None, ())
    end = TransactionEnd(Xid(700), Lsn(20), Lsn(24), 0, gid="g")
    finished, reader = WatchedPrepares(), Reader()

    async def work() -> None:
        sequencer = sequence(Config(storage=str(tmp_path)))
        sequencer._finished = finished
        await sequencer.open(reader.tell, AT_5, Lsn(24))
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.set_result(record)
        await sequencer.submit([OrderedEvent(0, prepared, written), OrderedEvent(1, CommittedPrepared(end))])
        batch = await sequencer.next_batch(60, 0)
        assert batch is not None
        await sequencer.batch_done(batch.number, 0)
        while not await sequencer.finished():
            await sequencer.next_batch(60, 0)

    asyncio.run(work())
    assert reader.confirmed[-1] == Lsn(24)
    ways = ("add", "without_kept", "due", "forget")
    assert finished.threads == {way: {threading.get_ident()} for way in ways}


# -- prepared transactions whose content was damaged in the storage ---------------------------------------

OPENED = opened_at(0x5000, 0x10_000)
RELATION = RelationVersion(16_400, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 23, -1, True),))
EARLIER, NOW = Layout(1, "s", "earlier"), Layout(1, "s", "e")


def store_prepared(storage: Storage, layout: Layout, xid: int) -> PreparedTransaction:
    key = layout.segment_key(Xid(xid), Lsn(0x100), 0)
    ids = pa.RecordBatch.from_arrays(
        [
            pa.array([value], field.type)
            for value, field in zip((0, 0, 0, None, None, 7), INTERNAL, strict=True)
        ],
        schema=INTERNAL,
    )
    segment = write_segment(storage, key, RELATION, xid, [ids])
    prepared = PreparedTransaction(Xid(xid), f"g{xid}", Lsn(0x100), Lsn(0x200 + xid), True, None, (segment,))
    write_prepared(storage, layout, prepared)
    return prepared


INTERNAL = internal_schema(RELATION)


def flip(storage: Storage, key: str) -> None:
    data = bytearray(storage.read_bytes(key))
    data[8] ^= 1
    storage.write_bytes(key, bytes(data))


def ends_of(*xids: int) -> list[OrderedEvent]:
    ends = [TransactionEnd(Xid(x), Lsn(0x6000 + x), Lsn(0x6001 + x), 0, gid=f"g{x}") for x in xids]
    return [OrderedEvent(ticket, CommittedPrepared(end)) for ticket, end in enumerate(ends)]


def run_to_the_end(folder: Path, entries: list[OrderedEvent], watermark: int = 0) -> tuple[list[int], Any]:
    """The xids that were delivered, and what the run ended with. An earlier run has left its record."""
    delivered: list[int] = []
    storage = Storage(str(folder))
    if read_progress(storage, EARLIER) is None:
        write_progress(storage, EARLIER, OPENED.confirmed_flush_lsn)

    async def work() -> None:
        sequencer = sequence(Config(storage=str(folder)))
        await sequencer.open(Reader().tell, OPENED, entries[-1].event.end.end_lsn)  # type: ignore[union-attr]
        loop = (await sequencer.sink_opened(Lsn(watermark), 0)).loop
        await sequencer.submit(entries)
        while not await sequencer.finished():
            batch = await sequencer.next_batch(1, loop)
            if batch is not None:
                delivered.extend(x for unit in batch.units for x in unit.transactions["xid"].to_pylist())
                await sequencer.batch_done(batch.number, loop)

    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    except XidstreamError as error:
        return delivered, error
    return delivered, None


@pytest.mark.parametrize("what", ["segment", "missing segment", "manifest"])
def test_damage_to_one_prepared_transaction_is_told_at_its_commit_behind_all_before_it(
    tmp_path: Path, what: str
) -> None:
    """It restarted until the run gave up, or nothing started at all: the server sends neither PREPARE again."""
    storage = Storage(str(tmp_path))
    records = {xid: store_prepared(storage, EARLIER, xid) for xid in (700, 701, 702)}
    key = records[701].segments[0].key
    if what == "segment":
        flip(storage, key)
    elif what == "missing segment":
        storage.delete([key])
    else:
        flip(storage, EARLIER.prepared_key(Xid(701), records[701].prepare_end_lsn))
    delivered, error = run_to_the_end(tmp_path, ends_of(700, 701, 702))
    assert delivered == [700]
    assert isinstance(error, SlotLost) and error.policy.exit_status is ExitStatus.TERMINAL
    assert "701" in error.message and ("earlier" in error.message)
    assert "xidstream slot skip --xid 701 --commit-lsn 0/62BD" in error.remedy
    assert storage.exists(records[702].segments[0].key), "what is not damaged is kept for the next run"
    assert what == "missing segment" or storage.exists(key), "a manifest may be restored"


def test_a_prepare_of_this_run_that_is_damaged_is_asked_for_once_more(tmp_path: Path) -> None:
    """It need not be confirmed yet. If it is, the next epoch finds it as an earlier one's."""
    storage = Storage(str(tmp_path))
    record = store_prepared(storage, NOW, 700)
    flip(storage, record.segments[0].key)
    delivered, error = run_to_the_end(tmp_path, ends_of(700))
    assert delivered == [] and isinstance(error, SegmentCorrupt)
    assert error.policy.action is Action.RESTART


def test_damage_to_what_the_sink_holds_already_stops_nobody(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    flip(storage, store_prepared(storage, EARLIER, 700).segments[0].key)
    assert run_to_the_end(tmp_path, ends_of(700), watermark=0x6000 + 700) == ([], None)


def test_a_damaged_prepared_transaction_that_was_rolled_back_leaves_nothing(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    record = store_prepared(storage, EARLIER, 700)
    manifest = EARLIER.prepared_key(Xid(700), record.prepare_end_lsn)
    flip(storage, manifest)
    rolled_back = RolledBackPrepared(Xid(700), "g700", record.prepare_end_lsn, Lsn(0x6100))
    store_prepared(storage, EARLIER, 701)
    (end,) = ends_of(701)
    delivered, error = run_to_the_end(tmp_path, [OrderedEvent(0, rolled_back), OrderedEvent(1, end.event)])
    assert (delivered, error) == ([701], None)
    assert not storage.exists(manifest)


class NotedStorage:
    """Notes in which order things are recorded and deleted. Each takes a moment, as a disk does."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, *_: object) -> None:
        self.log.append("record begins")
        time.sleep(0.05)
        self.log.append("record durable")

    def delete(self, keys: list[str]) -> None:
        if keys:
            self.log.append("delete")

    def remove_journal(self, _: object) -> None:
        self.log.append("remove journal")


@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_transaction_in_segments_is_not_little_to_a_reader_that_waits_for_credit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_spilled: bool
) -> None:
    """The reader counts its raw bytes. Two of them stopped the reading until the next record, a second later."""
    config = Config(storage=str(tmp_path))
    segment = Segment("a segment", RELATION, RowFile(1, 1, "crc32:00000000", 0, ()))
    taken: list[int] = []
    monkeypatch.setattr(Confirming, "press", lambda _, n_bytes: taken.append(n_bytes))

    async def work() -> None:
        made = sequence(config)
        await made.open(Reader().tell, AT_5, None)
        loop = (await made.sink_opened(Lsn(0), 0)).loop
        content = empty_unit(TransactionEnd(Xid(7), Lsn(100), Lsn(104), 0))
        if is_spilled:
            content = dataclasses.replace(content, segments=(SegmentPart(segment, CommitStamp(Lsn(100), 0)),))
        made._order.add_unit(0, Lsn(100), Lsn(100), Lsn(104), 1)
        made._order.content_arrived(0, content)
        batch = await made.next_batch(5, loop)
        assert batch is not None
        await made.batch_done(batch.number, loop)

    asyncio.run(work())
    (n_bytes,) = taken
    assert (n_bytes >= min(config.backlog_bytes, config.buffer_memory_bytes)) is is_spilled


@pytest.mark.parametrize("turns", range(7))
def test_a_journaled_segment_is_deleted_only_behind_a_record_without_its_file(
    turns: int,
) -> None:
    """Between a batch's end and the look for what the journal needs, a record had begun: it depends on the turns of the
    loop since somebody waited for the same condition."""
    segment = Segment("a segment", RELATION, RowFile(1, 1, "crc32:00000000", 0, ()))
    noted = NotedStorage()

    async def work() -> None:
        made = sequence(Config())
        order = made._order
        order.add_unit(0, Lsn(100), Lsn(100), Lsn(104), 1)
        content = empty_unit(TransactionEnd(Xid(7), Lsn(100), Lsn(104), 0))
        part = SegmentPart(segment, CommitStamp(Lsn(100), 0))
        order.content_arrived(0, dataclasses.replace(content, segments=(part,)))
        entries = order.to_write(1, 1)
        end = entries[0].end
        order.written(
            JournalFile(0, "e", *dataclasses.astuple(end)[:3], 0, 1, 1, 0, 1, (segment.key,)), entries
        )
        made._storage, made._has_sink = noted, True  # type: ignore[assignment]
        policy = JournalPolicy(1 << 30, 60, 1 << 30)
        made._journaling = Journaling(order, noted, policy, id, id, made._changed)  # type: ignore[arg-type]
        made._confirming = Confirming(
            order,
            noted,
            made._journaling,
            made._finished,
            Reader().tell,
            made._changed,  # type: ignore[arg-type]
        )
        made._is_open = True
        batch = order.next_batch()
        assert batch is not None
        waiting = [
            asyncio.ensure_future(made.next_batch(5, 0)),
        ]
        made._confirming.begin(lambda work: waiting.append(asyncio.ensure_future(work)))
        await asyncio.sleep(0.01)
        made._changed.notify()
        for _ in range(turns):
            await asyncio.sleep(0)
        await made.batch_done(batch.number, 0)
        deadline_s = time.monotonic() + 20
        while "remove journal" not in noted.log and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for task in waiting:
            task.cancel()

    asyncio.run(work())
    assert noted.log == ["record begins", "record durable", "remove journal"]
