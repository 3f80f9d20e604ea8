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

Small tables are held, read and committed *together*, some at a time: one session of the holder, one snapshot, one
transaction of one reader, one commit of their lines. What each costs by itself is more than its rows do. All of a group
are locked until its last row is read, so a group is small, in tables and in bytes, and it waits for nobody: what is
locked, has grown, or fails by itself, is left out (``LeftOut``, ``Failed``), and taken alone from then on, where
waiting and errors are a table's own. Each table of a group has its own state and its own attempt. A group is no
more than the actions of one kind that are due for its tables at the same moment (``Together``), so a table may leave it
at any time.

Small tables come first, so most tables are complete early. Those that need no wait for other writers come before all
others, so that one open transaction does not keep the readers idle. At most ``n_readers`` tables or groups are in hand
at a time: each takes a connection, and keeps the server from cleaning up after its snapshot.

Plain state: no clock, no thread, no server. ``actors.snapshots`` executes the actions and reports what came of them.
Rejected: to plan all ranges of all tables at the start. The snapshots of the last tables would be hours old.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from xidstream.pipeline.account.snapshots import TableState
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.initial_copy.readers import bytes_per_s_of_each
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.key_filter import BoundComparison, Repair
from xidstream.pipeline.snapshot.tables import CtidRange, PublishedSource, RangeTask

MOST_TOGETHER: Final = 16
"""Tables of a group. Nearly all that a group saves is saved by then, and its locks are held for less than a second."""
SMALL_BYTES: Final = 512 << 10
"""In the server's files. A reader reads so much in a few milliseconds, and a table costs some ten without its rows."""
_ATTEMPTS = itertools.count(1)
"""Unique in the process: what a thread still reports of an earlier course is known by its number."""
_GROUPS = itertools.count(1)


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
class LeftOut:
    """The table is not held with the others of its group, and nothing of it is kept."""

    relid: int
    attempt: int


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
    """The table's snapshot in hand is of no further use. ``is_own``: whether it may have been the table's own fault. If
    not, it is taken with others again."""

    relid: int
    attempt: int
    is_own: bool = True


@dataclass(frozen=True)
class Retry:
    """A resting table has rested enough."""

    relid: int


@dataclass(frozen=True)
class Dropped:
    """The table's snapshot is not wanted any more."""

    relid: int


OneEvent = (
    Wanted
    | TableHeld
    | LeftOut
    | RangeRead
    | ReaderLost
    | Carried
    | SnapshotCommitted
    | Failed
    | Retry
    | Dropped
)


@dataclass(frozen=True)
class Several:
    """Events of several tables at once: what is next is asked after all of them."""

    events: tuple[OneEvent, ...]


Event = OneEvent | Several


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


@dataclass(frozen=True)
class Together:
    """For several tables of one group: all Hold, all Read, or all CommitSnapshot. Those to read have one snapshot."""

    actions: tuple[Hold, ...] | tuple[Read, ...] | tuple[CommitSnapshot, ...]


Action = Hold | Read | Carry | CommitSnapshot | Release | Together


