"""Rates of counts that only grow, over the last seconds. The clock is the caller's."""

from __future__ import annotations

from collections import deque


class Window:
    """``seconds``: how far back a rate looks, if there are samples that old."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, now_s: float, *counts: int) -> None:
        """A sample. If a count fell, somebody counts anew, and what was before says nothing."""
        if self._samples and any(new < old for new, old in zip(counts, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now_s, counts))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= self._seconds:
            self._samples.popleft()

    @property
    def per_s(self) -> tuple[float, ...] | None:
        """The rate of each count. None: not known yet."""
        if not self._samples:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        if last_s <= first_s:
            return None
        return tuple((b - a) / (last_s - first_s) for a, b in zip(first, last, strict=True))
