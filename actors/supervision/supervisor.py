"""Keeps one slot's pipeline running: begins an epoch, watches it, and begins another when a part is lost.

An *epoch* is one life of reader, buffers and sequencer (``supervision.epoch``). They hold nothing that the slot or
the storage does not hold too. So the answer to the loss of any of them is the same: end all three, and begin a new
epoch from the slot's confirmed position. Repairing a part in place was rejected: it would need a protocol between old
and new parts for a case that replay already covers. The Spark driver outlives epochs, because it takes many seconds to
start, unless it is the part that was lost. Two batch loops never run at once: a new epoch begins when the old one's
loop has ended, or its driver was ended by force.

``errors.POLICY`` says what to do after an error. STOP raises it. RETRY and RESTART begin a new epoch after a pause, or
give up; ``pipeline.restarts`` decides that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from xidstream.actors.driver.batch_loop import LoopProgress
from xidstream.actors.runtime.secrets import ReaderSecrets, without_secrets
from xidstream.actors.slot_reader import ReaderStats
from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch, StopRequested
from xidstream.actors.supervision.run_accounts import Parts, RunAccounts
from xidstream.actors.supervision.run_watch import RunWatch
from xidstream.actors.supervision.slot_snapshots import SlotSnapshots
from xidstream.pipeline.account.model import Account, is_caught_up
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import (
    Action,
    ColumnNameClash,
    ComponentLost,
    PoisonedChange,
    SlotLost,
    XidstreamError,
)
from xidstream.pipeline.events import Event, of_error
from xidstream.pipeline.exchange import Opened
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.restarts import Restarts
from xidstream.pipeline.snapshot.progress import SnapshotProgress
from xidstream.pipeline.stages.sequencer_stats import SequencerStats

log = logging.getLogger(__name__)

_POLL_S = 0.25
_STOP_TIMEOUT_S = 15.0
_LAST_BATCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Status:
    """All that a person may want to see, at one moment. A part that is not there is None."""

    epoch: str
    opened: Opened | None
    reader: ReaderStats | None
    sequencer: SequencerStats | None
    driver: LoopProgress
    snapshots: SnapshotProgress | None = None
    waiting_for: tuple[str, ...] = ()
    """What an epoch that is not open yet waits for, in words."""
    state: str = "starting"
    """As in an account: starting, reading, restarting or ended."""
    last_error: str | None = None
    """What ended the last epoch that failed."""

    @property
    def is_caught_up(self) -> bool:
        """As ``pipeline.account.model.is_caught_up`` says."""
        opened, reader, sequencer = self.opened, self.reader, self.sequencer
        if opened is None or reader is None or sequencer is None:
            return False
        return is_caught_up(
            n_waiting=sequencer.n_waiting,
            backlog_bytes=reader.backlog_bytes,
            is_paused=reader.paused,
            has_reached_target=sequencer.confirmed_lsn >= opened.target_lsn,
        )


class Supervisor:
    """``make_driver`` is called for the first epoch, and again whenever the driver itself was lost.

    ``quota`` is the cap on buffers that several slots share (``actors.reader.buffer_quota``).
    """

    def __init__(
        self,
        config: Config,
        make_driver: Callable[[], Driver],
        notify: Callable[[str], None] = log.warning,
        quota: Any = None,
    ) -> None:
        self._config = without_secrets(config)
        self._secrets = ReaderSecrets(config)
        self._make_driver = make_driver
        self._notify = notify
        self._quota = quota
        self._stop = threading.Event()
        self._driver: Driver | None = None
        self._driver_starting: ray.ObjectRef | None = None
        self._target: Lsn | None = None
        self._restarts = Restarts()
        self._epoch: Epoch | None = None
        self._epoch_name = ""
        self._reading_since_s: float | None = None
        self._last_output: list[str] = []
        self._final: Status | None = None
        self._snapshots = SlotSnapshots(config, notify)
        self._accounts = RunAccounts(config, self._parts)
        self._run_watch = RunWatch(self._accounts, notify)

    @property
    def pids(self) -> list[int]:
        """The process ids of the epoch's reader and buffers, for tests and people."""
        epoch = self._epoch
        return [] if epoch is None else epoch.pids

    def stop(self) -> None:
        """End the run cleanly: the batch in hand is finished and confirmed. A signal handler may call this."""
        self._stop.set()

    def run(self) -> None:
        """Run until the work is done or ``stop`` was called. Raises an error that needs a person."""
        self._accounts.serve()
        self._run_watch.start()
        try:
            while not self._stop.is_set():
                try:
                    self._run_epoch()
                    return
                except StopRequested:
                    return
                except XidstreamError as error:
                    if error.policy.action is Action.STOP:
                        raise
                    pause_s = self._pause_after(error)
                    self._accounts.failed(error, pause_s)
                    if self._stop.is_set():
                        text = f"{error.message}; changes that were not confirmed will come again"
                        self._notify(of_error("stopped", text, error))
                        return
                    if pause_s is None:
                        raise
                    text = f"{error.message}; starting again in {pause_s:.1f} s"
                    self._notify(of_error("restarting", text, error, pause_s=round(pause_s, 3)))
                self._stop.wait(pause_s)
        finally:
            self._run_watch.close()
            self._accounts.close()
            self._snapshots.stop()
            driver = self._driver
            if driver is not None:
                self._last_output = self.take_output()
                self._driver = None
                driver.close()

    def status(self) -> Status:
        """Ask the parts for their state. A part that does not answer at once is missing. After the end, the last
        status."""
        epoch, state, error = self._epoch, self._state(), self._accounts.last_error
        told: dict[str, Any] = {"state": state, "last_error": None if error is None else error.message}
        if epoch is None:
            return self._final or Status(self._epoch_name, None, None, None, self._driver_progress(), **told)
        progress, snapshots = self._driver_progress(), self._snapshots.progress()
        if epoch.opened is None:
            return Status(epoch.name, None, None, None, progress, snapshots, epoch.waiting_for, **told)
        parts = epoch.reader_stats(), epoch.sequencer_stats()
        return Status(epoch.name, epoch.opened, *parts, progress, snapshots, **told)

    def shown_at(self, page: str) -> None:
        """The account names the address of the status page."""
        self._accounts.page = page

    def account(self) -> Account:
        """All that is known of the run: docs/status.md. The parts and the server are asked, which may take seconds."""
        return self._accounts.account()

    def _state(self) -> str:
        epoch = self._epoch
        if epoch is not None:
            return "starting" if epoch.opened is None else "reading"
        return "ended" if self._final is not None else "restarting" if self._epoch_name else "starting"

    def _parts(self) -> Parts:
        epoch, driver = self._epoch, self._driver
        is_ready = driver is not None and self._driver_starting is None
        return Parts(
            self._state(), self._epoch_name, epoch, driver if is_ready else None, self._snapshots.progress()
        )

    def take_output(self) -> list[str]:
        """The lines that the sink printed since the last call."""
        before, self._last_output = self._last_output, []
        driver = self._driver
        if driver is None or self._driver_starting is not None:
            return before
        try:
            return before + driver.take_output()
        except XidstreamError:
            return before

    # -- one epoch -------------------------------------------------------------------------------------

    def _run_epoch(self) -> None:
        self._reading_since_s = None
        self._restarts.begin()
        epoch = Epoch(self._config, self._secrets, self._quota, self._stop, self._notify)
        self._epoch, self._epoch_name = epoch, epoch.name
        try:
            driver = self._ensure_driver()
            epoch.await_prepared(self._driver_starting)
            self._driver_starting = None
            opened = epoch.open()
            self._restarts.reached("slot", opened.confirmed_flush_lsn)
            if self._config.available_now and self._target is None:
                self._target = opened.target_lsn
            epoch.run(None if self._snapshots.holds_target(opened) else self._target)
            n_batches = self._driver_progress().n_batches
            driver.begin(epoch.sequencer, opened.identity)
            self._snapshots.begin(epoch, opened, driver)
            self._reading_since_s = time.monotonic()
            self._watch(epoch, driver, n_batches)
        finally:
            self._snapshots.end_epoch()
            epoch.end()
            self._epoch = None

    def _watch(self, epoch: Epoch, driver: Driver, n_batches: int) -> None:
        """Watch until the loop has ended in order. Raises the error that ended a part. ``n_batches``: the number of
        batches that earlier epochs took."""
        give_up_s: float | None = None
        left_out: set[object] = set()
        while True:
            if self._stop.is_set() and give_up_s is None:
                give_up_s = time.monotonic() + _LAST_BATCH_TIMEOUT_S
                epoch.stop_batches()
            epoch.check_reading()
            if self._snapshots.check(self._target):
                self._stop.set()
            try:
                if driver.result(_POLL_S):
                    break
            except (PoisonedChange, ColumnNameClash, SlotLost):
                # All before it is delivered, and the server shall know.
                self._tell_left_out(epoch, left_out)
                epoch.stop_reading()
                raise
            except XidstreamError:
                epoch.raise_root_cause()
                raise
            self._tell_left_out(epoch, left_out)
            # Progress is noted while the driver lives. When the driver itself died, nobody can be asked any more.
            progress = self._driver_progress()
            self._restarts.took_batch = self._restarts.took_batch or progress.n_batches > n_batches
            self._restarts.reached("sink", progress.sink_lsn)
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise ComponentLost(f"the batch in hand did not end within {_LAST_BATCH_TIMEOUT_S:.0f} s")
        self._tell_left_out(epoch, left_out)
        self._final = self.status()
        epoch.stop_reading()

    def _tell_left_out(self, epoch: Epoch, told: set[object]) -> None:
        """What was given up is never left out silently."""
        assert epoch.opened is not None
        if len(told) == len(epoch.opened.given_up):
            return
        stats = epoch.sequencer_stats()
        for pair in stats.left_out if stats is not None else ():
            if pair not in told:
                told.add(pair)
                xid, commit_lsn = pair
                text = (
                    f"transaction {int(xid)}, committed at LSN {commit_lsn}, was given up with `slot skip`: "
                    "none of its changes is delivered"
                )
                self._notify(Event("given_up", text, xid=int(xid), commit_lsn=str(commit_lsn)))

    def _pause_after(self, error: XidstreamError) -> float | None:
        """The seconds until the next epoch; None to give up."""
        now_s = time.monotonic()
        reading_s = None if self._reading_since_s is None else now_s - self._reading_since_s
        return self._restarts.pause_after(error, now_s, reading_s)

    # -- the driver ------------------------------------------------------------------------------------

    def _ensure_driver(self) -> Driver:
        """A driver with a living session and no running loop. The session may still be starting."""
        driver = self._driver
        told = False
        while driver is not None and not driver.end(_STOP_TIMEOUT_S):
            if driver.replaceable:
                break
            if self._stop.is_set():
                raise StopRequested
            if not told:
                told = True
                self._notify(Event("waiting", "waiting for the batch in hand to end before starting again"))
        if driver is not None and driver.end(0) and driver.is_alive():
            return driver
        if driver is not None:
            if not driver.replaceable:
                raise ComponentLost("the Spark session of this process has ended")
            self._driver = None
            driver.close()
        driver = self._make_driver()
        self._driver_starting = driver.start()
        self._driver = driver
        return driver

    def _driver_progress(self) -> LoopProgress:
        driver = self._driver
        if driver is None or self._driver_starting is not None:
            return LoopProgress()
        try:
            return driver.progress()
        except XidstreamError:
            return LoopProgress()
