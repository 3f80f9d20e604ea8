"""What is done next for the tables whose snapshots are wanted: which is held, which range is read, what is committed.

Each table goes ``wanted`` → ``holding`` → ``reading`` → ``committing`` and is gone from here. ``holding``: its lock and
its snapshot are being taken. ``reading``: its ranges are with the readers, or wait for one. Whatever ends a table's
snapshot before its commit (its holder is lost, the table was changed) makes the table ``resting``. It is wanted again,
from its beginning, when the caller says so. A range whose reader was lost is read again under the same snapshot.

Nothing of a table is committed before all its ranges are read, and a range counts once: what a late reader still
reports of a table that was taken anew is dropped, because its ``attempt`` is an older one.

A *repair* reads the rows of a key range alone. It is ``carrying`` between ``reading`` and ``committing``: the sink
writes the other rows, from its own log (``pipeline.changelog.carrying``). Where another range is wanted meanwhile, or
the whole table, what is in hand is given up, and the table begins anew when it is wanted the next time.

Small tables come first, so most tables are complete early. Those that need no wait for other writers come before all
others, so that one open transaction does not keep the readers idle. At most ``n_readers`` tables are held at a time:
each takes a connection, and keeps the server from cleaning up after its snapshot.

Plain state: no clock, no thread, no server. ``actors.snapshots`` executes the actions and reports what came of them.
Rejected: to plan all ranges of all tables at the start. The snapshots of the last tables would be hours old.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xidstream.pipeline.account.snapshots import TableState
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.key_filter import BoundComparison, Repair
from xidstream.pipeline.snapshot.tables import CtidRange, PublishedSource, RangeTask

_ATTEMPTS = itertools.count(1)
"""Unique in the process: what a thread still reports of an earlier course is known by its number."""


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """``wait_for_writers``: whether transactions may be open that wrote to the table before it was published, or while
    it was parked. ``repair``: None where all rows are to be read."""

    source: PublishedSource
    wait_for_writers: bool
    repair: Repair | None = None


@dataclass(frozen=True)
class TableHeld:
    """``source``: as it was found under the lock. ``ranges``: all its pages. ``only``: the rows that are read of them,
    for a repair."""

    relid: int
    attempt: int
    source: PublishedSource
    snapshot_name: str
    bounds: SnapshotBounds
    ranges: tuple[CtidRange, ...]
    only: tuple[BoundComparison, ...] = ()


@dataclass(frozen=True)
class RangeRead:
    """``files``: what the reader wrote and made durable; opaque here."""

    relid: int
    attempt: int
    number: int
    files: tuple[Any, ...]
    n_rows: int


@dataclass(frozen=True)
class ReaderLost:
    """A reader ended, or failed, with a range in hand."""

    relid: int
    attempt: int
    number: int


@dataclass(frozen=True)
class Carried:
    """``files``: what the sink wrote, of rows that were not read; opaque here."""

    relid: int
    attempt: int
    files: tuple[Any, ...]
    n_rows: int


@dataclass(frozen=True)
class SnapshotCommitted:
    relid: int
    attempt: int


@dataclass(frozen=True)
class Failed:
    """The table's snapshot in hand is of no further use."""

    relid: int
    attempt: int


@dataclass(frozen=True)
class Retry:
    """A resting table has rested enough."""

    relid: int


@dataclass(frozen=True)
class Dropped:
    """The table's snapshot is not wanted any more."""

    relid: int


Event = Wanted | TableHeld | RangeRead | ReaderLost | Carried | SnapshotCommitted | Failed | Retry | Dropped


# -- actions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hold:
    source: PublishedSource
    attempt: int
    wait_for_writers: bool
    repair: Repair | None = None


@dataclass(frozen=True)
class Read:
    task: RangeTask
    bounds: SnapshotBounds
    attempt: int


@dataclass(frozen=True)
class Carry:
    """Write the rows that were not read. ``only``: those that were. ``first_number``: no range has it, nor a higher
    one."""

    source: PublishedSource
    bounds: SnapshotBounds
    attempt: int
    repair: Repair
    only: tuple[BoundComparison, ...]
    first_number: int


