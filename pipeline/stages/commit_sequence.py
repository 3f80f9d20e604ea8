"""What the commit sequencer does: it waits for buffers, releases in commit order, confirms behind the sink.

An asyncio shell around ``pipeline.sequencer``. It takes the reader's entries in the order of their tickets. What an
entry waits for (an awaitable of what its buffer returns) is awaited beside it, so buffers may finish in any order.
``next_batch`` is the driver's pull and thereby the backpressure. ``actors.commit_sequencer`` makes a Ray actor of it;
tests run it on an event loop of their own.

All state is the event loop's. Threads call ``SlotStorage`` alone: it is given what it needs and returns what it found.

Confirming has one path: when the contiguous done prefix has grown, its position is recorded in storage and only
then given to the reader. The first error of any part is kept and raised to everyone who asks: a run never
continues beside a lost part. A transaction that cannot be delivered is no lost part: its error is raised when its turn
comes, with all before it delivered and confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from xidstream.pipeline.account.model import SequencerReport
from xidstream.pipeline.buffer.transaction import left_out, nothing, undeliverable
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import SlotLost, XidstreamError
from xidstream.pipeline.exchange import Batch, Opened, PreparedTransaction, Tenure, TransactionEnd
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import NOBODY
from xidstream.pipeline.sequencer import CommitOrder, Delivered, FinishedPrepares, PreparedBook
from xidstream.pipeline.stages.sequencer_stats import SequencerStats, sequencer_report
from xidstream.pipeline.stages.slot_storage import SlotStorage
from xidstream.pipeline.stream import (
    Committed,
    CommittedPrepared,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    Unsendable,
)


@dataclass(frozen=True)
class Entry:
    """One entry of the commit order. ``result``: an awaitable of what its buffer returns; None where none does."""

    ticket: int
    cut: Cut
    result: Any = None


TellReader = Callable[[Lsn, int], Awaitable[None]]
"""Tells the reader the position that may be confirmed, and the ticket up to which nothing waits for the sink."""


class CommitSequence:
    """``translate`` gives the error to raise in place of what awaiting a buffer's result raised."""

    def __init__(
        self, config: Config, epoch: str, translate: Callable[[BaseException], BaseException]
    ) -> None:
        self._translate = translate
        self._config = config
        self._epoch = epoch
        self._order = CommitOrder(batch_rows=config.batch_rows, batch_bytes=config.batch_bytes)
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._target: Lsn | None = None
        self._confirmed = INVALID_LSN
        self._stopping = False
        self._told_ticket = -1
        self._early: dict[int, Entry] = {}
        self._prepared = PreparedBook()
        self._watermark = INVALID_LSN
        self._given_up = NOBODY
        self._left_out: list[tuple[Xid, Lsn]] = []
        self._leaving_out: dict[int, list[tuple[Xid, Lsn]]] = {}
        self._finished = FinishedPrepares()
        self._is_open = False
        self._delivered = Delivered()
        self._recording_since_s: float | None = None

    # -- set-up ----------------------------------------------------------------------------------------

    async def open(self, tell_reader: TellReader, opened: Opened, target_lsn: Lsn | None) -> None:
        """Take over the storage of this slot, which the reader holds by now.

        Raises SlotLost where the slot was confirmed past what this pipeline ever recorded, or the server is older
        than what it delivered before.
        """
        self._tell_reader = tell_reader
        self._target = target_lsn
        self._takes_snapshots = opened.snapshots.takes_snapshots
        self._storage = SlotStorage(self._config.storage, opened, self._epoch)
        self._confirmed, self._prepared = await asyncio.to_thread(self._storage.take_over)
        self._given_up = opened.given_up
        # A commit that begins exactly at the confirmed position is not behind it.
        self._watermark = self._confirmed.before
        self._is_open = True
        self._spawn(self._confirm_forever())

    async def sink_opened(self, watermark: Lsn, last_owner: int) -> Tenure:
        """What the sink already holds, and from whom; transactions up to it may be repeated by the server.

        Returns as whom the sink is to be claimed. Raises Superseded.
        """
        self._watermark = max(self._watermark, watermark)
        return await asyncio.to_thread(self._storage.tenure, last_owner)

    async def takes_snapshots(self) -> bool:
        """Whether the slot's tables are read as they were before it."""
        return self._takes_snapshots

    # -- from the reader -------------------------------------------------------------------------------

    async def submit(self, entries: list[Entry]) -> None:
        """Take entries at their tickets' turn: calls to an asyncio actor may overtake each other."""
        self._early.update((entry.ticket, entry) for entry in entries)
        try:
            while (entry := self._early.pop(self._order.next_ticket, None)) is not None:
                self._take(entry)
        except XidstreamError as error:
            await self._fail(error)
            raise
        await self._notify()

    def _take(self, entry: Entry) -> None:
        cut, ticket = entry.cut, entry.ticket
        if isinstance(cut, PlainBlock):
            self._order.add_unit(
                ticket, cut.first_commit_lsn, cut.last_commit_lsn, cut.end_lsn, cut.n_transactions
            )
            self._spawn(self._fill_from(ticket, entry.result))
        elif isinstance(cut, Committed):
            self._add_transaction(ticket, cut.end)
            if entry.result is not None:
                self._spawn(self._fill_from(ticket, entry.result))
            else:
                self._order.fill(ticket, nothing(cut.end))
        elif isinstance(cut, Prepared):
            self._order.add_hold(ticket, cut.end_lsn)
            self._spawn(self._prepare_from(ticket, entry.result))
        elif isinstance(cut, CommittedPrepared):
            self._add_transaction(ticket, cut.end)
            self._spawn(self._fill_prepared(ticket, cut.end))
        elif isinstance(cut, RolledBackPrepared):
            self._order.add_hold(ticket, cut.end_lsn)
            self._spawn(self._roll_back_prepared(ticket, cut))
        elif isinstance(cut, Unsendable):
            self._take_unsendable(ticket, cut)
        else:
            assert isinstance(cut, Position), cut
            self._order.add_position(ticket, cut.wal_end)

    def _take_unsendable(self, ticket: int, cut: Unsendable) -> None:
        if not cut.lsn or (cut.xid, cut.lsn) not in self._given_up:
            self._order.add_unit(ticket, INVALID_LSN, INVALID_LSN, INVALID_LSN, 0)
            self._order.fill(ticket, undeliverable(cut.error))
            return
        # The server decodes what commits at the confirmed position or behind it: this leaves out just the one.
        end = TransactionEnd(cut.xid, cut.lsn, Lsn(cut.lsn + 1), 0)
        self._add_transaction(ticket, end)
        self._order.fill(ticket, left_out(end))

    def _add_transaction(self, ticket: int, end: TransactionEnd) -> None:
        self._order.add_unit(ticket, end.commit_lsn, end.commit_lsn, end.end_lsn, 1)

    # -- from buffers ----------------------------------------------------------------------------------

    async def _fill_from(self, ticket: int, ref: Any) -> None:
        self._order.fill(ticket, await ref)

    async def _prepare_from(self, ticket: int, ref: Any) -> None:
        record: PreparedTransaction = await ref
        replaced = self._prepared.add(record)
        if replaced is not None:
            await asyncio.to_thread(self._storage.replace, replaced, record)
        self._order.resolve(ticket)

    async def _fill_prepared(self, ticket: int, end: TransactionEnd) -> None:
        await self._prepares_before(ticket)
        is_given_up = (end.xid, end.commit_lsn) in self._given_up
        try:
            prepared = self._prepared.commit(end, self._watermark, is_given_up=is_given_up)
        except SlotLost as error:
            self._order.fill(ticket, undeliverable(error))
            return
        if is_given_up:
            content = left_out(end)
        elif prepared is None:
            content = nothing(end)
        elif prepared.poison is not None:
            content = undeliverable(prepared.poison.of(end.xid, end.commit_lsn))
        else:
            content = await asyncio.to_thread(self._storage.content_of, prepared, end)
            if content.undeliverable is not None and end.commit_lsn <= self._watermark:
                content = nothing(end)  # it is damaged, but the sink holds it
        if prepared is not None:
            self._finished.add(ticket, prepared)
        self._order.fill(ticket, content)

    async def _roll_back_prepared(self, ticket: int, cut: RolledBackPrepared) -> None:
        await self._prepares_before(ticket)
        prepared = self._prepared.roll_back(cut.xid, cut.gid)
        if prepared is not None:
            self._finished.add(ticket, prepared)
        self._order.resolve(ticket)

    async def _prepares_before(self, ticket: int) -> None:
        """A K or r may arrive while the record of its P is still being written."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._order.holds_before(ticket))

    # -- to and from the driver ------------------------------------------------------------------------

    async def next_batch(self, wait_s: float) -> Batch | None:
        """The next batch; None when ``wait_s`` passed without one, or nothing more is to come (``finished``)."""
        deadline = time.monotonic() + wait_s
        async with self._changed:
            while True:
                self._raise_failure()
                if self.is_finished():
                    return None
                reach("releasing")
                batch = None if self._stopping else self._order.next_batch()
                if batch is not None:
                    reach("released")
                    if pairs := [pair for unit in batch.units for pair in unit.left_out]:
                        self._leaving_out[batch.number] = pairs
                    return batch
                self._raise_undeliverable()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                except asyncio.TimeoutError:
                    return None

    async def finished(self) -> bool:
        self._raise_failure()
        if not self.is_finished():
            self._raise_undeliverable()
        return self.is_finished()

    def is_finished(self) -> bool:
        reached = self._target is not None and self._confirmed >= self._target
        return reached or (self._stopping and self._is_all_told())

    async def batch_done(self, number: int) -> None:
        """The sink holds the batch: its segments go, its position may be confirmed."""
        self._raise_failure()
        if pairs := self._leaving_out.pop(number, None):
            # Before anything behind them can be confirmed.
            await asyncio.to_thread(self._storage.note_left_out, pairs)
            self._left_out += pairs
        contents = self._order.batch_done(number)
        reach("batch_accepted")
        self._delivered.add_batch(contents)
        await self._notify()
        keys = [key for content in contents for key in content.stored_keys()]
        await asyncio.to_thread(self._storage.delete, self._finished.without_kept(keys))

    async def aim(self, target: Lsn) -> None:
        """Be finished when everything up to ``target`` is confirmed."""
        self._target = target
        await self._notify()

    async def stop(self) -> None:
        """No further batch is given out."""
        self._stopping = True
        await self._notify()

    async def stats(self) -> SequencerStats | None:
        """None before ``open`` is done: there is no position yet, and perhaps no slot."""
        if not self._is_open:
            return None
        return SequencerStats(
            n_rows=self._delivered.n_rows,
            n_transactions=self._delivered.n_transactions,
            n_batches=self._delivered.n_batches,
            n_waiting=self._order.n_waiting,
            n_prepared=len(self._prepared),
            confirmed_lsn=self._confirmed,
            last_commit_lsn=self._delivered.last_commit_lsn,
            last_commit_timestamp_us=self._delivered.last_commit_timestamp_us,
            left_out=tuple(self._left_out),
        )

    async def account(self) -> SequencerReport | None:
        """For the run's account; None before ``open`` is done."""
        stats = await self.stats()
        since_s = self._recording_since_s
        recording_s = None if since_s is None else time.monotonic() - since_s
        return None if stats is None else sequencer_report(stats, self._order, self._prepared, recording_s)

    # -- inside ----------------------------------------------------------------------------------------

    async def _confirm_forever(self) -> None:
        """Record, then confirm: in this order, always."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_all_told())
            confirmed, done_ticket = self._order.confirmed_lsn, self._order.done_ticket
            if confirmed > self._confirmed:
                reach("recording")
                due = self._finished.due(done_ticket)
                self._recording_since_s = time.monotonic()
                await asyncio.to_thread(self._storage.record, confirmed, list(due.values()))
                self._recording_since_s = None
                self._finished.forget(due)
                reach("recorded")
            # Awaited, so that whoever sees the run finished knows that the reader has the last position.
            reach("confirming")
            await self._tell_reader(max(confirmed, self._confirmed), done_ticket)
            reach("confirmed")
            self._confirmed, self._told_ticket = max(confirmed, self._confirmed), done_ticket
            await self._notify()

    def _is_all_told(self) -> bool:
        return self._order.confirmed_lsn <= self._confirmed and self._order.done_ticket == self._told_ticket

    def _spawn(self, work: Any) -> None:
        async def watched() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                await self._fail(self._translate(error))
            else:
                await self._notify()

        task = asyncio.ensure_future(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        await self._notify()

    def _raise_undeliverable(self) -> None:
        """When all before it is confirmed, the reader has heard of it, and nothing more can be released."""
        error = self._order.undeliverable
        if error is not None and self._is_all_told():
            raise error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
