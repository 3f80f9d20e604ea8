"""One cap on the buffers of several slots: an actor that counts, and each reader's share of it.

Decided by ``pipeline.transactions.BufferQuota``. The reader's side never waits: it sends what it wants when that
changes, and about once a second while that is more than its floor; the answer counts when it is there. The supervisor
releases a reader's share when it has ended the reader, and with it the reader's buffers.

It outlives all epochs, so Ray itself starts it again when it dies. Then it knows nothing, and lends what others have
until they have told it again: that costs buffers above the cap for a while, and no epoch.
"""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.transactions.buffer_quota import BufferQuota

_AGAIN_S = 1.0


class QuotaActor:
    """The actor, and the supervisors' handle on it is ``start_quota``'s."""

    def __init__(self, maximum: int, floors: int) -> None:
        self._quota = BufferQuota(maximum, floors)

    def want(self, owner: str, minimum: int, n_wanted: int) -> int:
        return self._quota.want(owner, minimum, n_wanted)

    def pid(self) -> int:
        return os.getpid()

    def release(self, owner: str) -> None:
        self._quota.release(owner)


def start_quota(maximum: int, floors: int) -> Any:
    """One for a whole run; it is not waited for."""
    return (
        ray.remote(QuotaActor)
        .options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
        .remote(maximum, floors)
    )


class QuotaShare:
    """The reader's side, for one epoch."""

    def __init__(self, quota: Any, owner: str, minimum: int) -> None:
        self._quota = quota
        self._owner = owner
        self._minimum = minimum
        self._allowed = minimum
        self._asked_for = minimum
        self._answer: ray.ObjectRef | None = None
        self._next_s = 0.0

    def allowed(self, n_wanted: int) -> int:
        """How many buffers there may be, as far as is known; ``n_wanted`` counts those that there are."""
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            answer, self._answer = self._answer, None
            try:
                self._allowed = ray.get(answer)
            except Exception as error:
                raise unwrap(error, "buffer quota") from error
        now_s = time.monotonic()
        again = n_wanted > self._minimum and now_s >= self._next_s
        if self._answer is None and (n_wanted != self._asked_for or again):
            self._asked_for, self._next_s = n_wanted, now_s + _AGAIN_S
            self._answer = self._quota.want.remote(self._owner, self._minimum, n_wanted)
        # What was asked to shrink is not to be used while the answer is under way.
        return min(self._allowed, max(self._asked_for, self._minimum))
