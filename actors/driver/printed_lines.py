"""A standard output that keeps whole lines for whoever asks.

What the sink prints (``console``, or a user's function) is taken from the driver actor's standard output line by line
and fetched by the command line, so that it appears there without Ray's prefixes. Each thread has its own line in hand:
slots that print at once do not break into each other's.
"""

from __future__ import annotations

import collections
import io
import threading

_MAX_LINES = 10_000
"""What nobody fetched beyond that is forgotten, the oldest first."""


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
