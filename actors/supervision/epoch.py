"""One life of a slot's reader, buffers and sequencer: made together, opened in a safe order, and ended together.

Session, buffers and sequencer take seconds each. So they start side by side, while the driver finishes the batch that
an earlier epoch left in its hands. The reader takes the slot only with ``open``, when its buffers have started, because
from then on the server expects feedback from us. The sequencer takes over the storage when the slot is ours. The
Spark session, which takes longest, is awaited while the reader reads (``await_driver``).

Every wait ends with ``StopRequested`` as soon as the run is stopped, and with the error of a part that fails meanwhile.
After a while it reports what it is waiting for. Ray keeps a part that it has no CPUs for waiting for ever:
``supervision.placement`` says when that ends the wait.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from xidstream.actors.commit_sequencer import CommitSequencer
from xidstream.actors.reader.slot_reader import SlotReader
from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.runtime.secrets import ReaderSecrets
from xidstream.actors.supervision.cpu_plan import FULL_SHARES, Shares
from xidstream.actors.supervision.placement import (
    RoomWatch,
    free_cpus,
    unplaced,
    unplaced_driver,
)
from xidstream.pipeline.account.model import ReaderReport, SequencerReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.events import Event
from xidstream.pipeline.exchange import Opened
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.tables import Surveyed

READER, SEQUENCER, DRIVER = "slot reader", "commit sequencer", "Spark driver"
_AWAITED = {READER: "the slot reader", SEQUENCER: "the storage", DRIVER: "the Spark session"}
"""The words for a part's answer, while a person waits for it."""
_POLL_S = 0.25
_STOP_TIMEOUT_S = 15.0
_ROOT_CAUSE_S = 5.0
_TELL_WAITING_AFTER_S = 10.0
_TELL_AGAIN_AFTER_S = 60.0
_ASK_AGAIN_AFTER_S = 1.0
_LOOK_FOR_ROOM_S = 1.0


class StopRequested(Exception):
    """The run was stopped while a part was starting."""


