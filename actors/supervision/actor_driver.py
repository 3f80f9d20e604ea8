"""The supervisor's handle on one slot's batch loop in a Spark driver actor."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables

_T = TypeVar("_T")
_ANSWER_S = 10.0
_WATCH_INTERVAL_S = 1.0
"""A call costs the actor a millisecond of CPU or more, whatever it asks."""
_END_S = 15.0
_CANCEL_INTERVAL_S = 0.5
_ACCOUNT_S = 2.0


class ActorDriver:
    """The supervisor's handle on one slot's loop in a SparkDriver actor.

    ``is_shared`` tells whether other slots use the actor. ``close`` calls ``leave(healthy)`` and says whether they can
    go on using it.
    """

    replaceable = True

    def __init__(
        self,
        actor: Any,
        started: ray.ObjectRef,
        slot: str,
        is_shared: Callable[[], bool],
        leave: Callable[[bool], None],
    ) -> None:
        self._actor = actor
        self._started = started
        self._slot = slot
        self._is_shared = is_shared
        self._leave = leave
        self._name = ""
        """The name of the batch loop in hand. The actor ends none of another name."""
        self._running: ray.ObjectRef | None = None
        """The call in which the batch loop runs; None before the first."""
        self._watch: ray.ObjectRef | None = None
        """The question whether the driver is in trouble, if it is not answered yet."""
        self._next_watch_s = 0.0
        """When that is asked next, on the monotonic clock."""
        self._accounting: ray.ObjectRef | None = None
        """The question for the account, if it is not answered yet."""
        self._account_lock = threading.Lock()
        """Any thread may ask for the account: one at a time."""
        self._lost = False
        """Whether the driver was found to be in trouble: it cannot be used again."""

    def start(self) -> ray.ObjectRef | None:
        return self._started

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        self._name = f"{self._slot}-{secrets.token_hex(4)}"
        self._running = self._actor.run.remote(self._slot, self._name, sequencer, identity)

    def result(self, timeout_s: float) -> bool:
        assert self._running is not None
        done, _ = ray.wait([self._running], timeout=timeout_s)
        if done:
            self._get(self._running, None)
            return True
        if self._watch is None:
            if time.monotonic() >= self._next_watch_s:
                self._next_watch_s = time.monotonic() + _WATCH_INTERVAL_S
                self._watch = self._actor.trouble.remote(self._slot)
        elif ray.wait([self._watch], timeout=0)[0]:
            watch, self._watch = self._watch, None
            trouble = self._get(watch, None)
            if trouble is not None:
                self._lost = True
                raise ComponentLost(trouble)
        return False

    def end(self, timeout_s: float) -> bool:
        if self._running is None:
            return True
        if self._lost:
            # The loop's job waits for ever. Only the end of the process ends it.
            ray.kill(self._actor)
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._lost:
                # This is repeated, because a table whose turn comes only now starts a job after the others were
                # cancelled.
                self._actor.end.remote(self._slot, self._name)
            left_s = deadline - time.monotonic()
            if ray.wait([self._running], timeout=max(0.0, min(left_s, _CANCEL_INTERVAL_S)))[0]:
                return True
            if left_s <= 0:
                return False

    def is_alive(self) -> bool:
        if not ray.wait([self._started], timeout=0)[0]:
            return True
        try:
            return not self._lost and bool(ray.get(self._actor.is_alive.remote(), timeout=_ANSWER_S))
        except Exception:  # noqa: BLE001 - any error means that it is not alive
            return False

    def on_snapshots(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        result: _T = self._get(self._actor.on_snapshots.remote(self._slot, call, after_end), None)
        return result

    def progress(self) -> SinkReport:
        progress: SinkReport = self._get(self._actor.progress.remote(self._slot), _ANSWER_S)
        return progress

    def account(self) -> SinkReport | None:
        with self._account_lock:
            # One question at a time: a JVM that hangs must not take all of the actor's threads. What took too long is
            # read the next time.
            if self._accounting is None:
                self._accounting = self._actor.account.remote(self._slot)
            if not ray.wait([self._accounting], timeout=_ACCOUNT_S)[0]:
                return None
            accounting, self._accounting = self._accounting, None
            try:
                report: SinkReport = ray.get(accounting)
            except Exception:  # noqa: BLE001
                # This is only for display. The supervisor watches the driver and raises its errors.
                return None
            return report

    def take_output(self) -> list[str]:
        return list(self._get(self._actor.take_output.remote(), _ANSWER_S))

    def pid(self) -> int:
        return int(self._get(self._actor.pid.remote(), _ANSWER_S))

    def close(self) -> None:
        # An actor that nobody else uses ends anyway. Otherwise the loop gets time to end by itself.
        ended = self.end(_END_S if self._is_shared() else 0)
        self._leave(ended and self.is_alive())

    def _get(self, ref: ray.ObjectRef, timeout_s: float | None) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ComponentLost("the Spark driver does not answer") from None
        except Exception as error:
            raise unwrap(error, "Spark driver") from error
