"""One Spark session for all slots of a run: which slot starts it, which slots go on using it, and when it ends.

The session is in one SparkDriver actor, with a batch loop for each slot. The first slot that needs the session starts
it, and the last slot that leaves ends it. A slot may find the session broken: its JVM died, it never started, or a loop
does not end. Then the slot ends the whole actor, because only that surely ends a loop, and two loops must never
write to one sink. The other slots see their loops end, begin a new epoch, and share the session that is started next.
So a user's function that hangs in one slot costs the others an epoch each time, and never a row.

Rejected: a session for each slot. Each would need a JVM, and on a cluster a RayDP master and executors, up to a
gigabyte, on machines that have a few. It would not make tests simpler either, because a slot's loop must be killable in
both designs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ray

from xidstream.actors.driver.session import settled
from xidstream.actors.driver.spark_driver import SparkDriver
from xidstream.actors.supervision.actor_driver import ActorDriver
from xidstream.actors.supervision.cpu_plan import FULL_SHARES, Shares
from xidstream.pipeline.settings.config import Config

_CLOSE_S = 5.0
"""An orderly end takes a second or two. One that hangs must not keep a run that was told to stop: the actor is killed
then, and its JVMs and Ray actors end with it."""
_THREADS = 4
"""Threads of the actor for each slot: for its loop, and for the questions of its supervisor and of the display."""


class SharedSession:
    """The supervisors' threads use it. ``configs`` are by slot; ``shares`` has what the actor asks Ray for."""

    def __init__(self, configs: Mapping[str, Config], shares: Shares = FULL_SHARES) -> None:
        self._configs = {slot: settled(config) for slot, config in configs.items()}
        self._shares = shares
        self._lock = threading.Lock()
        self._actor: Any = None
        self._started: Any = None
        self._users: set[str] = set()

    def driver(self, slot: str) -> ActorDriver:
        """A handle for one slot on the present session, or on a new one. The session may still be starting."""
        with self._lock:
            if self._actor is None:
                actor = ray.remote(SparkDriver).options(
                    num_cpus=self._shares.driver,
                    max_concurrency=2 + _THREADS * len(self._configs),
                    max_restarts=0,
                )
                self._actor = actor.remote(self._configs)
                self._started = self._actor.start.remote()
            self._users.add(slot)
            actor = self._actor
            return ActorDriver(
                actor,
                self._started,
                slot,
                lambda: len(self._users) > 1,
                lambda healthy: self._leave(slot, actor, healthy),
            )

    def _leave(self, slot: str, actor: Any, healthy: bool) -> None:
        # The lock is held to the end, because two sessions of one name must not exist at once.
        with self._lock:
            if actor is not self._actor:
                return
            self._users.discard(slot)
            if healthy and self._users:
                return
            # A session that still starts cannot be closed: RayDP takes no call before it has the session, half a
            # minute later. The processes that it has started by then end with the actor.
            if ray.wait([self._started], timeout=0)[0]:
                try:
                    ray.get(actor.close.remote(), timeout=_CLOSE_S)
                except (ray.exceptions.RayError, TimeoutError):
                    pass  # it is ended because it is broken, or it is ended by force right below
            ray.kill(actor)
            self._actor, self._users = None, set()
