"""Decides how long gathered messages wait before they are cut into a block.

A block has a price of its own, however small it is: a call to a buffer, a decode, a reference to Arrow bytes, a place
in the order. A trickle of transactions pays it, and is cut after ``linger_s``. In a *flood* more than ``FLOOD_BYTES``
come in that time. The cores that decode would then pay the price a hundred times a second for blocks of a few hundred
rows. So a flood waits ``FLOOD_LINGERS`` times as long, or until its block is full, or until the socket has been quiet;
the end of a burst waits no longer than a single transaction. On a busy machine blocks queue up before the sending
thread, and one more block would make the queue longer. So new messages wait until the blocks that were given to the
thread before them are sent, at most as long as in a flood.

Rows of open transactions can wait, because nobody sees them before the commit, and decoding a last block at the commit
takes some milliseconds. They wait for ``stream_linger_s``, which is long. So a block's price is paid for many rows,
also when the server sends each of 32 open transactions a few times a second. The bound on gathered bytes cuts blocks
sooner, the largest first.

This class only decides. The reader calls it with its clock and its sums. Rejected: one longer linger for all, because
every single transaction would pay for it.
"""

from __future__ import annotations

from typing import Final

FLOOD_BYTES: Final = 16 << 10
FLOOD_LINGERS: Final = 10


class Linger:
    """``linger_s`` is for whole small transactions, ``stream_linger_s`` for rows of open ones. Times are monotonic."""

    def __init__(self, *, linger_s: float, stream_linger_s: float) -> None:
        self._linger_s = linger_s
        self._stream_linger_s = stream_linger_s
        self._whole_since_s: float | None = None
        self._cut_before = 0
        self._open_since_s: float | None = None

    def whole_is_due(
        self, now_s: float, n_bytes: int, *, quiet: bool, cut_bytes: int = 0, sent_bytes: int = 0
    ) -> bool:
        """Whether the caller must now cut the ``n_bytes`` of whole transactions that wait.

        ``quiet``: nothing came for as long as the reader last waited. ``cut_bytes``: bytes that were cut so far.
        ``sent_bytes``: how many of those are sent. After True the next transactions begin to wait anew.
        """
        if not n_bytes:
            self._whole_since_s = None
            return False
        if self._whole_since_s is None:
            self._whole_since_s, self._cut_before = now_s, cut_bytes
        waited_s = now_s - self._whole_since_s
        is_flood = n_bytes >= FLOOD_BYTES and not quiet
        is_behind = sent_bytes < self._cut_before
        due = waited_s >= self._linger_s * (FLOOD_LINGERS if is_flood or is_behind else 1)
        if due:
            self._whole_since_s = None
        return due

    def open_is_due(self, now_s: float, waiting: bool) -> bool:
        """Whether the caller must now cut the rows of open transactions; ``waiting`` says that there are some."""
        if not waiting:
            self._open_since_s = None
            return False
        if self._open_since_s is None:
            self._open_since_s = now_s
        due = now_s - self._open_since_s >= self._stream_linger_s
        if due:
            self._open_since_s = None
        return due
