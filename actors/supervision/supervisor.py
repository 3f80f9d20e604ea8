"""Keeps one slot's pipeline running: begins an epoch, watches it, and begins another when a part is lost.

An *epoch* is one life of reader, buffers and sequencer (``supervision.epoch``). They hold nothing that the slot or
the storage does not hold too. So the answer to the loss of any of them is the same: end all three, and begin a new
epoch from the slot's confirmed position. Repairing a part in place was rejected: it would need a protocol between old
and new parts for a case that replay already covers. The Spark driver outlives epochs (``supervision.run_driver``), and
epochs outlive a driver (``supervision.delivery``): it takes many seconds to start, and nothing is to be read anew only
because it was lost.

``errors.POLICY`` says what to do after an error. STOP raises it. RETRY and RESTART begin a new epoch after a pause, or
give up (``supervision.retries``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from xidstream.actors.runtime.ray_cluster import keep_logs
from xidstream.actors.runtime.secrets import ReaderSecrets, without_secrets
from xidstream.actors.supervision.cpu_plan import FULL_SHARES, Shares
from xidstream.actors.supervision.delivery import Delivery
from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch, StopRequested
from xidstream.actors.supervision.no_sink import NoSink
from xidstream.actors.supervision.retries import Retries
from xidstream.actors.supervision.run_accounts import RunAccounts, RunParts
from xidstream.actors.supervision.run_driver import RunDriver
from xidstream.actors.supervision.run_status import RunStatus
from xidstream.actors.supervision.run_watch import RunWatch
from xidstream.actors.supervision.slot_snapshots import SlotSnapshots
from xidstream.pipeline.account.model import Account
from xidstream.pipeline.errors import Action, XidstreamError
from xidstream.pipeline.events import of_error
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.config import Config

log = logging.getLogger(__name__)


class Supervisor:
    """``make_driver`` is called for the first epoch, and again whenever the driver itself was lost. None: there is no
    sink, and everything goes to the journal.

    ``quota`` is the cap on buffers that several slots share (``actors.reader.buffer_quota``). ``shares``: by the plan
    of the whole run (``supervision.cpu_plan``).
    """

    def __init__(
        self,
        config: Config,
        make_driver: Callable[[], Driver] | None,
        notify: Callable[[str], None] = log.warning,
        quota: Any = None,
        shares: Shares = FULL_SHARES,
    ) -> None:
        self._config = without_secrets(config)
        """The settings, as all actors get them."""
        self._secrets = ReaderSecrets(config)
        """The secrets, laid down for each epoch's reader alone."""
        self._notify = notify
        self._quota = quota
        self._shares = shares
        self._stop = threading.Event()
        """Set by ``stop``; every wait of the run looks at it."""
        self._has_sink = make_driver is not None
        """False: everything goes to the journal."""
        self._run_driver = RunDriver(make_driver or NoSink, self._stop, notify)
        """The driver, which outlives epochs."""
        self._target: Lsn | None = None
        """Where ``available_now`` ends, from the first epoch's opening on; None for a run without an end."""
        self._epoch: Epoch | None = None
        """The epoch that runs; None between two."""
        self._epoch_name = ""
        """The name of the last epoch that began; empty before the first."""
        self._final: RunStatus | None = None
        """The status at the end of an epoch that ended in order; None before that."""
        self._snapshots = SlotSnapshots(config, notify, has_sink=self._has_sink)
        """The snapshots of tables, which go on beside the epochs."""
        self._accounts = RunAccounts(config, self._parts, has_sink=self._has_sink)
        """Gathers what is known of the run."""
        self._retries = Retries(self._accounts, notify)
        """Decides when the next epoch begins, and tells people."""
        self._run_watch = RunWatch(self._accounts, notify)
        """Tells people of stalls, and Ray of the metrics."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the epoch's reader and buffers, for tests and people."""
        epoch = self._epoch
        return [] if epoch is None else epoch.pids

    def stop(self) -> None:
        """End the run cleanly: the current batch is finished, and what else has committed goes to the journal. A signal
        handler may call this."""
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
                    if self._retries.restarts.action_of(error) is Action.STOP:
                        raise
                    pause_s = self._retries.pause_after(error)
                    if self._stop.is_set():
                        text = f"{error.message}; changes that were not confirmed will come again"
                        self._notify(of_error("stopped", text, error))
                        return
                    if pause_s is None:
                        raise
                    self._retries.tell(error, pause_s)
                self._stop.wait(pause_s)
        except BaseException:
            keep_logs()
            raise
        finally:
            self._run_watch.close()
            self._accounts.close()
            self._snapshots.stop()
            self._run_driver.close()

    def status(self) -> RunStatus:
        """Ask the parts for their state. A part that does not answer at once is missing. After the end, the last
        status."""
        if self._epoch is None and self._final is not None:
            return self._final
        return self._accounts.status(self._run_driver.progress())

    def shown_at(self, page: str) -> None:
        """The account names the address of the status page."""
        self._accounts.page = page

    def measured_at(self, metrics: str) -> None:
        """The account names this address of the metrics, in place of Ray's own."""
        self._accounts.metrics = metrics

    def account(self) -> Account:
        """All that is known of the run: docs/status.md. The parts and the server are asked, which may take seconds."""
        return self._accounts.account()

    def _state(self) -> str:
        epoch = self._epoch
        if epoch is not None:
            return "reading" if epoch.is_reading else "starting"
        return "ended" if self._final is not None else "restarting" if self._epoch_name else "starting"

    def _parts(self) -> RunParts:
        return RunParts(
            self._state(), self._epoch_name, self._epoch, self._run_driver.ready, self._snapshots.progress()
        )

    def take_output(self) -> list[str]:
        """The lines that the sink printed since the last call."""
        return self._run_driver.take_output()

    def _run_epoch(self) -> None:
        self._retries.begin()
        epoch = Epoch(
            self._config,
            self._secrets,
            self._quota,
            self._stop,
            self._notify,
            has_sink=self._has_sink,
            shares=self._shares,
        )
        self._epoch, self._epoch_name = epoch, epoch.name
        try:
            driver = self._run_driver.ensure()
            epoch.await_prepared(self._run_driver.starting)
            self._retries.restarts.has_logged_in = True
            opened = epoch.open()
            if self._config.available_now and self._target is None:
                self._target = opened.target_lsn
            epoch.run(None if self._snapshots.holds_target(opened) else self._target)
            self._note_reached(epoch)
            delivery = Delivery(
                epoch,
                opened,
                self._run_driver,
                self._snapshots,
                self._retries,
                self._stop,
                self._notify,
                self._target,
            )
            try:
                delivery.run(driver)
            finally:
                if self._stop.is_set():
                    self._final = self.status()
            self._final = self.status()
            epoch.stop_reading()
        finally:
            self._snapshots.end_epoch()
            epoch.end()
            self._epoch = None

    def _note_reached(self, epoch: Epoch) -> None:
        """Count as progress what earlier epochs delivered and could not report. With a sink, what only the journal got
        does not count."""
        report = epoch.sequencer_report()
        if report is not None:
            reached = report.delivered_lsn if self._has_sink else report.confirmed_lsn
            self._retries.restarts.reached("slot", reached)
