"""The snapshots' part of a run's account: how far each table is.

Bytes are of the server's files. ``initial_copy.progress`` makes these values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TableState(enum.Enum):
    """The states of a table whose snapshot is wanted, in this order. ``initial_copy.copy_schedule`` moves them."""

    WANTED = "wanted"
    HOLDING = "holding"
    READING = "reading"
    CARRYING = "carrying"
    COMMITTING = "committing"
    RESTING = "resting"


@dataclass(frozen=True)
class TableProgress:
    """``n_bytes`` is about what the server has of the table, ``n_bytes_read`` the part of it that is read.
    ``n_ranges`` is 0 before the table is held."""

    table: str
    state: str
    n_ranges: int
    n_ranges_read: int
    n_rows: int
    n_bytes: int
    n_bytes_read: int
    n_ranges_again: int


@dataclass(frozen=True)
class SnapshotProgress:
    """``tables``: those in hand and those that wait. ``n_finished``: by this run. ``held_wal_bytes``: what the slot
    kept of WAL some seconds ago; None before anybody has asked. ``bytes_per_s``: None where it is not known yet."""

    tables: tuple[TableProgress, ...]
    n_finished: int
    n_rows_finished: int
    n_bytes_finished: int
    held_wal_bytes: int | None = None
    bytes_per_s: float | None = None

    @property
    def n_bytes(self) -> int:
        return self.n_bytes_finished + sum(table.n_bytes for table in self.tables)

    @property
    def n_bytes_read(self) -> int:
        return self.n_bytes_finished + sum(table.n_bytes_read for table in self.tables)

    @property
    def n_rows(self) -> int:
        return self.n_rows_finished + sum(table.n_rows for table in self.tables)

    @property
    def seconds_left(self) -> float | None:
        """At the present rate, of the tables that are known; None where nothing is read, or nothing is left."""
        return (
            (self.n_bytes - self.n_bytes_read) / self.bytes_per_s
            if self.tables and self.bytes_per_s
            else None
        )
