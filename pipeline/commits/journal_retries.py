"""When the journal is written again after it could not be.

A journal that cannot be written is like one that is full: delivery and records go on, and what commits waits in the
slot. A quota, a full disk or a store that answers 503 may heal at any time, so it is tried again, at growing intervals.

Plain state over the caller's clock.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.errors import StorageFault

FIRST_S: Final = 1.0
LAST_S: Final = 30.0


class JournalRetries:
    def __init__(self) -> None:
        self._since_s: float | None = None
        self._interval_s = FIRST_S
        self._next_s = float("-inf")
        self.error: StorageFault | None = None
        """Why the last write failed; None if it did not."""

    def failed(self, error: StorageFault, now_s: float) -> None:
        if self._since_s is None:
            self._since_s, self._interval_s = now_s, FIRST_S
        self.error = error
        self._next_s = now_s + self._interval_s
        self._interval_s = min(LAST_S, 2 * self._interval_s)

    def worked(self) -> None:
        self._since_s = self.error = None
        self._next_s = float("-inf")

    def hasten(self) -> None:
        """The run ends: it is tried once more now."""
        self._next_s = float("-inf")

    def failing_s(self, now_s: float) -> float | None:
        """For how long it could not be written; None if it can be."""
        return None if self._since_s is None else max(0.0, now_s - self._since_s)

    def wait_s(self, now_s: float) -> float:
        """Until it may be written."""
        return max(0.0, self._next_s - now_s)
