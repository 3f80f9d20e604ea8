"""The driver's part of an epoch: it waits for the Spark session, has a batch loop pull, and watches reader and loop.

The reader reads meanwhile, from before the session is there until the end. So neither a session that starts nor one
that is lost keeps the server waiting: what is committed goes to the journal (``commits.journaling``), and is confirmed.

A batch loop that failed by the driver's or the sink's fault is followed by another one, on the same sequencer. The new
loop opens the sink, and the sequencer then gives out again what the earlier one had in hand. A session that does not
start is followed by another one, too, as long as the run would try at all (``retries``): that has nothing to do with
what the epoch holds. The epoch ends where another loop could not help:

- The reader or the sequencer has failed. Then the loop's error is what it saw of that, and theirs is raised.
- Rows cannot be read: a stored one is damaged (SegmentCorrupt), or the process that kept it in memory has ended, which
  a living driver tells as ComponentLost. The server has them.
- It is the second failure without a delivered batch in between. What is amiss may be in what the epoch holds.
- Another run has the slot (Superseded), or the driver cannot be replaced.

Errors whose policy is STOP end the run, as ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch, StopRequested
from xidstream.actors.supervision.retries import Retries
from xidstream.actors.supervision.run_driver import RunDriver
from xidstream.actors.supervision.slot_snapshots import SlotSnapshots
from xidstream.pipeline.errors import (
    Action,
    ColumnNameClash,
    ComponentLost,
    PoisonedChange,
    SegmentCorrupt,
    SlotLost,
    Superseded,
    XidstreamError,
)
from xidstream.pipeline.events import Event
from xidstream.pipeline.exchange import Opened
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn

_POLL_S = 0.25
_LOOK_S = 1.0
"""Between two questions to an actor, each of which costs it a millisecond of CPU or more."""
"""Between looks for tables that were parked."""
LAST_BATCH_TIMEOUT_S: Final = 120.0
_DELIVERED_BEFORE = (PoisonedChange, ColumnNameClash, SlotLost)
"""All before it is delivered, and the server shall know."""


class LoopFailed(Exception):
    """A batch loop ended with ``error``, while reader and sequencer live; not ``has_begun``: its session did not
    start."""

    def __init__(self, error: XidstreamError, *, has_begun: bool = True) -> None:
        super().__init__(error)
        self.error = error
        self.has_begun = has_begun


class Delivery:
    """The delivery of one epoch that reads. ``target``: where a run with ``available_now`` ends at the earliest."""

    def __init__(
        self,
        epoch: Epoch,
        opened: Opened,
        run_driver: RunDriver,
        snapshots: SlotSnapshots,
        retries: Retries,
        stop: threading.Event,
        notify: Callable[[str], None],
        target: Lsn | None,
    ) -> None:
        self._epoch = epoch
        self._opened = opened
        self._run_driver = run_driver
        self._snapshots = snapshots
        self._retries = retries
        self._stop = stop
        self._notify = notify
        self._target = target
        self._announced_skips: set[object] = set()
        self._parked: set[tuple[int, Lsn]] = set()
        self._look_s = self._note_s = 0.0
        self._has_failed = False
        """Whether the last loop failed without a delivered batch."""
        self._n_batches = self._n_done = 0

    def run(self, driver: Driver) -> None:
        """Until all is delivered, or the stop was asked for. Raises the error that ended a part."""
        try:
            while True:
                try:
                    self._await_session()
                    self._run_loop(driver)
                    return
                except LoopFailed as loop:
                    failed = loop
                driver = self._replaced(failed)
        except StopRequested:
            # There is no loop: what is committed is in the journal, and the rest comes again.
            self._epoch.stop_in_order()
            raise

    # -- one loop --------------------------------------------------------------------------------------

    def _await_session(self) -> None:
        if self._run_driver.starting is None:
            return
        try:
            self._epoch.await_driver(self._run_driver.starting)
        except XidstreamError as error:
            self._epoch.check_reading()
            if error.policy.action is Action.STOP:
                raise
            raise LoopFailed(error, has_begun=False) from error
        self._run_driver.starting = None

    def _run_loop(self, driver: Driver) -> None:
        self._n_batches = self._run_driver.progress().sink.n_batches
        self._n_done = self._batches_done()
        driver.begin(self._epoch.sequencer, self._opened.identity)
        self._snapshots.begin(self._epoch, self._opened, driver)
        self._retries.delivering_since_s = time.monotonic()
        give_up_s: float | None = None
        while True:
            if self._stop.is_set() and give_up_s is None:
                give_up_s = time.monotonic() + LAST_BATCH_TIMEOUT_S
                self._epoch.stop_batches()
            self._epoch.check_reading()
            if self._snapshots.check(self._target):
                self._stop.set()
            try:
                if self._has_ended(driver):
                    break
            except _DELIVERED_BEFORE:
                self._announce_skips(at_last=True)
                self._epoch.stop_reading()
                raise
            self._announce_skips()
            self._note_progress()
            if give_up_s is not None and time.monotonic() > give_up_s:
                # What the journal holds is confirmed all the same.
                self._epoch.stop_in_order()
                raise ComponentLost(f"the batch in hand did not end within {LAST_BATCH_TIMEOUT_S:.0f} s")
        self._announce_skips(at_last=True)
        self._snapshots.prove_last()

    def _has_ended(self, driver: Driver) -> bool:
        """Raises LoopFailed, and the error of a part that failed before the loop did."""
        try:
            return driver.result(_POLL_S)
        except _DELIVERED_BEFORE:
            raise
        except XidstreamError as error:
            if not self._is_drivers_own(error):
                # First of all: what is journaled is confirmed, and the server would not send it again.
                self._epoch.withhold_journal()
            # A driver that has ended saw nothing of the others. What they may have failed with, ``pause`` sees.
            if self._run_driver.is_alive():
                self._epoch.raise_root_cause()
            if error.policy.action is Action.STOP:
                raise
            raise LoopFailed(error) from error

    def _note_progress(self) -> None:
        """While the driver lives. When the driver itself died, nobody can be asked any more."""
        if time.monotonic() < self._note_s:
            return
        self._note_s = time.monotonic() + _LOOK_S
        restarts, progress = self._retries.restarts, self._run_driver.progress()
        restarts.took_batch = restarts.took_batch or progress.sink.n_batches > self._n_batches
        restarts.reached("sink", progress.sink_lsn)

    def _batches_done(self) -> int:
        report = self._epoch.sequencer_report()
        return 0 if report is None else report.sequencer.n_batches

    # -- after a loop that failed ---------------------------------------------------------------------

    def _replaced(self, failed: LoopFailed) -> Driver:
        """A driver for the next loop. Raises ``failed``'s error where the epoch cannot go on after it."""
        error = failed.error
        if failed.has_begun:
            # The sequencer knows of batches that the driver did not live to count.
            took_batch = self._retries.restarts.took_batch or self._batches_done() > self._n_done
            self._retries.restarts.took_batch = took_batch
            is_second = self._has_failed and not took_batch
            if is_second or not self._is_drivers_own(error):
                raise error
            self._has_failed = True
        if self._stop.is_set():
            self._epoch.stop_in_order()
            raise error
        pause_s = self._retries.pause_after(error)
        if pause_s is None:
            raise error
        self._retries.tell(error, pause_s)
        self._retries.begin()
        self._epoch.pause(pause_s)
        return self._run_driver.ensure()

    def _is_drivers_own(self, error: XidstreamError) -> bool:
        if isinstance(error, (SegmentCorrupt, Superseded)):
            return False
        return not (isinstance(error, ComponentLost) and self._run_driver.is_alive())

    def _announce_skips(self, *, at_last: bool = False) -> None:
        """What was given up or parked is never left out silently."""
        announced = self._announced_skips
        is_all_announced = len(announced) == len(self._opened.skips)
        if is_all_announced and not at_last and time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + _LOOK_S
        report = self._epoch.sequencer_report()
        if report is None:
            return
        self._tell_parked(report.parked)
        for pair in report.skipped:
            if pair not in announced:
                announced.add(pair)
                xid, commit_lsn = pair
                text = (
                    f"transaction {int(xid)}, committed at LSN {commit_lsn}, was given up with `slot skip`: "
                    "none of its changes is delivered"
                )
                self._notify(Event("given_up", text, xid=int(xid), commit_lsn=str(commit_lsn)))

    def _tell_parked(self, parked: Sequence[ParkedTable]) -> None:
        """Once in an epoch, so that each start says it again."""
        for each in parked:
            if not each.is_parked or (each.relid, each.since_lsn) in self._parked:
                continue
            self._parked.add((each.relid, each.since_lsn))
            text = (
                f"table {each.table} is parked since commit LSN {each.since_lsn} (xid {int(each.xid)}): {each.reason}; "
                "its changes are counted and not delivered, until `xidstream table resume`"
            )
            xid, commit_lsn = int(each.xid), str(each.since_lsn)
            self._notify(Event("table_parked", text, table=each.table, xid=xid, commit_lsn=commit_lsn))
