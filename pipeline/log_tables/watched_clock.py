"""How far an age by the wall clock may be trusted, so that nothing is removed because a clock was set forward.

A file has been replaced, or a commit made, at a time of day that some process read from its wall clock. Whoever
removes by age compares it with its own wall clock. But that may be set while the process runs, and be wrong when it
begins: then what was replaced a minute ago is half a day old. So a process asks here *by how much too much* an age may
be (``ahead_s``), and demands so much more of it.

Two things bound that, and both are of seconds that never jump:

- *What this process has lived through.* It looks at both clocks with each commit, and remembers each jump. What was
  stamped within the last twelve hours of its life has a stamp no lower than the lowest wall clock of these hours.
- *Before its life* it knows one time: that of the last commit that an earlier process made. The wall clock says how
  long ago that was, and of this a twelfth of the wanted age is believed. So after a longer pause nothing goes at first:
  when the process has lived for as long as the wanted age, it needs no belief any more. And where processes are short,
  the next one has the commits of this one to begin from. So removal is put off, and never for ever.

An example, with an age of twelve hours. At ten o'clock a file is replaced. At a quarter past, the clock is set forward
to 22:15. ``ahead_s`` is twelve hours from then on, so an age of 24 hours is demanded: the file goes at 10:00 by the
new clock's tomorrow, twelve hours after it was replaced. By then the jump lies more than twelve hours back, and
``ahead_s`` is 0 again.

A clock that is set back makes things look younger, so they stay for longer. What it stamps meanwhile is lower than what
was stamped before, and the same rule keeps that. What another machine's clock has stamped is not known here: by as much
as that clock is behind, the age that is demanded is shorter.

Called by ``upkeep`` and by the vacuum of the mirror. Plain Python; safe from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_JUMP_S: Final = 1.0
"""What the two clocks may differ by from one look to the next: they are read one after the other."""
_BELIEVED: Final = 12
"""One part in so many of the wanted age is believed to have passed before the process began."""
_KEPT_S: Final = 32 * 24 * 3600.0
"""For how long a jump is remembered: longer than any age that is asked for."""


def steady_s() -> float:
    """Seconds that never jump; on Linux those of a suspended machine count, too."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass
class _Stretch:
    """From ``first_s`` to ``last_s``, in steady seconds, the wall clock may have been ``offset_s`` ahead of these."""

    first_s: float
    last_s: float
    offset_s: float


class WatchedClock:
    """Begins with the process, or with what stamps and removes in it."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady_s) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = threading.Lock()
        self._began_s = steady()
        self.began_at_s = wall()
        """By the wall clock of then."""
        self._stretches = [_Stretch(self._began_s, self._began_s, self.began_at_s - self._began_s)]

    def look(self) -> tuple[float, float]:
        """Notice a jump. Steady seconds, and the wall clock."""
        with self._lock:
            now_s, wall_s = self._steady(), self._wall()
            last, offset_s = self._stretches[-1], wall_s - now_s
            looked_s, last.last_s = last.last_s, now_s
            if abs(offset_s - last.offset_s) > _JUMP_S:
                # It was some time since the last look.
                self._stretches.append(_Stretch(looked_s, now_s, offset_s))
                self._stretches = [each for each in self._stretches if now_s - each.last_s < _KEPT_S]
            return now_s, wall_s

    def ahead_s(self, age_s: float, before_s: float | None) -> float:
        """What is to be added to ``age_s`` to have a thing that is so old by the wall clock be as old as ``age_s`` at
        least; infinite where no age is enough.

        ``before_s``: the last time that is known from before this clock began, by the wall clock; None where there is
        one that is not known. ``began_at_s`` where nothing was before.
        """
        now_s, wall_s = self.look()
        since_s = now_s - max(age_s, 0.0)
        lowest_s = min(
            max(each.first_s, since_s) + each.offset_s for each in self._stretches if each.last_s >= since_s
        )
        if since_s < self._began_s:
            if before_s is None:
                return math.inf
            began_at_s = max(before_s, min(self.began_at_s, before_s + age_s / _BELIEVED))
            lowest_s = min(lowest_s, began_at_s - (self._began_s - since_s))
        found_s = wall_s - age_s - lowest_s
        return found_s if found_s > _JUMP_S else 0.0

    def is_trusted(self, age_s: float, before_s: float | None) -> bool:
        """Whether ``ahead_s`` is so small that an age by the wall clock will do."""
        return self.ahead_s(age_s, before_s) <= age_s / _BELIEVED
