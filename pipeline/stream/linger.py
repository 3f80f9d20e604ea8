"""How long what was gathered waits before it is cut: for company, and not for long.

A block has a price of its own, however small: a call to a buffer, a decode, a reference to Arrow bytes, a place in the
order. A trickle pays it and is handed on after ``linger_s``. In a *flood*, which is when more than ``FLOOD_BYTES``
came in that time, the price would be paid a hundred times a second for blocks of a few hundred rows, by the cores that
decode them; so a flood waits ``FLOOD_LINGERS`` times as long, or until its block is full, or until the socket has
been quiet: the end of a burst waits no longer than a single transaction. On a busy machine blocks queue up before the
hand-over, and one more would make the queue longer: so what comes waits until those that were given before it are
handed over, at most as long as in a flood.

Rows of open transactions are in no hurry: nobody sees them before the commit, where decoding a block that is left takes
some milliseconds. They wait for ``stream_linger_s``, which is long, so that a block's price is paid for many rows also
where the server sends each of 32 open transactions a few times a second. The bound on what is gathered makes blocks
sooner, of the largest first.

Decides only; the reader asks with its clock and its sums. Rejected: one longer linger for all, which every single
transaction would pay.
"""

from __future__ import annotations

from typing import Final

FLOOD_BYTES: Final = 16 << 10
FLOOD_LINGERS: Final = 10


class Linger:
    """``linger_s``: of whole small transactions; ``stream_linger_s``: of rows of open ones. Times are monotonic."""

    def __init__(self, *, linger_s: float, stream_linger_s: float) -> None:
        self._linger_s = linger_s
        self._stream_linger_s = stream_linger_s
        self._whole_since_s: float | None = None
        self._given_before = 0
        self._open_since_s: float | None = None

    def whole_is_due(
        self, now_s: float, n_bytes: int, *, quiet: bool, given: int = 0, handed: int = 0
    ) -> bool:
        """``n_bytes`` of whole transactions wait; ``quiet``: nothing came for as long as the reader last waited;
        ``given``, ``handed``: bytes that were cut, and those of them that are handed over, since the start.

        True tells the caller to cut them: the next ones begin to wait anew.
        """
        if not n_bytes:
            self._whole_since_s = None
            return False
        if self._whole_since_s is None:
            self._whole_since_s, self._given_before = now_s, given
        waited_s = now_s - self._whole_since_s
        is_flood = n_bytes >= FLOOD_BYTES and not quiet
        is_behind = handed < self._given_before
        due = waited_s >= self._linger_s * (FLOOD_LINGERS if is_flood or is_behind else 1)
        if due:
            self._whole_since_s = None
        return due

    def open_is_due(self, now_s: float, waiting: bool) -> bool:
        """``waiting``: rows of open transactions are there. True as above."""
        if not waiting:
            self._open_since_s = None
            return False
        if self._open_since_s is None:
            self._open_since_s = now_s
        due = now_s - self._open_since_s >= self._stream_linger_s
        if due:
            self._open_since_s = None
        return due