@dataclass(frozen=True)
class CommitSnapshot:
    """``n_rows`` were read, and ``n_carried`` carried. A table with a ``repair`` is not held any more."""

    source: PublishedSource
    bounds: SnapshotBounds
    attempt: int
    files: tuple[Any, ...]
    n_rows: int
    n_carried: int = 0
    repair: Repair | None = None


@dataclass(frozen=True)
class Release:
    """Let go of the table's lock and snapshot. ``discarded``: the attempt whose files nobody will ever name, if any."""

    relid: int
    discarded: int | None = None


Action = Hold | Read | Carry | CommitSnapshot | Release


@dataclass
class TableCopy:
    """One table. ``n_bytes`` are of the server's files, ``n_rows`` and ``n_bytes_read`` of the ranges that are read. Of
    a repair nobody knows how many bytes these are: both are 0."""

    source: PublishedSource
    wait_for_writers: bool
    repair: Repair | None = None
    state: TableState = TableState.WANTED
    attempt: int = 0
    held: TableHeld | None = None
    waiting: deque[CtidRange] = field(default_factory=deque)
    reading: dict[int, CtidRange] = field(default_factory=dict)
    files: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    n_rows: int = 0
    n_bytes_read: int = 0
    n_ranges_again: int = 0
    """How many ranges had to be read twice since the table was wanted."""

    @property
    def relid(self) -> int:
        return self.source.relation.relid

    @property
    def n_ranges(self) -> int:
        return 0 if self.held is None else len(self.held.ranges)

    @property
    def n_bytes(self) -> int:
        return 0 if self.repair is not None else self.source.n_bytes


