"""How long a table rests whose snapshot failed: twice as long after each failure, up to a bound.

A table's failures count until its snapshot is taken. Rejected: an end of the trials. A table that cannot be read today
can be read tomorrow, and the stream does not wait for it.
"""

from __future__ import annotations


class RetryBackoff:
    """By relid. Not for several threads."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._last_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}

    def rest(self, relid: int, now_s: float) -> float:
        """Let a table rest. Returns for how many seconds."""
        last_s = self._last_s.get(relid)
        rest_s = self._first_s if last_s is None else min(2 * last_s, self._longest_s)
        self._last_s[relid] = rest_s
        self._due_s[relid] = now_s + rest_s
        return rest_s

    def wake(self, now_s: float) -> list[int]:
        """The tables whose rest is over. Each is told once."""
        due = [relid for relid, due_s in self._due_s.items() if due_s <= now_s]
        for relid in due:
            del self._due_s[relid]
        return due

    def forget(self, relid: int) -> None:
        """The table's snapshot is taken."""
        self._last_s.pop(relid, None)
        self._due_s.pop(relid, None)
