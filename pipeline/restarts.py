"""Whether a run whose epoch failed begins another, after which pause, and when it gives up.

An epoch that *worked* makes everything as at the beginning: the shortest pause, and all of ``GIVE_UP_AFTER_S`` ahead.
So all depends on what counts as having worked, which is more than an attempt and less than an end in order:

- A batch went into the sink. Where that was in the moment before the driver died nobody saw it; the next epoch sees it
  in where the slot and the sink are. Without that, parts that die one after the other would end a run that goes on
  after each.
- It lasted, because there may be nothing to deliver. But not for one storage fault after the other: a transaction
  larger than the disk fills it anew in every epoch, for as long as that takes, and would for ever.

Plain state over the caller's clock: what is waited for, and told, is the supervisor's.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.errors import StorageFault, XidstreamError
from xidstream.pipeline.pg import Lsn

GIVE_UP_AFTER_S: Final = 300.0
GIVE_UP_BEFORE_ANY_WORKED_S: Final = 20.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 15.0
WORKED_AFTER_S: Final = 2 * LONGEST_PAUSE_S


class Restarts:
    """Of one run; ``begin`` is called for each epoch, and ``pause_after`` for each that failed."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._failing_since_s: float | None = None
        self._any_worked = False
        self._storage_failed = False
        self._reached: dict[str, Lsn] = {}
        self._earlier_worked = False
        self.took_batch = False
        """Of this epoch: whether its sink has taken one."""

    def begin(self) -> None:
        self.took_batch = self._earlier_worked = False

    def reached(self, where: str, lsn: Lsn) -> None:
        """Where the slot, or the sink, is; 0/0 where it does not say."""
        if where in self._reached and lsn > self._reached[where]:
            self._earlier_worked = True
        if lsn or where in self._reached:
            self._reached[where] = max(lsn, self._reached.get(where, lsn))

    def pause_after(self, error: XidstreamError, now_s: float, reading_s: float | None) -> float | None:
        """Seconds to wait before the next epoch; None to give up. ``reading_s``: for how long this one has read."""
        if self._worked(error, reading_s):
            self._any_worked = True
            self._pause_s, self._failing_since_s = FIRST_PAUSE_S, None
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        # What never worked is the user's to see soon.
        limit_s = GIVE_UP_AFTER_S if self._any_worked else GIVE_UP_BEFORE_ANY_WORKED_S
        if now_s - self._failing_since_s >= limit_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s

    def _worked(self, error: XidstreamError, reading_s: float | None) -> bool:
        after_fault, self._storage_failed = self._storage_failed, isinstance(error, StorageFault)
        if self._earlier_worked or self.took_batch:
            return True
        if after_fault and self._storage_failed:
            return False
        return reading_s is not None and reading_s > WORKED_AFTER_S