class CopySchedule:
    """``tables``: by relid; read it, and change it by ``handle`` alone."""

    def __init__(self, n_readers: int) -> None:
        self._n_readers = n_readers
        self.tables: dict[int, TableCopy] = {}

    def handle(self, event: Event) -> list[Action]:
        """Take in what happened. Returns what to do now. Raises UsageError for what cannot have happened."""
        actions = list(self._take(event))
        actions += self._reads()
        actions += self._holds()
        return actions

    def is_in_hand(self, relid: int, attempt: int) -> bool:
        """Whether this attempt at the table is the one that counts."""
        table = self.tables.get(relid)
        return table is not None and table.attempt == attempt

    # -- events ----------------------------------------------------------------------------------------

    def _take(self, event: Event) -> Iterator[Action]:
        if isinstance(event, Wanted):
            relid = event.source.relation.relid
            known = self.tables.get(relid)
            if known is None:
                self.tables[relid] = TableCopy(event.source, event.wait_for_writers, event.repair)
            elif known.state in (TableState.WANTED, TableState.RESTING):
                # The table may have changed since it was surveyed, which is why it rests.
                known.source, known.wait_for_writers = event.source, event.wait_for_writers
                known.repair = event.repair
            elif known.repair not in (None, event.repair) and known.state is not TableState.COMMITTING:
                # It is held anew at the next look: a release must not meet the hold that comes after it.
                yield Release(relid, known.attempt)
                del self.tables[relid]
            return
        table = self.tables.get(event.relid)
        if isinstance(event, Dropped):
            if table is not None:
                del self.tables[event.relid]
                if table.state is not TableState.WANTED:
                    # What is being committed may come to be named.
                    is_over = table.state is not TableState.COMMITTING and table.attempt
                    yield Release(event.relid, table.attempt if is_over else None)
            return
        if isinstance(event, Retry):
            if table is not None and table.state is TableState.RESTING:
                table.state = TableState.WANTED
            return
        if table is None or not self.is_in_hand(event.relid, event.attempt):
            return  # of a table that was given up, or is taken anew
        if isinstance(event, TableHeld):
            yield from self._held(table, event)
        elif isinstance(event, RangeRead):
            yield from self._range_read(table, event)
        elif isinstance(event, ReaderLost):
            self._demand(table, TableState.READING)
            table.waiting.appendleft(table.reading.pop(event.number))
            table.n_ranges_again += 1
        elif isinstance(event, Carried):
            self._demand(table, TableState.CARRYING)
            yield self._commit(table, event)
        elif isinstance(event, SnapshotCommitted):
            self._demand(table, TableState.COMMITTING)
            del self.tables[event.relid]
            yield Release(event.relid)
        else:
            table.n_ranges_again += len(table.files) + len(table.reading)
            _forget(table)
            table.state, table.attempt = TableState.RESTING, 0
            yield Release(event.relid, event.attempt)

    def _held(self, table: TableCopy, event: TableHeld) -> Iterator[Action]:
        self._demand(table, TableState.HOLDING)
        table.source, table.held = event.source, event
        table.waiting.extend(event.ranges)
        table.state = TableState.READING
        if not event.ranges:
            yield self._all_read(table)

    def _range_read(self, table: TableCopy, event: RangeRead) -> Iterator[Action]:
        self._demand(table, TableState.READING)
        done = table.reading.pop(event.number)
        table.files[event.number] = event.files
        table.n_rows += event.n_rows
        table.n_bytes_read += done.n_bytes if table.repair is None else 0
        if not table.waiting and not table.reading:
            yield self._all_read(table)

    def _all_read(self, table: TableCopy) -> CommitSnapshot | Carry:
        if table.repair is None:
            return self._commit(table)
        assert table.held is not None
        table.state, held = TableState.CARRYING, table.held
        first_number = max((range_.number for range_ in held.ranges), default=-1) + 1
        return Carry(table.source, held.bounds, table.attempt, table.repair, held.only, first_number)

    def _commit(self, table: TableCopy, carried: Carried | None = None) -> CommitSnapshot:
        assert table.held is not None
        table.state = TableState.COMMITTING
        files = tuple(file for number in sorted(table.files) for file in table.files[number])
        n_carried = 0
        if carried is not None:
            files, n_carried = (*files, *carried.files), carried.n_rows
        bounds = table.held.bounds
        return CommitSnapshot(
            table.source, bounds, table.attempt, files, table.n_rows, n_carried, table.repair
        )

    def _demand(self, table: TableCopy, state: TableState) -> None:
        if table.state is not state:
            raise UsageError(
                f"snapshot of table {table.source.name}: it is {table.state.value}, attempt {table.attempt}, with "
                f"{len(table.files)} of {table.n_ranges} ranges read; {state.value} was expected"
            )

    # -- what is next ----------------------------------------------------------------------------------

    def _of(self, state: TableState) -> list[TableCopy]:
        return [table for table in self.tables.values() if table.state is state]

    def _reads(self) -> Iterator[Action]:
        tables = self._of(TableState.READING)
        idle = self._n_readers - sum(len(table.reading) for table in tables)
        for table in tables:
            assert table.held is not None
            while table.waiting and idle > 0:
                idle -= 1
                range_ = table.waiting.popleft()
                table.reading[range_.number] = range_
                task = RangeTask(table.source, table.held.snapshot_name, range_, table.held.only)
                yield Read(task, table.held.bounds, table.attempt)

    def _holds(self) -> Iterator[Action]:
        holding, reading = self._of(TableState.HOLDING), self._of(TableState.READING)
        # Rows that wait for the sink count, too: they take place on a disk.
        with_sink = self._of(TableState.CARRYING) + self._of(TableState.COMMITTING)
        room = self._n_readers - len(holding) - len(reading) - len(with_sink)
        queued = sum(len(table.waiting) + len(table.reading) for table in reading) + len(holding)
        wanted = self._of(TableState.WANTED)
        wanted.sort(key=lambda table: (table.wait_for_writers, table.n_bytes, table.relid))
        for table in wanted[: max(0, min(room, self._n_readers - queued))]:
            table.state = TableState.HOLDING
            table.attempt = next(_ATTEMPTS)
            yield Hold(table.source, table.attempt, table.wait_for_writers, table.repair)


def _forget(table: TableCopy) -> None:
    table.held = None
    table.waiting.clear()
    table.reading.clear()
    table.files.clear()
    table.n_rows = table.n_bytes_read = 0
