"""A standard output that keeps whole lines until somebody takes them.

A sink may print (``console``, or a user's function). The driver actor's standard output keeps these lines, and the
command line fetches them, so that they appear there without Ray's prefixes. Each thread has its own unfinished line, so
slots that print at the same time do not break into each other's lines.
"""

from __future__ import annotations

import collections
import io
import threading

_MAX_LINES = 10_000
"""Beyond this number the oldest lines that nobody fetched are dropped."""


class PrintedLines(io.TextIOBase):
    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            thread = threading.get_ident()
            *whole, self._parts[thread] = (self._parts.get(thread, "") + text).split("\n")
            self._lines.extend(whole)
        return len(text)

    def take(self) -> list[str]:
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines
