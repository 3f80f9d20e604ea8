"""Counts the bytes of ended transactions that the sink has not taken yet.

Three sums can stop the reading: this one, the gathered bytes, and the bytes in flight to buffers. A streamed
transaction does not count here while it is open, because it spills. From its end on it counts with the bytes that its
buffer may still hold in memory: its raw bytes, up to a limit. This is pure arithmetic over the tickets of the commit
order.
"""

from __future__ import annotations

from collections import deque

from xidstream.pipeline.pg import Xid


class Backlog:
    """``held_limit_bytes``: the most that one transaction keeps in memory, however large it is."""

    def __init__(self, held_limit_bytes: int) -> None:
        self._held_limit_bytes = held_limit_bytes
        self._open: dict[Xid, int] = {}
        self._owed: deque[tuple[int, int]] = deque()
        self.n_bytes = 0

    def add_block(self, xid: Xid, n_bytes: int) -> None:
        """A block of an open transaction was sent to its buffer."""
        self._open[xid] = self._open.get(xid, 0) + n_bytes

    def forget(self, xid: Xid) -> None:
        """The transaction was rolled back or prepared: nothing of it stays in memory."""
        self._open.pop(xid, None)

    def end(self, ticket: int, xid: Xid) -> None:
        """The transaction committed under this ticket."""
        self.owe(ticket, min(self._open.pop(xid, 0), self._held_limit_bytes))

    def owe(self, ticket: int, n_bytes: int) -> None:
        """Count ``n_bytes`` until the sink holds this ticket. Tickets come in increasing order."""
        self._owed.append((ticket, n_bytes))
        self.n_bytes += n_bytes

    def done(self, ticket: int) -> None:
        """The sink holds everything up to this ticket."""
        while self._owed and self._owed[0][0] <= ticket:
            self.n_bytes -= self._owed.popleft()[1]
