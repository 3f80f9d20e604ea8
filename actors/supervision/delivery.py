"""The driver's part of an epoch: it waits for the Spark session, has a batch loop pull, and watches reader and loop.

The reader reads meanwhile, from before the session is there until the end. So neither a session that starts nor one
that is lost keeps the server waiting: what is committed goes to the journal (``stages.journaling``), and is confirmed.

An error of the batch loop ends the epoch. If the reader has failed, too, its error is raised: it knows the cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch, StopRequested
from xidstream.actors.supervision.held_driver import HeldDriver
from xidstream.actors.supervision.retries import Retries
from xidstream.actors.supervision.slot_snapshots import SlotSnapshots
from xidstream.pipeline.errors import (
    ColumnNameClash,
    ComponentLost,
    PoisonedChange,
    SlotLost,
    XidstreamError,
)
from xidstream.pipeline.events import Event
from xidstream.pipeline.exchange import Opened
from xidstream.pipeline.pg import Lsn

_POLL_S = 0.25
LAST_BATCH_TIMEOUT_S: Final = 120.0
_DELIVERED_BEFORE = (PoisonedChange, ColumnNameClash, SlotLost)
"""All before it is delivered, and the server shall know."""


class Delivery:
    """Of one epoch that reads. ``target``: where a run with ``available_now`` ends at the earliest."""

    def __init__(
        self,
        epoch: Epoch,
        opened: Opened,
        held: HeldDriver,
        snapshots: SlotSnapshots,
        retries: Retries,
        stop: threading.Event,
        notify: Callable[[str], None],
        target: Lsn | None,
    ) -> None:
        self._epoch = epoch
        self._opened = opened
        self._held = held
        self._snapshots = snapshots
        self._retries = retries
        self._stop = stop
        self._notify = notify
        self._target = target
        self._left_out: set[object] = set()

    def run(self, driver: Driver) -> None:
        """Until all is delivered, or the stop was asked for. Raises the error that ended a part."""
        try:
            self._await_session()
            self._run_loop(driver)
        except StopRequested:
            # There is no loop: what is committed is in the journal, and the rest comes again.
            self._epoch.stop_in_order()
            raise

    # -- one loop --------------------------------------------------------------------------------------

    def _await_session(self) -> None:
        if self._held.starting is not None:
            self._epoch.await_driver(self._held.starting)
            self._held.starting = None

    def _run_loop(self, driver: Driver) -> None:
        self._n_batches = self._held.progress().n_batches
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
                self._tell_left_out()
                self._epoch.stop_reading()
                raise
            self._tell_left_out()
            # Progress is noted while the driver lives. When the driver itself died, nobody can be asked any more.
            self._note_progress()
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise ComponentLost(f"the batch in hand did not end within {LAST_BATCH_TIMEOUT_S:.0f} s")
        self._tell_left_out()

    def _has_ended(self, driver: Driver) -> bool:
        """Raises the error of the part that failed first."""
        try:
            return driver.result(_POLL_S)
        except _DELIVERED_BEFORE:
            raise
        except XidstreamError:
            self._epoch.raise_root_cause()
            raise

    def _note_progress(self) -> None:
        restarts, progress = self._retries.restarts, self._held.progress()
        restarts.took_batch = restarts.took_batch or progress.n_batches > self._n_batches
        restarts.reached("sink", progress.sink_lsn)

    def _tell_left_out(self) -> None:
        """What was given up is never left out silently."""
        told = self._left_out
        if len(told) == len(self._opened.given_up):
            return
        stats = self._epoch.sequencer_stats()
        for pair in stats.left_out if stats is not None else ():
            if pair not in told:
                told.add(pair)
                xid, commit_lsn = pair
                text = (
                    f"transaction {int(xid)}, committed at LSN {commit_lsn}, was given up with `slot skip`: "
                    "none of its changes is delivered"
                )
                self._notify(Event("given_up", text, xid=int(xid), commit_lsn=str(commit_lsn)))
