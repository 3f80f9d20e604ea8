"""Keeps one slot's pipeline running: starts its parts, watches them, and starts anew when one is lost.

An *epoch* is one life of reader, buffers and sequencer. They hold nothing that the slot or the storage does not,
so the answer to the loss of any of them is the same: end all three, and begin a new epoch from the slot's
confirmed position. Repairing a part in place was rejected: it would need a protocol between old and new parts
for a case that replay already covers. The Spark driver outlives epochs, because it takes many seconds to start,
unless it is the part that was lost. Two batch loops never run at once: a new epoch begins when the old one's loop
has ended, or its driver was ended by force.

What to do after an error is read from ``errors.POLICY``: STOP raises it; RETRY and RESTART begin a new epoch after
a growing pause, and give up when it went on for ``GIVE_UP_AFTER_S`` without an epoch that worked.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from actors.batch_loop import LoopProgress
from actors.commit_sequencer import CommitSequencer, SequencerStats
from actors.faults import unwrap
from actors.secrets import ReaderSecrets, without_secrets
from actors.slot_reader import ReaderStats, SlotReader
from actors.spark_driver import Driver
from pipeline.config import Config
from pipeline.errors import Action, ComponentLost, StorageFault, XidstreamError
from pipeline.handoff import Opened
from pipeline.pg import Lsn

log = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 300.0
_GIVE_UP_BEFORE_ANY_WORKED_S = 20.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
_WORKED_AFTER_S = 2 * _LONGEST_PAUSE_S
_POLL_S = 0.25
_STOP_TIMEOUT_S = 15.0
_LAST_BATCH_TIMEOUT_S = 120.0
_TELL_WAITING_AFTER_S = 10.0
_TELL_AGAIN_AFTER_S = 60.0
_ROOT_CAUSE_S = 5.0


class _StopRequested(Exception):
    """``stop`` was called while a part was starting."""


@dataclass(frozen=True)
class Status:
    """All that a person may want to see, at one moment; parts are None while they are not there."""

    epoch: str
    opened: Opened | None
    reader: ReaderStats | None
    sequencer: SequencerStats | None
    driver: LoopProgress


class Supervisor:
    """``make_driver`` is called for the first epoch, and again whenever the driver itself was lost.

    ``quota`` is the cap on buffers that several slots share (``actors.quota``).
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
        self._epoch = ""
        self._opened: Opened | None = None
        self._reader: Any = None
        self._sequencer: Any = None
        self._last_output: list[str] = []
        self._final: Status | None = None
        self._any_worked = False
        self._took_batch = False
        self._reached: dict[str, Lsn] = {}
        self._earlier_worked = False
        self._storage_failed = False
        self._reading_since_s: float | None = None
        self.pids: list[int] = []
        """Process ids of the epoch's reader and buffers, for tests and people."""

    def stop(self) -> None:
        """End the run cleanly: the batch in hand is finished, and confirmed. Safe from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Until the work is done, ``stop`` was called, or a person is needed (which raises)."""
        pause_s = _FIRST_PAUSE_S
        failing_since_s: float | None = None
        try:
            while not self._stop.is_set():
                try:
                    self._run_epoch()
                    return
                except _StopRequested:
                    return
                except XidstreamError as error:
                    now_s = time.monotonic()
                    if self._epoch_worked(now_s, error):
                        self._any_worked = True
                        pause_s, failing_since_s = _FIRST_PAUSE_S, None
                    failing_since_s = failing_since_s if failing_since_s is not None else now_s
                    if error.policy.action is Action.STOP:
                        raise
                    if self._stop.is_set():
                        self._notify(f"{error.message}; nothing that was not confirmed is lost")
                        return
                    if not self._may_retry(now_s - failing_since_s):
                        raise
                    self._notify(f"{error.message}; starting again in {pause_s:.1f} s")
                self._stop.wait(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            driver = self._driver
            if driver is not None:
                self._last_output = self.take_output()
                self._driver = None
                driver.close()

    def status(self) -> Status:
        """Ask the parts; one that does not answer at once is shown as missing. After the end: the last one."""
        if self._reader is None and self._final is not None:
            return self._final
        return Status(
            self._epoch, self._opened, _ask(self._reader), _ask(self._sequencer), self._driver_progress()
        )

    def take_output(self) -> list[str]:
        """Lines that the sink printed since the last call."""
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
        config = self._config
        self._reading_since_s = None
        self._took_batch = self._earlier_worked = False
        self._epoch = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._reader = (
            ray.remote(SlotReader)
            .options(num_cpus=0.1, max_concurrency=6)
            .remote(config, self._epoch, self._secrets.lay_down(), self._quota)
        )
        self._sequencer = (
            ray.remote(CommitSequencer)
            .options(num_cpus=0.05, max_concurrency=1000)
            .remote(config, self._epoch)
        )
        try:
            # Session, buffers and sequencer take seconds each, so they start side by side, and beside the end of
            # the batch that an earlier epoch left in the driver's hands.
            preparing = self._reader.prepare.remote()
            driver = self._ensure_driver()
            if self._driver_starting is not None:
                self._await_both(preparing, self._driver_starting)
                self._driver_starting = None
            self._await(preparing, "slot reader")
            self.pids = self._await(self._reader.pids.remote(), "slot reader")
            opened: Opened = self._await(self._reader.open.remote(), "slot reader")
            self._opened = opened
            self._note_reached("slot", opened.confirmed_flush_lsn)
            if config.available_now and self._target is None:
                self._target = opened.target_lsn
            self._await(self._sequencer.open.remote(self._reader, opened, self._target), "commit sequencer")
            reading = self._reader.run.remote(self._sequencer)
            n_batches = self._driver_progress().n_batches
            driver.begin(self._sequencer, opened.identity)
            self._reading_since_s = time.monotonic()
            self._watch(driver, reading, n_batches)
        finally:
            for part in (self._reader, self._sequencer):
                if part is not None:
                    ray.kill(part)
            self._secrets.remove()
            if self._quota is not None:
                # After the reader, whose buffers end with it.
                self._quota.release.remote(self._epoch)
            self._reader = self._sequencer = None
            self._opened = None
            self.pids = []

    def _watch(self, driver: Driver, reading: ray.ObjectRef, n_batches: int) -> None:
        """Until the loop has ended in order. Raises what ended a part. ``n_batches``: what earlier epochs took."""
        give_up_s: float | None = None
        while True:
            if self._stop.is_set() and give_up_s is None:
                give_up_s = time.monotonic() + _LAST_BATCH_TIMEOUT_S
                _get(self._sequencer.stop.remote(), "commit sequencer")
            ended, _ = ray.wait([reading], timeout=0)
            if ended:
                _get(reading, "slot reader")
                raise ComponentLost("the slot reader ended by itself")
            try:
                if driver.result(_POLL_S):
                    break
            except XidstreamError:
                # A buffer that died shows in the sink as rows that cannot be read: the reader knows the cause.
                if ray.wait([reading], timeout=_ROOT_CAUSE_S)[0]:
                    _get(reading, "slot reader")
                raise
            # Noted while the driver lives: when it was what died, nobody can be asked any more.
            progress = self._driver_progress()
            self._took_batch = self._took_batch or progress.n_batches > n_batches
            self._note_reached("sink", progress.sink_lsn)
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise ComponentLost(f"the batch in hand did not end within {_LAST_BATCH_TIMEOUT_S:.0f} s")
        self._final = self.status()
        _get(self._reader.stop.remote(), "slot reader")
        if ray.wait([reading], timeout=_STOP_TIMEOUT_S)[0]:
            _get(reading, "slot reader")

    # -- the driver ------------------------------------------------------------------------------------

    def _ensure_driver(self) -> Driver:
        """A driver with a living session and no running loop; it may still be starting."""
        driver = self._driver
        told = False
        while driver is not None and not driver.end(_STOP_TIMEOUT_S):
            if driver.replaceable:
                break
            if self._stop.is_set():
                raise _StopRequested
            if not told:
                told = True
                self._notify("waiting for the batch in hand to end before starting again")
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

    # -- waiting ---------------------------------------------------------------------------------------

    def _await_both(self, preparing: ray.ObjectRef, starting: ray.ObjectRef) -> None:
        """Until both are done; what fails first is raised first."""
        waiting = [preparing, starting]
        tell_s = time.monotonic() + _TELL_WAITING_AFTER_S
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            for ref in done:
                _get(ref, "slot reader" if ref == preparing else "Spark driver")
            if self._stop.is_set():
                raise _StopRequested
            if time.monotonic() > tell_s and preparing in waiting:
                tell_s = time.monotonic() + _TELL_AGAIN_AFTER_S
                waiting_for = _ask(self._reader, "waiting_for")
                if waiting_for is not None:
                    self._notify(waiting_for)

    def _await(self, ref: ray.ObjectRef, part: str) -> Any:
        """The result; says after a while what is waited for, and ends with ``stop``."""
        tell_s = time.monotonic() + _TELL_WAITING_AFTER_S
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if self._stop.is_set():
                raise _StopRequested
            if time.monotonic() > tell_s:
                tell_s = time.monotonic() + _TELL_AGAIN_AFTER_S
                waiting_for = _ask(self._reader, "waiting_for")
                self._notify(waiting_for or f"the {part} has not started yet; are there free CPUs for it?")
        return _get(ref, part)

    # -- retrying --------------------------------------------------------------------------------------

    def _epoch_worked(self, now_s: float, error: XidstreamError) -> bool:
        """Whether the epoch that just failed was more than an attempt, or found that the one before had been.

        A batch can be through in the moment before its driver dies, and nobody saw it: the next epoch sees it in
        where the slot and the sink are. Without that, parts that die one after the other would end a run that
        goes on after each.

        Having lasted is enough where there may be nothing to show, but not for one storage fault after the other: a
        transaction larger than the disk fills it anew in every epoch, for as long as that takes, and would for ever.
        """
        after_fault, self._storage_failed = self._storage_failed, isinstance(error, StorageFault)
        if self._earlier_worked or self._took_batch:
            return True
        if after_fault and self._storage_failed:
            return False
        return self._reading_since_s is not None and now_s - self._reading_since_s > _WORKED_AFTER_S

    def _note_reached(self, where: str, lsn: Lsn) -> None:
        if where in self._reached and lsn > self._reached[where]:
            self._earlier_worked = True
        if lsn or where in self._reached:
            self._reached[where] = max(lsn, self._reached.get(where, lsn))

    def _may_retry(self, failing_s: float) -> bool:
        """What never worked is the user's to see soon."""
        return failing_s < (GIVE_UP_AFTER_S if self._any_worked else _GIVE_UP_BEFORE_ANY_WORKED_S)


def _ask(part: Any, method: str = "stats") -> Any:
    if part is None:
        return None
    try:
        return ray.get(getattr(part, method).remote(), timeout=2)
    except Exception:  # noqa: BLE001
        # Only for display; what is wrong with the part is raised where it is watched.
        return None


def _get(ref: ray.ObjectRef, part: str) -> Any:
    try:
        return ray.get(ref)
    except Exception as error:
        raise unwrap(error, part) from error
