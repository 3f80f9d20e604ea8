"""Watches RayDP's master, because Spark itself never reports its death.

The master actor keeps the JVM that starts executors. When either is gone, a job that needs an executor waits for
ever, without an exception (measured; docs/recovery.md). So the master is asked for its URL every few seconds, whatever
Spark does meanwhile; the question goes through both. A failed or very late answer means that the session is lost,
because a session cannot get another master.

No call waits for the answer. Several threads may call, because slots that share a session each ask.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

_INTERVAL_S = 2.0
_ANSWER_S = 30.0
"""A JVM that collects garbage on a busy machine is late, but not lost."""


class SparkMaster:
    """The master of the session with this application name. Without a RayDP master (plain Spark) it is never lost."""

    def __init__(self, app_name: str) -> None:
        self._asked: ray.ObjectRef | None = None
        self._asked_s = 0.0
        self._lost = False
        self._lock = threading.Lock()
        try:
            self._actor: Any = ray.get_actor(f"{app_name}_SPARK_MASTER")
        except ValueError:
            self._actor = None

    def is_lost(self) -> bool:
        with self._lock:
            return self._is_lost()

    def _is_lost(self) -> bool:
        if self._lost or self._actor is None:
            return self._lost
        now_s = time.monotonic()
        if self._asked is None:
            if now_s - self._asked_s >= _INTERVAL_S:
                self._asked, self._asked_s = self._actor.get_master_url.remote(), now_s
        elif ray.wait([self._asked], timeout=0)[0]:
            try:
                ray.get(self._asked)
            except Exception:  # noqa: BLE001 - an error of Ray or of Py4J: nobody starts executors any more
                self._lost = True
            self._asked = None
        elif now_s - self._asked_s > _ANSWER_S:
            self._lost = True
        return self._lost
