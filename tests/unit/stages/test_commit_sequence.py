"""The sequencer's body on a loop of the test's: what it says before it has a slot, and whose its state is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xidstream.pipeline.config import Config
from xidstream.pipeline.exchange import (
    Opened,
    PrepareCover,
    PreparedTransaction,
    SlotIdentity,
    TransactionEnd,
)
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.sequencer import FinishedPrepares
from xidstream.pipeline.stages.commit_sequence import CommitSequence, Entry
from xidstream.pipeline.stream import CommittedPrepared, Prepared


def sequence(config: Config) -> CommitSequence:
    return CommitSequence(config, "e", lambda error: error)


def test_there_are_no_figures_before_the_slot_is_open() -> None:
    """They once showed 0/0 as confirmed while the slot was still being made: a user's transaction came too early."""

    async def ask() -> object:
        return await sequence(Config()).stats()

    assert asyncio.run(ask()) is None


class Reader:
    """As far as the sequencer knows one: it is told what may be confirmed."""

    def __init__(self) -> None:
        self.confirmed: list[Lsn] = []

    async def tell(self, confirmed_lsn: Lsn, done_ticket: int) -> None:
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
    opened = Opened(
        SlotIdentity(1, "d", "s"),
        confirmed_flush_lsn=Lsn(5),
        target_lsn=Lsn(100),
        server_version=180004,
        proto_version=4,
        streaming="on",
        two_phase=True,
        cover=PrepareCover(),
        timeline=1,
        history={},
    )
    finished, reader = WatchedPrepares(), Reader()

    async def work() -> None:
        sequencer = sequence(Config(storage=str(tmp_path)))
        sequencer._finished = finished
        await sequencer.open(reader.tell, opened, Lsn(24))
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.set_result(record)
        await sequencer.submit([Entry(0, prepared, written), Entry(1, CommittedPrepared(end))])
        batch = await sequencer.next_batch(60)
        assert batch is not None
        await sequencer.batch_done(batch.number)
        while not await sequencer.finished():
            await sequencer.next_batch(60)

    asyncio.run(work())
    assert reader.confirmed[-1] == Lsn(24)
    ways = ("add", "without_kept", "due", "forget")
    assert finished.threads == {way: {threading.get_ident()} for way in ways}
