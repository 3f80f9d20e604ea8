"""When a position is recorded: at once where the sink or the journal moved it, and at most once a second where nothing
else did.

While the publication is quiet and the server writes elsewhere, it names a new position several times a second. Each one
may be confirmed, and each record is three requests to a store (a list, a read and a write of one key), for ever: at
five a second some twelve million of each a month, for a slot that has nothing to do. The server loses nothing by a
second: it keeps that much WAL for longer.

Plain state over the caller's clock.
"""

from __future__ import annotations

from typing import Final

POSITION_INTERVAL_S: Final = 1.0


class RecordPace:
    def __init__(self) -> None:
        self._next_s = float("-inf")

    def due_in_s(self, now_s: float, *, is_position_alone: bool) -> float:
        """The seconds until what has moved is to be recorded; 0 for now."""
        return max(0.0, self._next_s - now_s) if is_position_alone else 0.0

    def recorded(self, now_s: float) -> None:
        self._next_s = now_s + POSITION_INTERVAL_S
