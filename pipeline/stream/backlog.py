"""How many bytes of ended transactions the sink has not taken yet.

One of the three sums that stop the reading (beside what is gathered, and what is in flight to buffers). A
streamed transaction counts as its raw bytes while it is open for nothing here: it spills. From its end on it counts
as much as its buffer may still hold in memory. Pure arithmetic over the tickets of the commit order.
"""

from __future__ import annotations

from collections import deque

from xidstream.pipeline.pg import Xid


class Backlog:
    """``held_limit_bytes``: what one transaction keeps in memory at most, however large it is."""

    def __init__(self, held_limit_bytes: int) -> None:
        self._held_limit_bytes = held_limit_bytes
        self._open: dict[Xid, int] = {}
        self._owed: deque[tuple[int, int]] = deque()
        self.n_bytes = 0

    def add_block(self, xid: Xid, n_bytes: int) -> None:
        """A block of an open transaction was handed on."""
        self._open[xid] = self._open.get(xid, 0) + n_bytes

    def forget(self, xid: Xid) -> None:
        """It was rolled back, or prepared: nothing of it stays in memory."""
        self._open.pop(xid, None)

    def end(self, ticket: int, xid: Xid) -> None:
        """It committed, under this ticket."""
        self.owe(ticket, min(self._open.pop(xid, 0), self._held_limit_bytes))

    def owe(self, ticket: int, n_bytes: int) -> None:
        """Tickets come in increasing order."""
        self._owed.append((ticket, n_bytes))
        self.n_bytes += n_bytes

    def done(self, ticket: int) -> None:
        """The sink holds everything up to this ticket."""
        while self._owed and self._owed[0][0] <= ticket:
            self.n_bytes -= self._owed.popleft()[1]