class Epoch:
    """The supervisor's thread makes it and ends it. ``stop`` is the run's event, and ``notify`` tells people."""

    def __init__(
        self,
        config: Config,
        reader_secrets: ReaderSecrets,
        quota: Any,
        stop: threading.Event,
        notify: Callable[[str], None],
        *,
        has_sink: bool = True,
        shares: Shares = FULL_SHARES,
    ) -> None:
        """Without a sink everything goes to the journal. ``shares``: what reader and sequencer ask Ray for."""
        self.name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        """Its beginning in UTC and a random part: unique, and in order of time for people."""
        self.opened: Opened | None = None
        """What the reader found when it opened the slot; None before that."""
        self.pids: list[int] = []
        """Process ids of the reader and its buffers."""
        self.waiting_for: tuple[str, ...] = ()
        """In words, while parts start. Other threads may read it."""
        self._config = config
        self._shares = shares
        self._room = RoomWatch(local=is_ours())
        """Notices that an actor finds no CPU."""
        self._question: ray.ObjectRef | None = None
        """What the reader was asked and has not answered; None if nothing."""
        self._next_room_s = time.monotonic() + _LOOK_FOR_ROOM_S
        """When the cluster's free CPUs are looked at next, on the monotonic clock."""
        self._lack: str | None = None
        """What the last look at the CPUs found missing, in words; None if nothing."""
        self._secrets = reader_secrets
        self._quota = quota
        self._stop = stop
        self._notify = notify
        self._has_sink = has_sink
        reader_arguments = (config, self.name, reader_secrets.lay_down(), quota, has_sink)
        self._reader = _actor(SlotReader, *reader_arguments, num_cpus=shares.reader, max_concurrency=6)
        """The slot reader's handle."""
        self.sequencer = _actor(
            CommitSequencer, config, self.name, num_cpus=shares.sequencer, max_concurrency=1000
        )
        """The commit sequencer's handle, which the batch loop gets, too."""
        self._preparing = self._reader.prepare.remote()
        """The reader's first call: it connects, and places its buffers."""
        self._reading: ray.ObjectRef | None = None
        """The call that reads, and that ends with the reader; None before ``run``."""
        self._driver_starting: ray.ObjectRef | None = None
        """The driver's start, as long as only this epoch awaits it; None otherwise."""

    @property
    def is_reading(self) -> bool:
        """Whether the reader was told to read, so that all three parts answer."""
        return self._reading is not None

    def await_prepared(self, driver_starting: ray.ObjectRef | None) -> None:
        """Wait until the reader is connected and has its buffers. Raises the first failure, also of a driver whose
        session starts meanwhile."""
        self._driver_starting = driver_starting
        self._await({self._preparing: READER})
        self.pids = self._call(self._reader.pids.remote(), READER)

    def open(self) -> Opened:
        """Start replication."""
        self.opened = self._call(self._reader.open.remote(), READER)
        assert self.opened is not None
        return self.opened

    def run(self, target: Lsn | None) -> None:
        """Let the sequencer take over the storage, and the reader read."""
        self._call(self.sequencer.open.remote(self._reader, self.opened, target, self._has_sink), SEQUENCER)
        self._reading = self._reader.run.remote(self.sequencer)
        self._failing = self.sequencer.failed.remote()

    def await_driver(self, driver_starting: ray.ObjectRef) -> None:
        """Wait for the driver's session while the reader reads. Raises the first failure of the two."""
        self._driver_starting = None
        self._await({driver_starting: DRIVER})

    def pause(self, pause_s: float) -> None:
        """Wait while the reader reads. Raises StopRequested, and the error that ended the reader."""
        deadline_s = time.monotonic() + pause_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.check_reading()
            if self._stop.wait(min(left_s, _POLL_S)):
                raise StopRequested

    def check_reading(self) -> None:
        """If reader or sequencer has ended, raise the error that ended it. A sink that takes nothing, or that is not
        there, asks the sequencer for nothing."""
        if self._reading is None:
            return
        if ray.wait([self._reading], timeout=0)[0]:
            get(self._reading, READER)
            raise ComponentLost("the slot reader ended by itself")
        if ray.wait([self._failing], timeout=0)[0]:
            self.raise_root_cause()
            get(self._failing, SEQUENCER)

    def raise_root_cause(self) -> None:
        """If reader or sequencer has failed, raise its error. When a buffer died, the sink only sees rows that it
        cannot read, and these know the cause."""
        if self._reading is not None and ray.wait([self._reading], timeout=_ROOT_CAUSE_S)[0]:
            get(self._reading, READER)
        get(self.sequencer.finished.remote(), SEQUENCER)

    def withhold_journal(self) -> None:
        get(self.sequencer.withhold_journal.remote(), SEQUENCER)

    def aim(self, target: Lsn) -> None:
        get(self.sequencer.aim.remote(target), SEQUENCER)

    def survey(self, known: str | None) -> Surveyed:
        """Asked of the reader, but for what the sink has: the slot may be confirmed further, after the journal."""
        surveyed: Surveyed = get(self._reader.survey.remote(known), READER)
        report = self.sequencer_report()
        return surveyed if report is None else replace(surveyed, delivered_lsn=report.delivered_lsn)

    def stop_batches(self) -> None:
        get(self.sequencer.stop.remote(), SEQUENCER)

    def stop_reading(self) -> None:
        """Stop the reader in order, so that the server gets the last position."""
        get(self._reader.stop.remote(), READER)
        if self._reading is not None and ray.wait([self._reading], timeout=_STOP_TIMEOUT_S)[0]:
            get(self._reading, READER)

    def stop_in_order(self) -> None:
        """Where no batch loop will see the end: what may be confirmed is, and the server gets to know."""
        self.stop_batches()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while not get(self.sequencer.finished.remote(), SEQUENCER) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.stop_reading()

    def reader_report(self, *, with_processes: bool = False, n_open: int) -> ReaderReport | None:
        """See ``SlotReader.account``. None where it does not answer at once."""
        report: ReaderReport | None = _ask(self._reader, with_processes=with_processes, n_open=n_open)
        return report

    def sequencer_report(self, *, with_prepared: bool = False) -> SequencerReport | None:
        """See ``CommitSequence.account``. None where it does not answer at once."""
        report: SequencerReport | None = _ask(self.sequencer, with_prepared=with_prepared)
        return report

    def end(self) -> None:
        """End all parts by force, whatever they do."""
        for part in (self._reader, self.sequencer):
            ray.kill(part)
        self._secrets.remove()
        if self._quota is not None:
            # This comes after the reader, because its buffers end with it.
            self._quota.release.remote(self.name)

    # -- waiting ---------------------------------------------------------------------------------------

    def _call(self, ref: ray.ObjectRef, part: str) -> Any:
        self._await({ref: part})
        return get(ref, part)

    def _await(self, parts: Mapping[ray.ObjectRef, str]) -> None:
        """Wait until all are done. Raises the first failure."""
        waiting = list(parts)
        tell_s = time.monotonic() + _TELL_WAITING_AFTER_S
        while waiting:
            beside = [] if self._driver_starting is None else [_AWAITED[DRIVER]]
            self.waiting_for = tuple([_AWAITED[parts[ref]] for ref in waiting] + beside)
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            for ref in done:
                get(ref, parts[ref])
            if self._stop.is_set():
                raise StopRequested
            self._check_others()
            if waiting:
                self._look_for_room()
            if waiting and time.monotonic() > tell_s:
                # Where nothing was told, it may become known in a moment.
                again_s = _TELL_AGAIN_AFTER_S if self._tell_waiting() else _ASK_AGAIN_AFTER_S
                tell_s = time.monotonic() + again_s
        self.waiting_for = ()

    def _check_others(self) -> None:
        """Raise the error of a part that is not awaited now."""
        self.check_reading()
        starting = self._driver_starting
        if starting is not None and ray.wait([starting], timeout=0)[0]:
            get(starting, DRIVER)
            self._driver_starting = None

    def _look_for_room(self) -> None:
        """Raises what ``RoomWatch`` raises of a lack of CPUs that lasts."""
        now_s = time.monotonic()
        if now_s >= self._next_room_s:
            self._next_room_s = now_s + _LOOK_FOR_ROOM_S
            # While the reader reads it may ask for buffers that wait for a node for as long as it takes.
            reads = self._reading is not None
            of = self._reader
            needed = (
                unplaced_driver(self._shares, of)
                if reads
                else unplaced(self._config, self._shares, of, self.sequencer)
            )
            self._lack = self._room.look(now_s, needed, free_cpus()) if needed else None

    def _tell_waiting(self) -> bool:
        """Whether there was something to tell. That parts take long to start is no news."""
        reason = self._lack or (None if self._reading is not None else self._readers_wait())
        if reason is not None:
            self._notify(Event("waiting", reason))
        return reason is not None

    def _readers_wait(self) -> str | None:
        """What the reader waits for; None where it says nothing. A reader that is not up answers later, so one question
        is in hand at a time, and a stop does not wait for it."""
        if self._question is None:
            self._question = self._reader.waiting_for.remote()
        if not ray.wait([self._question], timeout=_POLL_S)[0]:
            return None
        question, self._question = self._question, None
        return _answer(question)


def _actor(kind: type, *arguments: Any, **options: Any) -> Any:
    return ray.remote(kind).options(**options).remote(*arguments)


def _ask(part: Any, **arguments: Any) -> Any:
    return _answer(part.account.remote(**arguments))


def _answer(question: ray.ObjectRef) -> Any:
    try:
        return ray.get(question, timeout=2)
    except Exception:  # noqa: BLE001
        # This is only for display. The supervisor watches the part and raises its errors.
        return None


def get(ref: ray.ObjectRef, part: str) -> Any:
    """The result. Raises the error that ``part`` raised."""
    try:
        return ray.get(ref)
    except Exception as error:
        raise unwrap(error, part) from error
