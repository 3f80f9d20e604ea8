"""When a position is recorded: at once where the journal moved it, soon where the sink did, and at most once a second
where nothing else did. What a log has taken counts for no more than the server's word, as long as it is little.

While the publication is quiet and the server writes elsewhere, it names a new position several times a second. Each one
may be confirmed, and each record is three requests to a store (a list, a read and a write of one key), for ever: at
five a second some twelve million of each a month, for a slot that has nothing to do. The server loses nothing by a
second: it keeps that much WAL for longer.

A batch that a function has got is recorded at once: what is not recorded when the run ends by an accident, the function
gets once more. A log remembers by itself what it holds, so nothing comes twice there. For it the record is what lets
the server forget WAL, and that can wait. A trickle of batches would have a record for each of them: a flushed file or
three requests, a call to the reader, and a status to the server. The record is also what gives the reader credit. So a
log that has taken much is recorded some times a second, and reading does not stop for it.

Plain state over the caller's clock.
"""

from __future__ import annotations

import enum
from typing import Final

POSITION_INTERVAL_S: Final = 1.0
LOG_INTERVAL_S: Final = 0.25
"""The longest that much of what a log holds waits for its record. What comes alone does not wait."""


class Moved(enum.Enum):
    """The cause of a change that is to be recorded."""

    POSITION = enum.auto()
    """Nothing but the server's word."""
    LITTLE = enum.auto()
    """Batches are in the sink, and nobody waits for the memory that they took."""
    SINK = enum.auto()
    """Batches are in the sink."""
    NOW = enum.auto()
    """The journal, or a park; or somebody waits for it."""


class RecordPace:
    """``remembers``: whether the sink is a log, which knows by itself what it holds."""

    def __init__(self, *, remembers: bool = False) -> None:
        self._intervals_s = {
            Moved.POSITION: POSITION_INTERVAL_S,
            Moved.LITTLE: POSITION_INTERVAL_S if remembers else 0.0,
            Moved.SINK: LOG_INTERVAL_S if remembers else 0.0,
            Moved.NOW: 0.0,
        }
        self._recorded_s = float("-inf")

    def due_in_s(self, now_s: float, moved: Moved) -> float:
        """The seconds until what has moved is to be recorded; 0 for now."""
        return max(0.0, self._recorded_s + self._intervals_s[moved] - now_s)

    def recorded(self, now_s: float) -> None:
        self._recorded_s = now_s
