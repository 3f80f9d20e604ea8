"""The LSN up to which a survey of the catalog proves that every table's rows came through the stream.

A survey that finds a table as its snapshot found it proves that nothing happened to the table which the stream does not
say. It proves that for every commit that the survey's snapshot of the catalog sees. States are asked for by LSN, so the
proof has to be one as well: an LSN such that all commits up to it were visible to the survey.

The end of the WAL, read before that snapshot is taken, is nearly that. A transaction is missing whose COMMIT record is
written and which others do not see yet: it still flushes, or waits for a synchronous standby. If it altered a table, it
holds a lock on it until others see it (``CommitTransaction`` in ``src/backend/access/transam/xact.c`` releases locks
last). So a ``Look`` names the transactions that hold such locks, read between the two:

    position (``lsn``)  →  lock holders (``holders``)  →  catalog

- Nobody holds one: ``lsn`` is proven.
- Somebody does: he may be within his COMMIT since before ``lsn``, or at the start of a long ALTER. An earlier look is
  proven if none of its holders is one now: all have ended, and this look's catalog shows what they did. Whoever holds
  a lock now and did not then took it after that look's position, so he commits after it.
- A holder who has been one for longer than ``COMMIT_S`` is not within a COMMIT, unless the server waits for standbys.
  So an ALTER that takes an hour holds nothing up on a server without them.

Example. Look 1 is at 0/100, and nobody holds a lock: 0/100 is proven. Look 2 is at 0/200, and xid 7 holds one: nothing
new. Look 3 is at 0/300, and xid 8 holds one: 7 has ended, so 0/200 is proven. Look 4 is at 0/400, and nobody holds one:
0/400 is proven.

Plain state, one instance for each run. Rejected: to wait for all transactions that were open. Long ones, which alter
nothing, would keep every state from its readers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.pg import INVALID_LSN, Lsn

COMMIT_S: Final = 0.5
"""A COMMIT that waits for nobody takes no longer: it flushes the WAL once."""
_KEPT: Final = 100


@dataclass(frozen=True)
class Look:
    """One look at the catalog. ``lsn``: the WAL's end before it. ``holders``: the xids of transactions that held a lock
    on a table of users by which they may have altered it. ``waits_for_standby``: whether a COMMIT on this server may
    wait for a standby. ``at_s``: when it was, on a monotonic clock of one process."""

    lsn: Lsn
    holders: frozenset[int]
    waits_for_standby: bool
    at_s: float


class Proving:
    """``proven_lsn``: 0/0 before any proof. It never falls."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=_KEPT)
        """The looks with holders that nothing later has proven yet, oldest first."""
        self.proven_lsn: Lsn = INVALID_LSN

    def note(self, look: Look) -> Lsn:
        """Take in a look that found every table as it was, or after which those that were not have been ended. Returns
        what is proven by now."""
        if not look.holders:
            self._prove(look.lsn)
        else:
            for earlier in reversed(self._looks):
                is_over = earlier.holders.isdisjoint(look.holders)
                is_long = not look.waits_for_standby and look.at_s - earlier.at_s >= COMMIT_S
                if is_over or is_long:
                    self._prove(earlier.lsn)
                    break
            self._looks.append(look)
        return self.proven_lsn

    def _prove(self, lsn: Lsn) -> None:
        self.proven_lsn = max(self.proven_lsn, lsn)
        while self._looks and self._looks[0].lsn <= self.proven_lsn:
            self._looks.popleft()
