"""Counts what ended transactions take in memory that the sink has not taken yet.

Three sums can stop the reading: this one, the gathered bytes, and the bytes in flight to buffers. A streamed
transaction does not count here while it is open, because it spills. From its end on it counts with the bytes that its
buffer may still hold in memory: its raw bytes, up to a limit.

A unit of the commit order takes memory beside its rows (``UNIT_BYTES``), and counts with it. The sequencer joins small
units where there are many. So beyond ``SINGLE_UNITS`` each counts with ``JOINED_UNIT_BYTES``. Rows take more as Arrow
than as they were sent where many columns are null, and some units cannot be joined. So the sequencer says with each
answer what all that waits takes (``measured``). Where that is more than was counted here, all counts for as many times
more.

This is arithmetic over the tickets of the commit order; what an open transaction has sent stands in its record
(``stream.ledger``). Rejected: the sequencer's figure
alone, because it does not know what is on its way, and says nothing while nothing is sent.
"""

from __future__ import annotations

from array import array

from xidstream.pipeline.exchange import JOINED_UNIT_BYTES, SINGLE_UNITS, UNIT_BYTES

_TRIM_TICKETS = 4096


class Backlog:
    """``held_limit_bytes``: the most that one transaction keeps in memory, however large it is. One thread calls it;
    others may read ``n_bytes``."""

    def __init__(
        self, held_limit_bytes: int, *, unit_bytes: int = UNIT_BYTES, joined_bytes: int = JOINED_UNIT_BYTES
    ) -> None:
        self._held_limit_bytes = held_limit_bytes
        self._unit_bytes = unit_bytes
        self._joined_bytes = joined_bytes
        self._owed = array("q")
        """The bytes of each unit by ticket, from ``_base`` on; -1 where nothing is owed."""
        self._base = 0
        """The ticket of the first element of ``_owed``."""
        self._n_done = 0
        """How many elements at the head of ``_owed`` are done and not trimmed yet."""
        self._raw_bytes = 0
        """The sum of what is owed."""
        self._n_units = 0
        """How many units are owed."""
        self._factor = 1.0
        """How many times more than counted the sequencer has measured; 1 at least."""

    @property
    def n_bytes(self) -> int:
        return int(self._counted_bytes * self._factor)

    @property
    def is_more_than_counted(self) -> bool:
        """Whether all counts for more, as ``measured`` has said. It may be less by now."""
        return self._factor > 1.0

    @property
    def _counted_bytes(self) -> int:
        n_single = min(self._n_units, SINGLE_UNITS)
        n_joined = self._n_units - n_single
        return self._raw_bytes + self._unit_bytes * n_single + self._joined_bytes * n_joined

    def end(self, ticket: int, n_bytes: int) -> None:
        """A transaction of ``n_bytes`` raw bytes, which had blocks of its own, committed under this ticket."""
        self.owe(ticket, min(n_bytes, self._held_limit_bytes))

    def owe(self, ticket: int, n_bytes: int) -> None:
        """Count a unit of ``n_bytes`` until the sink holds this ticket. Tickets come in increasing order."""
        self._owed.extend([-1] * (ticket - self._base - len(self._owed)))
        self._owed.append(n_bytes)
        self._raw_bytes += n_bytes
        self._n_units += 1

    def done(self, ticket: int) -> None:
        """The sink holds everything up to this ticket."""
        n_done = max(self._n_done, min(ticket + 1 - self._base, len(self._owed)))
        for n_bytes in self._owed[self._n_done : n_done]:
            if n_bytes >= 0:
                self._raw_bytes -= n_bytes
                self._n_units -= 1
        self._n_done = n_done
        if n_done >= _TRIM_TICKETS or n_done == len(self._owed):
            del self._owed[:n_done]
            self._base, self._n_done = self._base + n_done, 0

    def measured(self, n_bytes: int) -> None:
        """Note how much all that waits takes, as the sequencer has it."""
        counted_bytes = self._counted_bytes
        self._factor = max(1.0, n_bytes / counted_bytes) if counted_bytes else 1.0