@dataclass
class TableCopy:
    """One table. ``n_bytes`` are of the server's files, ``n_rows`` and ``n_bytes_read`` of the ranges that are read. Of
    a repair nobody knows how many bytes these are: both are 0."""

    source: PublishedSource
    wait_for_writers: bool
    repair: Repair | None = None
    state: TableState = TableState.WANTED
    attempt: int = 0
    group: int = 0
    """Tables that are in hand together have the same; 0 for one that is alone."""
    is_alone: bool = False
    """Whether it is to be taken alone: in a group it was left out, or failed."""
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
    """``tables``: by relid; read it, and change it by ``handle`` alone. ``bytes_per_s``: what all readers may read; 0
    for no limit. No group takes its reader longer than a second then."""

    def __init__(self, n_readers: int, bytes_per_s: int = 0) -> None:
        self._n_readers = n_readers
        self._group_bytes = bytes_per_s_of_each(bytes_per_s, n_readers) or MOST_TOGETHER * SMALL_BYTES
        self.tables: dict[int, TableCopy] = {}

    def handle(self, event: Event) -> list[Action]:
        """Take in what happened. Returns what to do now. Raises UsageError for what cannot have happened."""
        events = event.events if isinstance(event, Several) else (event,)
        actions = [action for each in events for action in self._take(each)]
        actions += self._reads()
        actions += self._holds()
        return self._together(actions)

    def is_in_hand(self, relid: int, attempt: int) -> bool:
        """Whether this attempt at the table is the one that counts."""
        table = self.tables.get(relid)
        return table is not None and table.attempt == attempt

    # -- events ----------------------------------------------------------------------------------------

    def _take(self, event: OneEvent) -> Iterator[Action]:
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
        elif isinstance(event, LeftOut):
            self._demand(table, TableState.HOLDING)
            table.state, table.attempt, table.group, table.is_alone = TableState.WANTED, 0, 0, True
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
            del self.tables[event.relid]  # it was let go of before it was committed
        elif isinstance(event, Failed):
            table.n_ranges_again += len(table.files) + len(table.reading)
            _forget(table)
            table.is_alone |= event.is_own and table.group > 0
            table.state, table.attempt, table.group = TableState.RESTING, 0, 0
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

    def _reads(self) -> Iterator[Read]:
        units = _units(self._of(TableState.READING))
        idle = self._n_readers - sum(map(_n_reading, units))
        for unit in units:
            if unit[0].group:
                # One reader reads all of a group.
                if idle > 0 and not _n_reading(unit) and any(table.waiting for table in unit):
                    idle -= 1
                    for table in unit:
                        while table.waiting:
                            yield self._read(table)
                continue
            (table,) = unit
            while table.waiting and idle > 0:
                idle -= 1
                yield self._read(table)

    def _read(self, table: TableCopy) -> Read:
        assert table.held is not None
        range_ = table.waiting.popleft()
        table.reading[range_.number] = range_
        task = RangeTask(table.source, table.held.snapshot_name, range_, table.held.only)
        return Read(task, table.held.bounds, table.attempt)

    def _holds(self) -> Iterator[Hold]:
        holding, reading = _units(self._of(TableState.HOLDING)), _units(self._of(TableState.READING))
        # Rows that wait for the sink count, too: they take place on a disk.
        not_in_hand = (TableState.WANTED, TableState.RESTING)
        in_hand = _units([table for table in self.tables.values() if table.state not in not_in_hand])
        queued = len(holding) + sum(map(_n_queued, reading))
        room = min(self._n_readers - len(in_hand), self._n_readers - queued)
        wanted = self._of(TableState.WANTED)
        wanted.sort(key=lambda table: (table.wait_for_writers, table.n_bytes, table.relid))
        while wanted and room > 0:
            unit = self._next_unit(wanted, room)
            group = next(_GROUPS) if len(unit) > 1 else 0
            for table in unit:
                wanted.remove(table)
                table.state, table.group, table.attempt = TableState.HOLDING, group, next(_ATTEMPTS)
                yield Hold(table.source, table.attempt, table.wait_for_writers, table.repair)
            room -= 1

    def _next_unit(self, wanted: list[TableCopy], room: int) -> list[TableCopy]:
        """The table that comes next, and those that are held with it. Where few are wanted, the readers share them."""
        first = wanted[0]
        unit, n_bytes = [first], first.n_bytes
        if not self._is_small(first):
            return unit
        small = [table for table in wanted if self._is_small(table)]
        for table in small[1 : min(MOST_TOGETHER, -(-len(small) // room))]:
            n_bytes += table.n_bytes
            if n_bytes > self._group_bytes:
                break
            unit.append(table)
        return unit

    def _is_small(self, table: TableCopy) -> bool:
        """Whether it may be held with others. What waits for writers, or is many tables, waits for itself alone."""
        may_wait = table.wait_for_writers or table.repair is not None or table.is_alone
        return not may_wait and len(table.source.leaves) == 1 and table.n_bytes <= SMALL_BYTES

    def _together(self, actions: list[Action]) -> list[Action]:
        """Actions, with those of one kind and group as one."""
        found: dict[object, list[Any]] = {}
        for action in actions:
            group = 0
            if isinstance(action, Hold | Read | CommitSnapshot):
                source = action.task.source if isinstance(action, Read) else action.source
                table = self.tables.get(source.relation.relid)
                group = 0 if table is None else table.group
            found.setdefault((type(action), group) if group else id(action), []).append(action)
        return [each[0] if len(each) == 1 else Together(tuple(each)) for each in found.values()]


def _units(tables: list[TableCopy]) -> list[list[TableCopy]]:
    """Groups, and tables that are alone."""
    found: dict[tuple[int, int], list[TableCopy]] = {}
    for table in tables:
        found.setdefault((table.group, 0 if table.group else table.relid), []).append(table)
    return list(found.values())


def _n_reading(unit: list[TableCopy]) -> int:
    """How many readers are busy with it."""
    n_ranges = sum(len(table.reading) for table in unit)
    return min(n_ranges, 1) if unit[0].group else n_ranges


def _n_queued(unit: list[TableCopy]) -> int:
    """How many readers it is enough for."""
    return 1 if unit[0].group else len(unit[0].waiting) + len(unit[0].reading)


def _forget(table: TableCopy) -> None:
    table.held = None
    table.waiting.clear()
    table.reading.clear()
    table.files.clear()
    table.n_rows = table.n_bytes_read = 0
