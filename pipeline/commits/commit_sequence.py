"""What the commit sequencer does: it waits for buffers, releases in commit order, confirms after the sink.

An asyncio shell around ``pipeline.commits``. It takes the reader's entries in the order of their tickets. What an
entry waits for (an awaitable of what its buffer returns) is awaited beside it, so buffers may finish in any order.
``next_batch`` is the driver's pull and thereby the backpressure. ``actors.commit_sequencer`` makes a Ray actor of it;
tests run it on an event loop of their own.

All state is the event loop's. Threads call ``SlotStorage`` alone: it is given what it needs and returns what it found.

Confirming has one path (``confirming``): what sink and journal hold is recorded, and only then told. The first error of
any part is kept and raised to everyone who asks: a run never continues beside a lost part. A transaction that cannot be
delivered is no lost part: its error is raised when its turn comes, with all before it delivered and confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from xidstream.pipeline.account.model import SequencerReport
from xidstream.pipeline.commits.confirming import Confirming, TellReader
from xidstream.pipeline.commits.delivered import Delivered
from xidstream.pipeline.commits.joined_units import Joining
from xidstream.pipeline.commits.journaling import Fetch, Journaling, Put, order_of, policy_of
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.prepared import FinishedPrepares, PreparedBook
from xidstream.pipeline.commits.sequencer_report import sequencer_report
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.commits.threads import MakeThreads, own_threads
from xidstream.pipeline.commits.watched_tasks import WatchedTasks
from xidstream.pipeline.errors import SlotLost, Superseded, XidstreamError
from xidstream.pipeline.exchange import (
    AT_ONCE,
    Batch,
    Opened,
    Pace,
    PreparedTransaction,
    Sealed,
    Tenure,
    TransactionEnd,
)
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import NO_SKIPS
from xidstream.pipeline.postgres.beginning import SinkHolds
from xidstream.pipeline.preflight.slot_beginning import check_sink_of_run
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import (
    Committed,
    CommittedPrepared,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    Unsendable,
)
from xidstream.pipeline.stream.event_router import OrderedEvent
from xidstream.pipeline.transactions.sealed import empty_unit, skipped_unit, undeliverable_unit

_VERIFYING_THREADS: Final = 2
"""One reads a large prepared transaction, and a small one need not wait for it."""
_CREDIT_SHARE: Final = 8
"""The share of ``backlog_bytes`` that a log may have taken without a word to the reader: one part of so many."""


class CommitSequence:
    """``translate`` gives the error to raise in place of what awaiting a buffer's result raised; ``fetch`` and ``put``
    are for rows in memory, on their way to the journal and back."""

    def __init__(
        self,
        config: Config,
        epoch: str,
        translate: Callable[[BaseException], BaseException],
        fetch: Fetch,
        put: Put,
        threads: MakeThreads = own_threads,
    ) -> None:
        self._threads = threads
        self._fetch = fetch
        self._put = put
        self._config = config
        self._epoch = epoch
        self._order = CommitOrder(batch_rows=config.batch_rows, batch_bytes=config.batch_bytes)
        """The order of commits. ``open`` replaces it by one that begins with the units of the journal."""
        self._tasks = WatchedTasks(translate)
        """The results that are awaited from buffers. The first error of any of them ends the epoch."""
        self._changed = self._tasks.changed
        """The signal that every wait here uses: it is given at each change of the order."""
        self._target: Lsn | None = None
        """The LSN at which the run is finished; None for a run without an end."""
        self._stopping = False
        """Whether no further batch is given out."""
        self._early: dict[int, OrderedEvent] = {}
        """Entries that arrived before an earlier ticket: calls to an asyncio actor may overtake each other."""
        self._prepared = PreparedBook()
        """The transactions between PREPARE and COMMIT or ROLLBACK PREPARED."""
        self._watermark = INVALID_LSN
        """Commits up to here are in the sink already; the server may send them again."""
        self._skips = NO_SKIPS
        """The transactions that a person skipped."""
        self._parks = config.on_poison == "park"
        """Whether a table that cannot be delivered is set aside."""
        self._skipped: list[tuple[Xid, Lsn]] = []
        """The skipped transactions that this epoch met and that are noted in the storage."""
        self._skipped_in_batch: dict[int, list[SkippedTransaction]] = {}
        """The skipped transactions in each batch that the sink has in its hands, by the batch's number."""
        self._finished = FinishedPrepares()
        """Prepared transactions that have ended, until nothing needs their records any more."""
        self._is_open = False
        """Whether ``open`` is done: before it there is no position."""
        self._is_sink_known = False
        """Whether a batch loop has said what the sink holds."""
        self._loop = 0
        """The number of the batch loop that has the sink. Calls of earlier ones are refused."""
        self._figures = Delivered()
        """Figures of all that the sink has taken in this epoch, for people."""
        # All rows of a prepared transaction are read. Asyncio's threads would all do that, and all else would wait.
        self._verifying = threads(_VERIFYING_THREADS, "verify")

    # -- set-up ----------------------------------------------------------------------------------------

    async def open(
        self, tell_reader: TellReader, opened: Opened, target_lsn: Lsn | None, has_sink: bool = True
    ) -> None:
        """Take over the storage of this slot, which the reader holds by now.

        Without a sink everything goes to the journal, and ``target_lsn`` is reached when it is confirmed. Raises
        SlotLost where the slot was confirmed past what this pipeline ever recorded, or the server is older than what
        it delivered before.
        """
        self._target = target_lsn
        self._takes_snapshots = opened.snapshots.takes_snapshots
        self._storage = SlotStorage(self._config.storage, opened, self._epoch)
        taken_over = await asyncio.to_thread(self._storage.take_over, resumes=has_sink)
        self._is_first = taken_over.is_first
        self._prepared = taken_over.prepared
        self._has_sink = has_sink
        self._order = order_of(self._config, taken_over, has_sink=has_sink)
        policy = policy_of(self._config, has_sink=has_sink)
        self._journaling = Journaling(
            self._order, self._storage, policy, self._fetch, self._put, self._changed, self._threads
        )
        self._skips = opened.skips
        # A commit that begins exactly at the confirmed position is not after it.
        self._watermark = taken_over.confirmed_lsn.before
        self._confirming = Confirming(
            self._order,
            self._storage,
            self._journaling,
            self._finished,
            tell_reader,
            self._changed,
            self._threads,
            sink_remembers=self._config.sink_kind.is_log,
            little_bytes=self._config.backlog_bytes // _CREDIT_SHARE,
        )
        self._confirming.awaited_lsn = target_lsn
        self._is_open = True
        if self._stopping:
            self._end_parts()
        self._journaling.begin(self._tasks.spawn)
        Joining(self._order, self._fetch, self._put, self._changed).begin(self._tasks.spawn)
        self._confirming.begin(self._tasks.spawn)

    async def sink_opened(self, watermark: Lsn, last_owner: int) -> Tenure:
        """What the sink already holds, and from whom; transactions up to it may be repeated by the server.

        It is called once by each batch loop: what an earlier one took and did not report is released again, and
        nothing more that it asks for is done. Returns as whom the sink is to be claimed. Raises Superseded, and
        SlotLost where the sink knows an earlier run that the storage does not, or has less than one had.
        """
        await asyncio.to_thread(self._check_sink, SinkHolds(last_owner, watermark))
        self._watermark = max(self._watermark, watermark)
        self._loop = loop = self._loop + 1
        self._order.put_back()
        self._order.parking.sink_opened(watermark)
        self._order.journal.sink_opened(watermark)
        self._skipped_in_batch.clear()
        self._journaling.release()
        self._is_sink_known = True
        parked = self._order.parking.parked_up_to(watermark)
        self._changed.notify()
        return replace(await asyncio.to_thread(self._storage.tenure, last_owner), loop=loop, parked=parked)

    def _check_sink(self, sink: SinkHolds) -> None:
        if not self._config.sink_kind.is_log:
            return
        # The sink's owner is this epoch itself from its second loop on.
        is_first = self._is_first and not self._loop
        check_sink_of_run(self._config, self._storage.layout, sink, is_first=is_first)
        self._storage.held_lsn = max(self._storage.held_lsn, sink.commit_lsn)

    async def takes_snapshots(self) -> bool:
        """Whether the slot's tables are read as they were before it."""
        return self._takes_snapshots

    # -- from the reader -------------------------------------------------------------------------------

    async def submit(self, entries: list[OrderedEvent]) -> int:
        """Take entries at their tickets' turn: calls to an asyncio actor may overtake each other. Returns what all that
        waits for the sink takes in memory, in bytes."""
        self._early.update((entry.ticket, entry) for entry in entries)
        try:
            while (entry := self._early.pop(self._order.next_ticket, None)) is not None:
                self._take(entry)
        except XidstreamError as error:
            self._tasks.fail(error)
            raise
        self._changed.notify()
        return self._order.waiting_bytes

    def _take(self, entry: OrderedEvent) -> None:
        event, ticket = entry.event, entry.ticket
        if isinstance(event, PlainBlock):
            self._order.add_unit(
                ticket, event.first_commit_lsn, event.last_commit_lsn, event.end_lsn, event.n_transactions
            )
            self._take_content(ticket, entry.result)
        elif isinstance(event, Committed):
            self._add_transaction(ticket, event.end)
            self._take_content(ticket, empty_unit(event.end) if entry.result is None else entry.result)
        elif isinstance(event, Prepared):
            self._order.add_hold(ticket, event.end_lsn, xid=event.xid)
            self._tasks.spawn(self._prepare_from(ticket, entry.result))
        elif isinstance(event, CommittedPrepared):
            self._add_transaction(ticket, event.end, "COMMIT PREPARED")
            self._tasks.spawn(self._find_prepared_content(ticket, event.end))
        elif isinstance(event, RolledBackPrepared):
            self._order.add_hold(ticket, event.end_lsn, message="ROLLBACK PREPARED", xid=event.xid)
            self._tasks.spawn(self._roll_back_prepared(ticket, event))
        elif isinstance(event, Unsendable):
            self._take_unsendable(ticket, event)
        else:
            assert isinstance(event, Position), event
            self._order.add_position(ticket, event.wal_end)

    def _take_unsendable(self, ticket: int, event: Unsendable) -> None:
        if not event.lsn or (event.xid, event.lsn) not in self._skips:
            self._order.add_unit(ticket, INVALID_LSN, INVALID_LSN, INVALID_LSN, 0)
            self._content_arrived(ticket, undeliverable_unit(event.error))
            return
        # The server decodes what commits at the confirmed position or after it: this leaves out just the one.
        end = TransactionEnd(event.xid, event.lsn, Lsn(event.lsn + 1), 0)
        self._add_transaction(ticket, end)
        self._content_arrived(ticket, skipped_unit(end))

    def _add_transaction(self, ticket: int, end: TransactionEnd, message: str = "COMMIT") -> None:
        self._order.add_unit(
            ticket, end.commit_lsn, end.commit_lsn, end.end_lsn, 1, message=message, xid=end.xid
        )

    # -- from buffers ----------------------------------------------------------------------------------

    def _take_content(self, ticket: int, result: Any) -> None:
        """``result``: a ``Sealed``, or an awaitable of one."""
        if isinstance(result, Sealed):
            self._content_arrived(ticket, result)
        else:
            self._tasks.spawn(self._await_content(ticket, result))

    async def _await_content(self, ticket: int, ref: Any) -> None:
        self._content_arrived(ticket, await ref)

    async def _prepare_from(self, ticket: int, ref: Any) -> None:
        record: PreparedTransaction = await ref
        replaced = self._prepared.add(record)
        if replaced is not None:
            await asyncio.to_thread(self._storage.replace, replaced, record)
        self._order.resolve(ticket)

    async def _find_prepared_content(self, ticket: int, end: TransactionEnd) -> None:
        await self._prepares_before(ticket)
        is_skipped = (end.xid, end.commit_lsn) in self._skips
        if not self._prepared.is_whole(end.xid):
            # The sink may hold it already.
            await self._sink_known()
        try:
            prepared = self._prepared.commit(end, self._watermark, is_skipped=is_skipped)
        except SlotLost as error:
            self._content_arrived(ticket, undeliverable_unit(error))
            return
        if is_skipped:
            content = skipped_unit(end, None if prepared is None else prepared.relids())
        elif prepared is None:
            content = empty_unit(end)
        elif prepared.poison is not None and not (self._parks or prepared.poison.parks_always):
            content = undeliverable_unit(prepared.poison.of(end.xid, end.commit_lsn))
        else:
            content = await asyncio.get_running_loop().run_in_executor(
                self._verifying, self._storage.content_of, prepared, end
            )
            if content.undeliverable is not None and end.commit_lsn <= self._watermark:
                content = empty_unit(end)  # it is damaged, but the sink holds it
        if prepared is not None:
            self._finished.add(ticket, prepared)
        self._content_arrived(ticket, content)

    async def _roll_back_prepared(self, ticket: int, event: RolledBackPrepared) -> None:
        await self._prepares_before(ticket)
        prepared = self._prepared.roll_back(event.xid, event.gid)
        if prepared is not None:
            self._finished.add(ticket, prepared)
        self._order.resolve(ticket)

    async def _prepares_before(self, ticket: int) -> None:
        """A K or r may arrive while the record of its P is still being written."""
        await self._changed.when(lambda: not self._order.holds_before(ticket))

    async def _sink_known(self) -> None:
        await self._changed.when(lambda: self._is_sink_known or not self._has_sink)

    def _content_arrived(self, ticket: int, content: Sealed) -> None:
        self._order.content_arrived(ticket, content, time.monotonic())
        if keys := self._order.take_dropped_keys():
            self._tasks.spawn(asyncio.to_thread(self._storage.delete, self._finished.without_kept(keys)))

    # -- to and from the driver ------------------------------------------------------------------------

    async def next_batch(
        self, wait_s: float, loop: int, done: int | None = None, pace: Pace = AT_ONCE
    ) -> Batch | None:
        """The next batch; None when ``wait_s`` passed without one, or nothing more is to come (``finished``).

        ``loop``: the tenure's. A call of a driver that died may arrive late, or still wait here: it is Superseded.
        ``done``: the sink holds the batch of this number; as ``batch_done``, which is one call less. ``pace``: the
        sink's, which leaves small batches to grow here, so that all that commits meanwhile is in the next one.
        """
        if done is not None:
            await self.batch_done(done, loop)
        began_s = time.monotonic()
        while True:
            self._tasks.raise_failure()
            self._check_loop(loop)
            if self.is_finished():
                return None
            reach("releasing")
            held_s = began_s + pace.hold_s - time.monotonic()
            is_due = held_s <= 0 or self._order.is_pressing(pace, time.time_ns() // 1000)
            may_release = is_due and self._confirming.is_parking_recorded and not self._stopping
            batch = self._order.next_batch() if may_release else None
            if batch is not None:
                reach("released")
                if met := [each for unit in batch.units for each in unit.skipped]:
                    self._skipped_in_batch[batch.number] = met
                return batch
            self._raise_undeliverable()
            left_s = began_s + wait_s - time.monotonic()
            if left_s <= 0:
                return None
            await self._changed.next(min(left_s, held_s) if held_s > 0 else left_s)

    async def failed(self) -> None:
        """Waits for the first error of any part, and raises it."""
        await self._tasks.failed()

    async def finished(self) -> bool:
        """Raises what ended a part, and why nothing more can be delivered."""
        self._tasks.raise_failure()
        if not self.is_finished():
            self._raise_undeliverable()
        return self.is_finished()

    def is_finished(self) -> bool:
        if not self._is_open:
            return False
        confirming = self._confirming
        reached_lsn = confirming.delivered_lsn if self._has_sink else confirming.confirmed_lsn
        if self._target is not None and reached_lsn >= self._target:
            return confirming.is_tidy
        return (
            self._stopping and self._journaling.is_idle and confirming.is_all_reported and confirming.is_tidy
        )

    async def batch_done(self, number: int, loop: int) -> None:
        """The sink holds the batch: its segments go, unless the journal names them; its position may be confirmed.

        Raises Superseded where a later loop has the sink: it gets the batch's transactions as well."""
        self._tasks.raise_failure()
        self._check_loop(loop)
        if met := self._skipped_in_batch.get(number):
            # Before anything after them can be confirmed.
            await asyncio.to_thread(self._storage.note_skipped, met)
            self._check_loop(loop)
            self._skipped += [(each.xid, each.commit_lsn) for each in self._skipped_in_batch.pop(number)]
        contents = self._order.batch_done(number)
        self._confirming.press(sum(self._owed_bytes(content) for content in contents))
        # At this moment: a file that leaves the journal is removed behind a record without it, and with what it names.
        keys = [key for content in contents for key in content.stored_keys()]
        in_use = self._journaling.in_use(keys)
        unused = [key for key in self._finished.without_kept(keys) if key not in in_use]
        reach("batch_accepted")
        self._figures.add_batch(contents)
        if self._config.sink_kind.is_log:
            self._storage.held_lsn = max(self._storage.held_lsn, self._figures.last_commit_lsn)
        self._changed.notify()
        if unused:
            await asyncio.to_thread(self._storage.delete, unused)

    def _owed_bytes(self, content: Sealed) -> int:
        """The bytes that the reader may count of it until it has its credit (``Backlog``). A transaction with rows in
        segments takes little here, and counts there with its raw bytes, up to what a buffer holds."""
        spilled_bytes = self._config.buffer_memory_bytes if content.stored_keys() else 0
        return content.memory_bytes + spilled_bytes

    async def aim(self, target: Lsn) -> None:
        """Be finished when everything up to ``target`` is confirmed."""
        self._target = target
        if self._is_open:
            self._confirming.awaited_lsn = target
        self._changed.notify()

    async def stop(self) -> None:
        """No further batch is given out; what is ready goes to the journal."""
        self._stopping = True
        if self._is_open:
            self._end_parts()
        self._changed.notify()

    async def withhold_journal(self) -> None:
        """The sink could not read stored rows: nothing more is journaled, so the server keeps what they came from."""
        self._journaling.withhold()
        self._changed.notify()

    async def account(self, *, with_prepared: bool) -> SequencerReport | None:
        """What it knows of itself; None before ``open`` is done: there is no position yet, and perhaps no slot.
        ``with_prepared``: the prepared transactions are named, which costs a walk over them."""
        if not self._is_open:
            return None
        return sequencer_report(
            self._figures,
            self._order,
            self._confirming,
            self._journaling,
            n_prepared=len(self._prepared),
            skipped=self._skipped,
            prepared=self._prepared if with_prepared else (),
        )

    # -- inside ----------------------------------------------------------------------------------------

    def _end_parts(self) -> None:
        self._journaling.end()
        self._confirming.end()

    def _raise_undeliverable(self) -> None:
        """When all before it is confirmed, the reader has heard of it, and nothing more can be released."""
        if self._has_sink and not self._is_sink_known and self._order.journal.awaits_sink:
            return
        error = self._order.undeliverable if self._has_sink else self._order.unwritable
        confirming = self._confirming
        # After a damaged file the journal may grow on.
        is_recorded = bool(self._order.journal) and confirming.delivered_lsn >= self._order.delivered_lsn
        if error is not None and ((self._has_sink and is_recorded) or confirming.is_all_reported):
            raise error

    def _check_loop(self, loop: int) -> None:
        if loop != self._loop:
            raise Superseded(
                f"batch loop {loop} of epoch {self._epoch} was given up, and loop {self._loop} has the sink: what the "
                "earlier one asks for is not done",
                remedy="nothing is to be done: the later loop gets these transactions",
            )
