"""The account of one slot's run, gathered from its parts when somebody asks.

Whoever connects to the run's socket (``runtime.run_socket``) gets all of it: the actors, their processes and the server
are asked then. ``RunWatch`` (``supervision.run_watch``) asks for less, and more often. What the parts mean is decided
in ``pipeline.account``.

``status`` is for the display, which asks several times a second: the same parts, asked for what costs nothing.

``failed`` is for the supervisor's thread, the rest for any thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xidstream.actors.runtime.process_facts import this_process
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch
from xidstream.actors.supervision.run_status import RunStatus
from xidstream.pipeline.account import Account, RestartPart, RunPart, SlotPart, StallWatch, Window
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.account.model import (
    MOST_OPEN,
    JournalPart,
    ProcessPart,
    ReaderReport,
    SequencerReport,
    SinkReport,
    is_caught_up,
    with_undelivered,
)
from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import Opened, SlotIdentity
from xidstream.pipeline.log_tables.watched_clock import steady_s
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.postgres.slot_account import RATE_WINDOW_S, slot_part
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted

log = logging.getLogger(__name__)

_MOST_RESTARTS: Final = 20
_READ_WINDOW_S: Final = 10.0
_SHOWN_OPEN: Final = 6
"""How many open transactions a status names."""
_SLOT_WAIT_S: Final = 5.0
"""For the answer to a question that another thread has asked."""
_EPOCH: Final = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
_JUMP: Final = datetime.timedelta(seconds=1)
"""The largest difference of two looks at two clocks that counts as none."""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


@dataclass(frozen=True)
class RunParts:
    """What the supervisor has at the moment. ``driver`` is None while its session starts."""

    state: str
    epoch_name: str
    epoch: Epoch | None
    driver: Driver | None
    snapshots: SnapshotProgress | None


class RunAccounts:
    """``config`` has its secrets."""

    def __init__(
        self,
        config: Config,
        parts: Callable[[], RunParts],
        *,
        has_sink: bool = True,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        self._config = config
        self._has_sink = has_sink
        self._parts = parts
        self._now = now
        self._ahead = self._looked_ahead()
        """By how much the wall clock was ahead of steady seconds at the last look."""
        self._started_at = now()
        """When the run began, moved along when somebody sets the clock."""
        self._restarts: deque[RestartPart] = deque(maxlen=_MOST_RESTARTS)
        """The last errors that ended an epoch, oldest first."""
        self._n_restarts = 0
        """How many epochs were followed by another one, of which ``_restarts`` has the last."""
        self._lock = threading.Lock()
        """Guards the clock, the windows and the stalls, which any thread's question moves."""
        self._slot_lock = threading.Lock()
        """Held while the server is asked about the slot: one question at a time."""
        self._stalls = StallWatch(config.status_interval_ms / 1000)
        """Which part has waited for how long."""
        self._read = Window(_READ_WINDOW_S)
        """Messages and bytes that the reader has read, in the last seconds."""
        self._delivered = Window(_READ_WINDOW_S)
        """Rows that the sink has taken, in the last seconds."""
        self._positions = Window(RATE_WINDOW_S)
        """Positions of the slot and the server, for the rates of the WAL."""
        self._identity: SlotIdentity | None = None
        """The slot's identity, once an epoch has opened it; it outlives the epoch."""
        self._socket: RunSocket | None = None
        """Where others on this machine ask; None where it could not be made."""
        self.page: str | None = None
        """The address of the run's status page."""
        self.metrics: str | None = None
        """Where Ray offers the run's metrics."""

    # -- the supervisor's thread -----------------------------------------------------------------------

    def serve(self) -> None:
        """Open the run's socket, so that programs on this machine can ask. If that fails, the run goes on without
        it."""
        try:
            self._socket = RunSocket(self._config.slot, lambda: to_json(self.account()))
        except OSError as error:
            log.warning("no account of this run can be asked for: %s", error.strerror)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def failed(self, error: XidstreamError, pause_s: float | None) -> None:
        """An error ended the epoch; ``pause_s`` until the next one, None if there is none."""
        self._n_restarts += pause_s is not None
        self._follow_clock()
        self._restarts.append(
            RestartPart(self._now(), type(error).__name__, error.message, error.remedy, pause_s)
        )

    @property
    def last_error(self) -> RestartPart | None:
        """The error that ended the last epoch that failed."""
        return self._restarts[-1] if self._restarts else None

    # -- any thread ------------------------------------------------------------------------------------

    def account(self) -> Account:
        """All of it. Parts that do not answer within seconds are missing."""
        account = self._gather(with_processes=True)
        slot, error = self.slot()
        return with_undelivered(dataclasses.replace(account, slot=slot, slot_error=error))

    def glance(self) -> Account:
        """The account without the slot and the processes, of what three of the actors know already."""
        return self._gather(with_processes=False)

    def status(self, progress: SinkReport) -> RunStatus:
        """What reader and sequencer know at once, and the ``progress`` of the driver: no rates and no stalls."""
        self._follow_clock()
        parts = self._parts()
        reader = sequencer = None
        opened = None
        if parts.epoch is not None and parts.epoch.is_reading:
            opened = parts.epoch.opened
            reader, sequencer = parts.epoch.reader_report(n_open=_SHOWN_OPEN), parts.epoch.sequencer_report()
        from_us = 0 if sequencer is None else sequencer.journal_from_us
        return RunStatus(self._account(parts, reader, sequencer, progress), opened, self._has_sink, from_us)

    def _gather(self, *, with_processes: bool) -> Account:
        self._follow_clock()
        parts = self._parts()
        epoch = parts.epoch
        reader = sequencer = None
        if epoch is not None and epoch.is_reading:
            reader = epoch.reader_report(with_processes=with_processes, n_open=MOST_OPEN)
            sequencer = epoch.sequencer_report(with_prepared=True)
        sink = None if parts.driver is None else parts.driver.account()
        account = self._account(parts, reader, sequencer, sink)
        if with_processes:
            account = dataclasses.replace(account, processes=_processes(reader, sequencer, sink))
        with self._lock:
            now_s = time.monotonic()
            return dataclasses.replace(
                self._with_rates(account, now_s), stalls=self._stalls.look(account, now_s)
            )

    def _account(
        self,
        parts: RunParts,
        reader: ReaderReport | None,
        sequencer: SequencerReport | None,
        sink: SinkReport | None,
    ) -> Account:
        """The account: the parts' answers, and the facts that only the supervisor knows."""
        return Account(
            at=self._now(),
            run=self._run(parts, reader, sequencer),
            reader=None if reader is None else reader.reader,
            open=() if reader is None else reader.open,
            prepared=() if sequencer is None else sequencer.prepared,
            sequencer=None if sequencer is None else sequencer.sequencer,
            journal=None if sequencer is None else self._journal(sequencer),
            sink=None if sink is None else sink.sink,
            log=None if sink is None else sink.log,
            snapshots=parts.snapshots,
            restarts=tuple(self._restarts),
            n_restarts=self._n_restarts,
            last_error=self.last_error,
        )

    def _looked_ahead(self) -> datetime.timedelta:
        """By how much the wall clock is ahead of seconds that never jump."""
        return self._now() - _EPOCH - datetime.timedelta(seconds=steady_s())

    def _follow_clock(self) -> None:
        """Where the wall clock was set, say by the new time when the run began and when it failed: what is shown and
        counted are ages."""
        ahead = self._looked_ahead()
        with self._lock:
            jump, self._ahead = ahead - self._ahead, ahead
            if abs(jump) < _JUMP:
                return
            self._started_at += jump
            moved = [dataclasses.replace(each, at=each.at + jump) for each in self._restarts]
            self._restarts.clear()
            self._restarts.extend(moved)

    def _run(
        self, parts: RunParts, reader: ReaderReport | None, sequencer: SequencerReport | None
    ) -> RunPart:
        config, epoch = self._config, parts.epoch
        opened = None if epoch is None else epoch.opened
        caught_up = opened is not None and has_caught_up(opened, reader, sequencer, has_sink=self._has_sink)
        if epoch is not None and epoch.opened is not None:
            self._identity = epoch.opened.identity
        identity = self._identity
        return RunPart(
            slot=config.slot,
            system_identifier=None if identity is None else str(identity.system_identifier),
            database=None if identity is None else identity.database,
            publication=config.publication,
            sink=redacted(config.sink) if self._has_sink else "",
            storage=redacted(config.storage),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=self._started_at,
            state=parts.state,
            waiting_for=() if epoch is None else epoch.waiting_for,
            epoch=parts.epoch_name,
            is_caught_up=caught_up,
            page=self.page,
            metrics=self.metrics,
        )

    def _journal(self, sequencer: SequencerReport) -> JournalPart | None:
        """The journal's part. A journal that is on and holds nothing has one, too; one that is off has None."""
        most = self._config.journal_max_bytes
        if sequencer.journal is None and not most:
            return None
        return dataclasses.replace(sequencer.journal or JournalPart(), max_bytes=most)

    def _with_rates(self, account: Account, now_s: float) -> Account:
        reader, sink = account.reader, account.sink
        if reader is not None:
            self._read.note(now_s, reader.n_messages, reader.n_bytes)
            if (rates := self._read.per_s) is not None:
                reader = dataclasses.replace(reader, messages_per_s=rates[0], bytes_per_s=rates[1])
        if sink is not None:
            self._delivered.note(now_s, sink.n_rows)
            if (rates := self._delivered.per_s) is not None:
                sink = dataclasses.replace(sink, rows_per_s=rates[0])
        return dataclasses.replace(account, reader=reader, sink=sink)

    def slot(self) -> tuple[SlotPart | None, str | None]:
        """The slot as the server has it, or why the server did not tell."""
        epoch = self._parts().epoch
        opened = None if epoch is None else epoch.opened
        login = login_of(self._config).to(**({} if opened is None else opened.server))
        # A link that is dead may keep an earlier question for a minute, and whoever looks wants to know it now.
        if not self._slot_lock.acquire(timeout=_SLOT_WAIT_S):
            return None, "the server has not answered an earlier question yet"
        try:
            return slot_part(login, self._config.slot, self._positions), None
        except XidstreamError as error:
            return None, error.message
        finally:
            self._slot_lock.release()


def has_caught_up(
    opened: Opened, reader: ReaderReport | None, sequencer: SequencerReport | None, *, has_sink: bool
) -> bool:
    """Whether the run is caught up, as ``pipeline.account.model.is_caught_up`` defines it. False where a part has not
    answered."""
    if reader is None or sequencer is None:
        return False
    reached = sequencer.delivered_lsn if has_sink else sequencer.confirmed_lsn
    return is_caught_up(
        n_waiting=sequencer.sequencer.n_waiting - (0 if has_sink else sequencer.n_journaled),
        backlog_bytes=reader.reader.backlog_bytes,
        is_paused=reader.reader.paused_by is not None,
        has_reached_target=reached >= opened.target_lsn,
    )


def _processes(
    reader: ReaderReport | None, sequencer: SequencerReport | None, sink: SinkReport | None
) -> tuple[ProcessPart, ...]:
    found = [this_process("run")]
    found += [] if reader is None else reader.processes
    for report in (sequencer, sink):
        if report is not None and report.process is not None:
            found.append(report.process)
    return tuple(found)
