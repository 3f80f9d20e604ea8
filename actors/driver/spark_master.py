"""Watches RayDP's master, whose death Spark itself never tells.

The master actor keeps the JVM that starts executors. When either is gone, a job that needs an executor waits for
ever, without an exception (measured; docs/recovery.md). So it is asked for its URL, which goes through both, every
few seconds, beside whatever Spark does. An answer that fails, or that is very late, means that the session is
lost: there is no way to give a session another master.

Never waits for the answer. May be called from several threads: slots that share a session each ask.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

_INTERVAL_S = 2.0
_ANSWER_S = 30.0
"""Late, not lost, is a JVM that collects garbage on a busy machine."""


class SparkMaster:
    """Of the session with this application name. Without a RayDP master (plain Spark) it is never lost."""

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
            except Exception:  # noqa: BLE001 - Ray's or Py4J's, both mean that nobody starts executors any more
                self._lost = True
            self._asked = None
        elif now_s - self._asked_s > _ANSWER_S:
            self._lost = True
        return self._lost
