"""The progress of a run's snapshots, made from the courses of its tables.

Bytes count when a range is read, so a rate over a few seconds would jump. It is one of the last minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from xidstream.pipeline.account.snapshots import SnapshotProgress, TableProgress
from xidstream.pipeline.initial_copy.copy_schedule import TableCopy


@dataclass(frozen=True)
class Sums:
    """Sums over tables that were taken. ``n_bytes`` counts the server's files."""

    n_tables: int = 0
    n_rows: int = 0
    n_bytes: int = 0

    def plus(self, n_tables: int, n_rows: int, n_bytes: int) -> Sums:
        return Sums(self.n_tables + n_tables, self.n_rows + n_rows, self.n_bytes + n_bytes)

    def less(self, other: Sums) -> Sums:
        return self.plus(-other.n_tables, -other.n_rows, -other.n_bytes)


class ReadingRate:
    """The rate of the last minute, from what one thread notes. ``bytes_per_s`` may be read by others."""

    _WINDOW_S = 60.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self.bytes_per_s: float | None = None

    def note(self, now_s: float, n_bytes_read: int) -> None:
        """``n_bytes_read`` so far. It falls where a table is read again: the rate begins anew there."""
        samples = self._samples
        if samples and n_bytes_read < samples[-1][1]:
            samples.clear()
        samples.append((now_s, n_bytes_read))
        while len(samples) > 2 and samples[1][0] <= now_s - self._WINDOW_S:
            samples.popleft()
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        self.bytes_per_s = (last - first) / (last_s - first_s) if last_s > first_s else None


def table_progress(course: TableCopy) -> TableProgress:
    return TableProgress(
        course.source.name,
        course.state.value,
        course.n_ranges,
        len(course.files),
        course.n_rows,
        course.n_bytes,
        course.n_bytes_read,
        course.n_ranges_again,
    )


def progress_of(
    tables: Sequence[TableCopy], finished: Sums, held_wal_bytes: int | None, bytes_per_s: float | None
) -> SnapshotProgress:
    return SnapshotProgress(
        tuple(map(table_progress, tables)),
        finished.n_tables,
        finished.n_rows,
        finished.n_bytes,
        held_wal_bytes,
        bytes_per_s,
    )
