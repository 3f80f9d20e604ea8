"""When committed transactions are written to the journal: where they wait for the sink too long, or are too many.

While the sink keeps up nothing is due. Once the journal has something, what comes after it is written when it has
waited as long, or when the server keeps much WAL for it: 5 s of a load may be hundreds of megabytes. At the end of a
run all that is ready is due, because nobody is going to release it. Where there is no sink nothing is waited for but a
moment, which gathers small transactions in one file, and longer where one file follows the other.

Sums and a clock's readings go in, seconds come out: no server, no thread, no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GATHER_S: Final = 0.2
"""Without a sink: a file costs two flushes of the disk, some 10 ms. A transaction is safe in the slot meanwhile."""

PACE_S: Final = 1.0
"""Without a sink, between the beginnings of two files: a store charges for each, and for a record of each."""

BEHIND_WAL_BYTES: Final = 16 << 20
"""After a journal that has begun. A fourth of what the server is to keep at most: it goes on while we write."""


@dataclass(frozen=True)
class JournalPolicy:
    """The settings; ``max_bytes`` of 0: there is no journal."""

    after_bytes: int
    after_s: float
    max_bytes: int
    has_sink: bool = True
    most_rows: int = 1000
    """The most rows of a unit that is joined of small ones where a file takes in others."""

    def is_full(self, journal_bytes: int) -> bool:
        return journal_bytes >= self.max_bytes

    def due_in_s(
        self,
        now_s: float,
        oldest_ready_s: float | None,
        waiting_bytes: int,
        wal_bytes: int,
        journal_bytes: int,
        *,
        is_ending: bool,
        last_file_s: float | None = None,
    ) -> float | None:
        """The seconds until a file is due, 0 for now; None if nothing will be without a change.

        ``oldest_ready_s``: since when the first unit waits, None if none does; ``waiting_bytes``: of all that wait, in
        memory; ``wal_bytes``: of WAL, from what is confirmed to the last of them; ``journal_bytes``: of the journal in
        the storage; ``last_file_s``: when the last file was begun.
        """
        if oldest_ready_s is None or self.is_full(journal_bytes):
            return None
        is_behind = bool(journal_bytes) and wal_bytes > BEHIND_WAL_BYTES
        if is_ending or is_behind or waiting_bytes > self.after_bytes or self.after_bytes == 0:
            return 0.0
        if self.has_sink:
            due_s = oldest_ready_s + self.after_s
        else:
            last_s = float("-inf") if last_file_s is None else last_file_s
            due_s = max(oldest_ready_s + min(self.after_s, GATHER_S), last_s + min(self.after_s, PACE_S))
        return max(0.0, due_s - now_s)
