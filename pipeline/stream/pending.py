"""Messages of the stream that are not cut into blocks yet, of one transaction or of many small ones.

This is the cutter's own data. The messages are in ``MessageBuffer``'s arrays. A compiled loop may append to these, too.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.protocol.message_buffer import HEADER_BYTES, MessageBuffer
from xidstream.pipeline.protocol.spares import Spares

CopyData = bytes | memoryview
"""One CopyData message. Gathering copies it."""

ORIGIN: Final = ord("O")


def kind_of(data: CopyData) -> int:
    """The type byte of the pgoutput message in an XLogData message."""
    return int(data[HEADER_BYTES])


def lsn_of(data: CopyData) -> Lsn:
    """The start LSN of an XLogData message; some messages have 0 (fact 2)."""
    return Lsn(int.from_bytes(bytes(data[1:9]), "big"))


class PendingMessages(MessageBuffer):
    """The messages of one open transaction: streamed, promoted, or between BEGIN PREPARE and PREPARE. Without an xid:
    those of many small transactions, which are whole, and perhaps the beginning of one more."""

    __slots__ = ("aborted", "first_lsn", "has_blocks", "origin", "streamed", "xid")

    def __init__(
        self, spares: Spares, xid: Xid | None = None, first_lsn: Lsn = INVALID_LSN, *, streamed: bool = False
    ) -> None:
        super().__init__(spares)
        self.xid = xid
        self.first_lsn = first_lsn
        self.streamed = streamed
        self.origin: str | None = None
        self.has_blocks = False
        self.aborted: list[Xid] = []  # subxids rolled back since the last cut

    def first_begin(self) -> bytes:
        """The first BEGIN of the small transactions. Messages that stand between transactions may come before it."""
        n = 1
        while (at := self.kinds(n).find(b"B")) < 0:
            n *= 16
        return self.message(at)
