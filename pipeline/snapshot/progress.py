"""How far the snapshots of a run are, for people and monitoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xidstream.pipeline.snapshot.course import TableCourse


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
    kept of WAL some seconds ago; None before anybody has asked."""

    tables: tuple[TableProgress, ...]
    n_finished: int
    n_rows_finished: int
    n_bytes_finished: int
    held_wal_bytes: int | None

    @property
    def n_bytes(self) -> int:
        return self.n_bytes_finished + sum(table.n_bytes for table in self.tables)

    @property
    def n_bytes_read(self) -> int:
        return self.n_bytes_finished + sum(table.n_bytes_read for table in self.tables)

    @property
    def n_rows(self) -> int:
        return self.n_rows_finished + sum(table.n_rows for table in self.tables)


def table_progress(course: TableCourse) -> TableProgress:
    return TableProgress(
        course.source.name,
        course.state.value,
        course.n_ranges,
        len(course.files),
        course.n_rows,
        course.source.n_bytes,
        course.n_bytes_read,
        course.n_ranges_again,
    )


def progress_of(
    tables: Sequence[TableCourse],
    n_finished: int,
    n_rows_finished: int,
    n_bytes_finished: int,
    held_wal_bytes: int | None,
) -> SnapshotProgress:
    found = tuple(map(table_progress, tables))
    return SnapshotProgress(found, n_finished, n_rows_finished, n_bytes_finished, held_wal_bytes)
