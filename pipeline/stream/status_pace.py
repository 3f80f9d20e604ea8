"""When the server is told our position: at once where it has changed, and otherwise at a bounded rate.

The server is told after ``interval_s`` without a word, when a new position may be confirmed, and when it asks. It
asks seldom, but for one case: in a fast shutdown it waits for our position to reach its end, and asks again as soon
as it is answered. While the sink was stalled we answered 3,000 times a second, which kept both sides busy with
nothing. So an answer that says nothing new waits until ``ANSWER_INTERVAL_S`` after the last status. Nobody waits for
it: the server gives up on a silent reader only after ``wal_sender_timeout`` (60 s). A position that has changed, which
does end the shutdown, goes out at once.

An example with an ``interval_s`` of 10 and an ``ANSWER_INTERVAL_S`` of 0.1. A status went out at second 0. At second 1
a position changes, and a status goes out at once. The server asks at 1.05, and is answered at 1.1. If nothing else
happens, the next status goes out at 11.1.

Decides only. The reading thread calls everything but ``changed``, which may come from any thread: it sets a mark that
only ``sending`` clears, before the position is read.
"""

from __future__ import annotations

from typing import Final

ANSWER_INTERVAL_S: Final = 0.1
"""Long against a round trip, and short against whatever a person or the server waits for."""


class StatusPace:
    """``interval_s``: the longest silence. Times are monotonic."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = now_s
        """When a status is due though nothing is new."""
        self._next_answer_s = now_s
        """When an answer that says nothing new may go out."""
        self._is_changed = False
        """Whether a position may be confirmed that the server does not know."""
        self._is_asked = False
        """Whether the server waits for an answer."""

    def changed(self) -> None:
        """There is a new position to confirm."""
        self._is_changed = True

    def asked(self) -> None:
        """The server wants an answer."""
        self._is_asked = True

    def is_due(self, now_s: float) -> bool:
        return self._is_changed or now_s >= (self._next_answer_s if self._is_asked else self._next_s)

    def sending(self) -> None:
        """The position is read next: what changes from here on needs another status."""
        self._is_changed = False

    def sent(self, now_s: float, *, taken: bool) -> None:
        """``taken``: False where the server still has not taken an earlier status, and this one was dropped."""
        if not taken:
            self._is_changed = True
        self._is_asked = False
        self._next_s = now_s + self._interval_s
        self._next_answer_s = now_s + ANSWER_INTERVAL_S
