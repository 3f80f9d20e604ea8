"""Messages of the stream that are not cut into blocks yet, of one transaction or of many small ones.

The cutter's own data: it appends to ``parts`` and ``n_bytes`` itself, because that is all it may spend on a row.
``parts`` are whole CopyData messages in the order received; they are joined when a block is cut, and never before.
"""

from __future__ import annotations

from typing import Any, Final

from pipeline.pg import INVALID_LSN, Lsn, Xid

HEADER_BYTES: Final = 25
"""Of XLogData: 'w', Int64 start, Int64 end, Int64 send time."""

CopyData = Any
"""bytes or memoryview of one CopyData message; whoever gathers it keeps it until its block is cut."""


def kind_of(data: CopyData) -> int:
    """The type byte of the pgoutput message in an XLogData message."""
    return int(data[HEADER_BYTES])


def lsn_of(data: CopyData) -> Lsn:
    """The start LSN of an XLogData message; 0 on some (fact 2)."""
    return Lsn(int.from_bytes(bytes(data[1:9]), "big"))


class Gathering:
    """One open transaction: streamed, promoted, or between BEGIN PREPARE and PREPARE."""

    __slots__ = ("aborted", "first_lsn", "has_blocks", "n_bytes", "origin", "parts", "streamed", "xid")

    def __init__(self, xid: Xid | None, first_lsn: Lsn, *, streamed: bool) -> None:
        self.xid = xid
        self.first_lsn = first_lsn
        self.streamed = streamed
        self.parts: list[CopyData] = []
        self.n_bytes = 0
        self.origin: str | None = None
        self.has_blocks = False
        self.aborted: list[Xid] = []  # subxids rolled back since the last cut


class PlainGathering(Gathering):
    """Small plain transactions, whole ones first, then perhaps the beginning of one more."""

    __slots__ = ("_last_commit", "_n_transactions", "n_whole_parts", "whole_bytes")

    def __init__(self) -> None:
        super().__init__(None, INVALID_LSN, streamed=False)
        self.n_whole_parts = 0
        self.whole_bytes = 0
        self._n_transactions = 0
        self._last_commit: CopyData | None = None

    def end_transaction(self, commit: CopyData) -> None:
        """With its COMMIT everything here is whole."""
        self._last_commit = commit
        self._n_transactions += 1
        self.add_whole(commit)

    def add_whole(self, data: CopyData) -> None:
        """A message that is whole by itself, or makes all before it whole."""
        self.parts.append(data)
        self.n_bytes += len(data)
        self.n_whole_parts = len(self.parts)
        self.whole_bytes = self.n_bytes

    def take_whole(self) -> tuple[list[CopyData], CopyData | None, int]:
        """The messages of whole transactions, the last COMMIT among them, and how many there are."""
        whole, self.parts = self.parts[: self.n_whole_parts], self.parts[self.n_whole_parts :]
        last, n_transactions = self._last_commit, self._n_transactions
        self.n_bytes -= self.whole_bytes
        self.n_whole_parts = self._n_transactions = self.whole_bytes = 0
        self._last_commit = None
        return whole, last, n_transactions
