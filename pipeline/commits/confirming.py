"""Records what is safe, then tells the reader: in this order, always.

What sink and journal hold without a gap is recorded in the storage, with the names of the journal's files, and only
then given to the reader, who tells the server. What that record does not need any more is removed after it: finished
prepared transactions at once, and files of the journal that were delivered when there is time (``removing``), because
nobody is to wait for that. The tables that are parked are in the same record, with the counts that belong to its
position.

What the journal has moved is recorded at once. What a log has taken, and a position that moves alone, wait for a moment
(``RecordPace``), unless the end of the run waits for them.

An example. The record says 0/500. The sink has taken all up to 0/700, and the journal has file 3, which ends at 0/900.
The next record says: confirmed 0/900, delivered 0/700, file 3. Then the server is told 0/900. If the run is killed
between the two, the slot is behind the record, and nothing is lost. In the other order the slot would be at 0/900, and
the record at 0/500 without file 3: the next run would have to end with SlotLost.

Each record is of one moment of the order. While it is written, the order moves on, and the next record has all of that.
Records have a thread of their own (``threads``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from xidstream.pipeline.commits.changes import Changes
from xidstream.pipeline.commits.journaling import Journaling
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.prepared import FinishedPrepares
from xidstream.pipeline.commits.record_pace import Moved, RecordPace
from xidstream.pipeline.commits.removing import Removing
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.commits.threads import MakeThreads, own_threads
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import Lsn

TellReader = Callable[[Lsn, int, int], Awaitable[None]]
"""Tells the reader the position that may be confirmed, the ticket up to which nothing waits in memory for the sink, and
the one up to which no buffer's memory is needed."""


class _Report(NamedTuple):
    confirmed_lsn: Lsn
    done_ticket: int
    free_ticket: int
    journal_version: int
    parking_version: int


class Confirming:
    """``changed``: what the sequencer's loops wait for."""

    def __init__(
        self,
        order: CommitOrder,
        storage: SlotStorage,
        journaling: Journaling,
        finished: FinishedPrepares,
        tell_reader: TellReader,
        changed: Changes,
        threads: MakeThreads = own_threads,
        *,
        sink_remembers: bool = False,
        little_bytes: int = 0,
    ) -> None:
        """``sink_remembers``: as ``RecordPace`` has it; ``little_bytes``: so much may be in the sink without credit."""
        self._order = order
        self._storage = storage
        self._journaling = journaling
        self._finished = finished
        self._tell_reader = tell_reader
        self._changed = changed
        self._removing = Removing(storage, changed)
        """Removes files of the journal that no record names any more."""
        self._recorder = threads(1, "record")
        """The thread that writes records."""
        self._pace = RecordPace(remembers=sink_remembers)
        """How long what has moved waits."""
        self._little_bytes = little_bytes
        self._taken_bytes: int | None = None
        """The bytes that the sink has taken since the last record; None: nothing."""
        self._is_ending = False
        """Whether the run stops."""
        self._recording_since_s: float | None = None
        """When the writing of the current record began, on the monotonic clock; None while none is written."""
        self._reported = self._next_report()
        """The last report to the reader, with the versions of journal and parking that were recorded with it."""
        self.confirmed_lsn = order.confirmed_lsn
        """The confirmed position that is recorded and that the reader has heard of."""
        self.delivered_lsn = order.delivered_lsn
        """The delivered position that is in the same record."""
        self.awaited_lsn: Lsn | None = None
        """The run ends when this is reached: then nothing waits."""

    def begin(self, spawn: Callable[[Awaitable[None]], None]) -> None:
        spawn(self.confirm_forever())
        spawn(self._removing.remove_forever())

    def press(self, n_bytes: int) -> None:
        """The sink has taken so much, as it was in memory: its record is not that of a position alone."""
        self._taken_bytes = (self._taken_bytes or 0) + n_bytes

    def end(self) -> None:
        """The run stops: nothing waits any more."""
        self._is_ending = True

    @property
    def is_tidy(self) -> bool:
        """Whether all is removed that is not needed."""
        return self._removing.is_idle

    @property
    def recording_s(self) -> float | None:
        """For how long the storage has not taken a position; None if it has."""
        since_s = self._recording_since_s
        return None if since_s is None else time.monotonic() - since_s

    @property
    def is_parking_recorded(self) -> bool:
        """Whether what was parked is durable, so that what comes after it may be released."""
        return self._reported.parking_version == self._order.parking.version

    @property
    def is_all_reported(self) -> bool:
        return self._reported == self._next_report()

    async def confirm_forever(self) -> None:
        while True:
            await self._changed.until(self._due_in_s)
            self._taken_bytes = None
            report, delivered_lsn = self._next_report(), self._order.delivered_lsn
            if report.confirmed_lsn > self.confirmed_lsn or report[3:] != self._reported[3:]:
                await self._record(report, delivered_lsn)
            # Awaited, so that whoever sees the run finished knows that the reader has the last position.
            reach("confirming")
            await self._tell_reader(report.confirmed_lsn, report.done_ticket, report.free_ticket)
            reach("confirmed")
            self.confirmed_lsn, self.delivered_lsn, self._reported = (
                report.confirmed_lsn,
                delivered_lsn,
                report,
            )
            self._changed.notify()

    def _due_in_s(self) -> float | None:
        """Seconds until the next report is due; None as long as there is nothing to report."""
        report = self._next_report()
        if report == self._reported:
            return None
        moved = Moved.POSITION
        if self._taken_bytes is not None:
            moved = Moved.LITTLE if self._taken_bytes < self._little_bytes else Moved.SINK
        if report[3:] != self._reported[3:] or self._is_ending or self._is_reaching_target(report):
            moved = Moved.NOW
        return self._pace.due_in_s(time.monotonic(), moved)

    def _is_reaching_target(self, report: _Report) -> bool:
        if self.awaited_lsn is None:
            return False
        steps = (
            (self.confirmed_lsn, report.confirmed_lsn),
            (self.delivered_lsn, self._order.delivered_lsn),
        )
        return any(before < self.awaited_lsn <= now for before, now in steps)

    async def _record(self, report: _Report, delivered_lsn: Lsn) -> None:
        reach("recording")
        due = self._finished.due(report.done_ticket)
        in_use = self._journaling.in_use(key for each in due.values() for key in each.stored_keys())
        spans, removed = self._order.journal.spans, self._order.journal.take_removed()
        parked = self._order.parking.tables
        self._recording_since_s = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(
            self._recorder,
            self._storage.record,
            report.confirmed_lsn,
            list(due.values()),
            delivered_lsn,
            spans,
            in_use,
            parked,
        )
        self._recording_since_s = None
        self._pace.recorded(time.monotonic())
        self._finished.forget(due)
        self._removing.add(removed)
        reach("recorded")

    def _next_report(self) -> _Report:
        order = self._order
        return _Report(
            order.confirmed_lsn,
            order.done_ticket,
            order.free_ticket,
            order.journal.version,
            order.parking.version,
        )
