"""What is confirmed, and what it waits for: on a loop of the test's, over a folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.opened import opened_at
from xidstream.pipeline.commits import record_pace
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.exchange import PreparedTransaction, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import Committed, CommittedPrepared, Position, Prepared
from xidstream.pipeline.stream.event_router import OrderedEvent
from xidstream.pipeline.transactions.sealed import empty_unit

OPENED = opened_at(5, 10_000)
DEADLINE_S = 60
"""Only ends a test that hangs; no assertion depends on it."""


class Reader:
    def __init__(self) -> None:
        self.told: list[Lsn] = []

    async def tell(self, confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
        self.told.append(confirmed_lsn)

    async def hears_of(self, lsn: int) -> None:
        while max(self.told, default=0) < lsn:
            await asyncio.sleep(0.005)


def sequence(folder: Path, **settings: Any) -> CommitSequence:
    config = Config(storage=str(folder), **settings)
    return CommitSequence(config, "e", lambda error: error, fetch=lambda ref: ref, put=lambda table: table)


def transaction(ticket: int, commit_lsn: int) -> OrderedEvent:
    end = TransactionEnd(Xid(700 + ticket), Lsn(commit_lsn), Lsn(commit_lsn + 4), 0)
    return OrderedEvent(ticket, Committed(end, False))


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def test_the_server_is_told_before_delivered_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that had caught up left thousands of them, and WAL waited on the server while they were deleted."""
    may_remove, is_removing = threading.Event(), threading.Event()
    remove = SlotStorage.remove_journal

    def slow(self: SlotStorage, files: Any) -> None:
        is_removing.set()
        assert may_remove.wait(DEADLINE_S)
        remove(self, files)

    monkeypatch.setattr(SlotStorage, "remove_journal", slow)

    async def work() -> None:
        sequencer, reader = sequence(tmp_path, journal_after_bytes=0, batch_rows=1), Reader()
        await sequencer.open(reader.tell, OPENED, Lsn(44))
        await sequencer.submit([transaction(0, 20)])
        await reader.hears_of(24)
        files = list(tmp_path.rglob("*.journal"))
        assert len(files) == 1, "it is in the journal"
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        batch = await sequencer.next_batch(DEADLINE_S, loop)
        assert batch is not None
        await sequencer.batch_done(batch.number, loop)
        while not is_removing.is_set():
            await asyncio.sleep(0.005)
        assert files[0].exists()
        await sequencer.submit([transaction(1, 40)])
        await reader.hears_of(44)
        while (batch := await sequencer.next_batch(0.1, loop)) is not None:
            await sequencer.batch_done(batch.number, loop)
        assert not await sequencer.finished(), "a run that ends leaves nothing behind"
        may_remove.set()
        while not await sequencer.finished():
            await asyncio.sleep(0.005)
        assert not list(tmp_path.rglob("*.journal"))

    run(work())


def records_of(monkeypatch: pytest.MonkeyPatch) -> list[Lsn]:
    recorded: list[Lsn] = []
    record = SlotStorage.record

    def noted(self: SlotStorage, confirmed_lsn: Lsn, *given: Any) -> None:
        recorded.append(confirmed_lsn)
        record(self, confirmed_lsn, *given)

    monkeypatch.setattr(SlotStorage, "record", noted)
    return recorded


def test_positions_of_a_quiet_publication_share_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_pace, "POSITION_INTERVAL_S", 0.5)
    recorded = records_of(monkeypatch)

    async def work() -> None:
        sequencer, reader = sequence(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, None)
        await sequencer.submit([OrderedEvent(0, Position(Lsn(10)))])
        await reader.hears_of(10)
        for i in range(1, 21):
            await sequencer.submit([OrderedEvent(i, Position(Lsn(10 + i)))])
            await asyncio.sleep(0)
        await reader.hears_of(30)
        assert recorded == [10, 30]

    run(work())


@pytest.mark.parametrize("what", ["a batch", "the target", "the end"])
def test_nothing_but_positions_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(record_pace, "POSITION_INTERVAL_S", 10 * DEADLINE_S)

    async def work() -> None:
        sequencer, reader = sequence(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, Lsn(30) if what == "the target" else None)
        await sequencer.submit([OrderedEvent(0, Position(Lsn(10)))])
        await reader.hears_of(10)
        await sequencer.submit([OrderedEvent(1, Position(Lsn(14)))])
        if what == "a batch":
            loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
            await sequencer.submit([transaction(2, 20)])
            batch = await sequencer.next_batch(DEADLINE_S, loop)
            assert batch is not None
            await sequencer.batch_done(batch.number, loop)
        elif what == "the target":
            await sequencer.submit([OrderedEvent(2, Position(Lsn(30)))])
        else:
            await sequencer.stop()
        await reader.hears_of({"a batch": 24, "the target": 30, "the end": 14}[what])
        if what != "a batch":
            while not await sequencer.finished():
                await asyncio.sleep(0.005)
        record = read_progress(Storage(str(tmp_path)), Layout(1, "s", "e"))
        assert record is not None and record.confirmed_lsn == reader.told[-1]

    run(work())


def test_prepared_transactions_that_are_read_hold_up_no_confirmation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of one are read at its COMMIT PREPARED. Asyncio's threads, which recorded as well, all did that."""
    may_end = threading.Event()
    n_prepared = 40

    def content_of(self: SlotStorage, prepared: PreparedTransaction, end: TransactionEnd) -> Any:
        assert may_end.wait(DEADLINE_S)
        return empty_unit(end)

    monkeypatch.setattr(SlotStorage, "content_of", content_of)

    async def work() -> None:
        sequencer, reader = sequence(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        await sequencer.submit([transaction(0, 20)])
        for i in range(n_prepared):
            xid, gid = Xid(900 + i), f"g{i}"
            record = PreparedTransaction(xid, gid, Lsn(100 + i), Lsn(101 + i), True, None, ())
            filled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            filled.set_result(record)
            prepare = Prepared(xid, gid, Lsn(100 + i), Lsn(101 + i), True, None, True)
            await sequencer.submit([OrderedEvent(1 + i, prepare, filled)])
        for i in range(n_prepared):
            end = TransactionEnd(Xid(900 + i), Lsn(1000 + 10 * i), Lsn(1004 + 10 * i), 0, gid=f"g{i}")
            await sequencer.submit([OrderedEvent(1 + n_prepared + i, CommittedPrepared(end))])
        await asyncio.sleep(0.2)
        batch = await sequencer.next_batch(DEADLINE_S, loop)
        assert batch is not None and batch.n_transactions == 1
        await sequencer.batch_done(batch.number, loop)
        await reader.hears_of(24)
        may_end.set()

    try:
        run(work())
    finally:
        may_end.set()
