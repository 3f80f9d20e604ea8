"""Keeps the sink's Delta tables as light after a year as after an hour, beside the commits.

A table gets a file in its log with each commit, and a commit lists them all. It gets a data file, too, and those that a
merge replaced stay. So from time to time, for each table that is written:

- the *log* is shortened: commits older than the table's ``delta.logRetentionDuration`` go, as far as a checkpoint has
  what they said (deltalake);
- *files* go that a commit removed longer ago than ``DeltaRetention.files_h``, with the folders that are empty then;
- *leftovers* go: files of the sink that no commit names, of writers that failed or were killed. They must be older than
  a batch, or a snapshot, can take to be committed;
- *middling files* are merged to large ones. They take too long to write within a commit. So the new file is written
  here, and the table's next commit is followed by the one that takes it in (``take_merge``). Until then it has no name.

Ages are by the wall clock, which may be set. So each age is made as much longer as the clock may be ahead
(``watched_clock``).

Nobody loses a file by that. What a commit removed was removed for everybody who opens the table, and who opened it
before has had ``files_h``. A leftover has no name, and none is given to a file so old. So whoever has the slot, and
several slots at once, may do this. No commit waits for it.

*When* is counted in commits, for a run may end after minutes and another begin; and in seconds, because a table that
catches up makes a hundred commits a second. ``Schedule`` decides it. An example, at one commit a second: at version 150
the log is shortened, and again at 250, 100 s later. At version 1,000 files go, and at 2,000 nothing, because that is 17
minutes later; 3,000, 4,000 and 5,000 are due when an hour is over, once. The log has its turn halfway between two of
deltalake's checkpoints, and is shortened as of the earlier one, whatever checkpoints there are behind it: a reader that
listed it before the checkpoint of version 199 still reads the commits that this replaces.

Rejected: deltalake's own way, a look for old commits after every hundredth one: 20,000 that had come together held up
one commit for 6.4 s. Its ``vacuum`` removes files in a store, and makes two commits of its own for that. In a folder it
is only asked what it would remove: it leaves empty folders, and cannot be stopped halfway.

A thread of the driver's process, started by the first table that is due. The change logs are cut on another one, for a
fold of a large table takes as long as Spark takes for it. deltalake and pyarrow only.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from xidstream.pipeline import events
from xidstream.pipeline.delta.kept_tables import opened
from xidstream.pipeline.delta.plain_files import is_mergeable
from xidstream.pipeline.delta.stored_columns import columns_of
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.layout import layout_columns
from xidstream.pipeline.log_tables.locations import TRANSACTIONS, Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.small_files import (
    CLUSTERED,
    MIDDLING,
    OWN,
    SNAPSHOT_FILES,
    many_small,
    merge,
)
from xidstream.pipeline.log_tables.table_metadata import columns_with_statistics
from xidstream.pipeline.log_tables.watched_clock import WatchedClock
from xidstream.pipeline.settings.delta_retention import DeltaRetention

LEFTOVER_H: Final = {OWN: 7 * 24, SNAPSHOT_FILES: 30 * 24}
"""Hours: by then a file of this kind has its commit, or never gets one."""
PORTION: Final = 64
"""So many files are removed before the next look whether to stop."""
NEVER: Final = -1
"""In place of hours: nothing is old enough."""
_LOG: Final = "_delta_log"
_MOST_COMMITS: Final = 100
"""So many commits are looked at: a run makes some before it tells of the first one, in which it describes the table."""
_END_S: Final = 5.0
_LOGGER: Final = logging.getLogger(__name__)
_FAILURES: Final = (OSError, DeltaError, pa.ArrowException, XidstreamError)


class UpkeepStep(enum.Enum):
    """What is due together."""

    LOG = enum.auto()
    """Shorten the log, merge middling files."""
    FILES = enum.auto()
    """Remove files. It lists the whole table."""


class UpkeepPace(NamedTuple):
    """A step is due when the version passes a multiple of ``commits``, and ``offset`` more, but not twice within
    ``seconds``."""

    commits: int
    seconds: float
    offset: int = 0


PACES: Final = {
    UpkeepStep.LOG: UpkeepPace(100, 60.0, offset=50),
    UpkeepStep.FILES: UpkeepPace(1_000, 3_600.0),
}


class Schedule:
    """When which step of one table is due. It has no clock."""

    def __init__(self, version: int) -> None:
        """``version``: the table's before the first commit that is told."""
        self._version = version
        self._asked: set[UpkeepStep] = set()
        self._done_s: dict[UpkeepStep, float] = {}

    def note(self, version: int) -> bool:
        """The table has this version. Whether a step is asked for, now or before."""
        for step, pace in PACES.items():
            if (version - pace.offset) // pace.commits > (self._version - pace.offset) // pace.commits:
                self._asked.add(step)
        self._version = max(version, self._version)
        return bool(self._asked)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a step is due; None where none is asked for."""
        waits = [self._free_at_s(step) - now_s for step in self._asked]
        return max(0.0, min(waits)) if waits else None

    def take(self, now_s: float) -> set[UpkeepStep]:
        """The steps that are due. They count as done."""
        due = {step for step in self._asked if self._free_at_s(step) <= now_s}
        self._asked -= due
        self._done_s |= dict.fromkeys(due, now_s)
        return due

    def _free_at_s(self, step: UpkeepStep) -> float:
        done_s = self._done_s.get(step)
        return float("-inf") if done_s is None else done_s + PACES[step].seconds


@dataclass(frozen=True)
class Merge:
    """``files`` have the rows of those at ``removed``, and no commit names them yet."""

    directory: str
    files: Sequence[WrittenFile]
    removed: Sequence[str]


@dataclass
class _Table:
    location: Location
    label: str
    lsn_column: str
    schedule: Schedule
    first_version: int
    """Before the first commit that was told."""
    before_s: float | None = None
    is_before_known: bool = False
    merge: Merge | None = None
    """The work that was prepared, until it is taken."""
    failed: set[str] = field(default_factory=set)
    """The classes of errors that were told."""


class Upkeep:
    """The upkeep of one sink's tables. ``note`` and ``take_merge`` are for the threads that commit."""

    def __init__(
        self,
        retention: DeltaRetention,
        clock: Callable[[], float] = time.monotonic,
        ages: WatchedClock | None = None,
        shorten: Callable[[], None] = lambda: None,
    ) -> None:
        """``shorten``: cuts the change logs by their own retention. It has its turn when files of ``_transactions`` are
        due, which gets every commit. It has a thread of its own, and never runs twice at a time. Raises as an
        XidstreamError what it could not do."""
        self._shorten = shorten
        self._shortening: threading.Thread | None = None
        """The thread in which ``shorten`` runs or ran last."""
        self._retention = retention
        self._clock = clock
        self._ages = ages or WatchedClock()
        self._changed = threading.Condition()
        """Guards ``_tables`` and ``_ends``. Wakes the thread."""
        self._tables: dict[str, _Table] = {}
        """By the location's URI: every table that had a commit in this run."""
        self._thread: threading.Thread | None = None
        self._ends = False

    def note(self, location: Location, label: str, lsn_column: str, version: int) -> None:
        """A commit has made this version. ``lsn_column``: the one with statistics."""
        self._ages.look()
        with self._changed:
            if self._ends:
                return
            table = self._tables.get(location.uri)
            if table is None:
                table = _Table(location, label, lsn_column, Schedule(version - 1), version - 1)
                self._tables[location.uri] = table
            if not table.schedule.note(version):
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="delta-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take_merge(self, location: Location) -> Merge | None:
        """What was prepared of this table, once. The caller commits it, if all that it removes is still there."""
        with self._changed:
            table = self._tables.get(location.uri)
            if table is None:
                return None
            merge, table.merge = table.merge, None
            return merge

    def discard(self, location: Location, merge: Merge) -> None:
        """It was taken, and is not wanted."""
        with suppress(*_FAILURES):
            attempt_files.remove(location, merge.directory)

    def close(self) -> None:
        """End soon: a step in hand goes on for some seconds at most, or with the process."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in (self._thread, self._shortening):
            if thread is not None:
                thread.join(_END_S)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._next()) is not None:
            table, steps = due
            try:
                self._do(table, steps)
            except TableNotFoundError:
                continue  # somebody removed it
            except _FAILURES as error:
                self._tell(table, error)
        for table in self._tables.values():
            if table.merge is not None:
                self.discard(table.location, table.merge)

    def _next(self) -> tuple[_Table, set[UpkeepStep]] | None:
        with self._changed:
            while not self._ends:
                now_s = self._clock()
                waits = []
                for table in self._tables.values():
                    wait_s = table.schedule.wait_s(now_s)
                    if wait_s is not None and wait_s <= 0:
                        return table, table.schedule.take(now_s)
                    if wait_s is not None:
                        waits.append(wait_s)
                self._changed.wait(min(waits, default=None))
            return None

    def _do(self, table: _Table, steps: set[UpkeepStep]) -> None:
        if UpkeepStep.LOG in steps:
            self._shorten_log(table, opened(table.location))
        # Only now: a handle reads from the log, later on, what it needs of removed files.
        found = opened(table.location)
        if UpkeepStep.LOG in steps:
            self._prepare_merge(table, found)
        if UpkeepStep.FILES in steps:
            self._remove(table, found)
            if table.label == TRANSACTIONS:
                self._begin_to_shorten(table)

    def _begin_to_shorten(self, table: _Table) -> None:
        """Where the last one is still at work, this turn is left out."""

        def shorten() -> None:
            try:
                self._shorten()
            except _FAILURES as error:
                self._tell(table, error)

        if self._shortening is None or not self._shortening.is_alive():
            self._shortening = threading.Thread(target=shorten, name="log-shortening", daemon=True)
            self._shortening.start()

    def _shorten_log(self, table: _Table, found: DeltaTable) -> None:
        """deltalake knows the table's own time alone. So where ages are not to be trusted, the log waits."""
        properties = found.metadata().configuration
        if str(properties.get("delta.enableExpiredLogCleanup")).lower() == "false":
            return
        log_s = self._retention.log_s_of(properties)
        if log_s is None or self._ages.is_trusted(log_s, self._before_s(table)):
            # Of a version deltalake takes away what the last checkpoint up to it has replaced.
            version = max(0, found.version() - PACES[UpkeepStep.LOG].offset)
            opened(table.location, version).cleanup_metadata()

    def _remove(self, table: _Table, found: DeltaTable) -> None:
        files_s = self._retention.files_s_of(found.metadata().configuration)
        files_h = None if files_s is None else self._hours(table, files_s)
        removed = set(_vacuumed(found, 0))
        if files_h == NEVER:
            pass
        elif table.location.is_local:
            remove_files(table.location, _vacuumed(found, files_h), lambda: self._ends)
        else:
            # deltalake's file system holds Python's lock for as long as a store takes to delete; its vacuum does not.
            _vacuumed(found, files_h, dry_run=False)
        for kind, age_h in LEFTOVER_H.items():
            hours = self._hours(table, age_h * 3600.0)
            old = [] if hours == NEVER else _vacuumed(found, hours, full=True)
            leftovers = [path for path in old if path.startswith(kind) and path not in removed]
            remove_files(table.location, leftovers, lambda: self._ends)

    def _hours(self, table: _Table, age_s: float) -> int:
        """The whole hours by the wall clock after which a thing of the table is as old as this; ``NEVER`` where that is
        not known."""
        ahead_s = self._ages.ahead_s(age_s, self._before_s(table))
        return NEVER if math.isinf(ahead_s) else math.ceil(round(age_s + ahead_s) / 3600)

    def _before_s(self, table: _Table) -> float | None:
        """When the last commit before this process was made; as ``WatchedClock`` takes it."""
        if not table.is_before_known:
            table.before_s = _newest_commit_s(table.location, table.first_version, self._ages.began_at_s)
            table.is_before_known = True
        return table.before_s

    def _prepare_merge(self, table: _Table, found: DeltaTable) -> None:
        if table.merge is not None or not is_mergeable(found):
            return
        files = pa.table(found.get_add_actions(flatten=True))
        replaced = many_small(files, table.lsn_column, MIDDLING)
        if not replaced.num_rows or self._ends:
            return
        properties, columns = found.metadata().configuration, columns_of(found)
        by = layout_columns(columns, properties)
        directory = f"{OWN}{uuid.uuid4().hex}" + (CLUSTERED.rstrip("/") if by else "-merged")
        try:
            ranged = columns_with_statistics(properties)
            merged = merge(table.location, replaced, columns, table.lsn_column, directory, ranged, by)
        except BaseException:
            with suppress(*_FAILURES):
                attempt_files.remove(table.location, directory)
            raise
        with self._changed:
            table.merge = Merge(directory, merged, replaced["path"].to_pylist())

    def _tell(self, table: _Table, error: BaseException) -> None:
        """Once for each kind of failure: it is tried again, and the table grows meanwhile."""
        kind = type(error).__name__
        if kind in table.failed:
            return
        table.failed.add(kind)
        text = (
            f"Delta table {table.label}: what it does not need any more could not be removed ({kind}); this is tried "
            "again"
        )
        _LOGGER.warning(events.Event("upkeep_failed", text, table=table.label))


def _newest_commit_s(table: Location, version: int, before_s: float) -> float | None:
    """When the newest commit up to ``version`` was made, by its own word, that says a time below ``before_s``; this
    time where no commit does, and None where that is not known."""
    for each in range(version, max(version - _MOST_COMMITS, -1), -1):
        try:
            lines = table.read(f"{_LOG}/{each:020d}.json").splitlines()
        except OSError:
            return None
        infos = (json.loads(line)["commitInfo"] for line in lines if line.startswith(b'{"commitInfo"'))
        committed_s = next((info["timestamp"] / 1000 for info in infos if "timestamp" in info), None)
        if committed_s is None or committed_s < before_s:
            return committed_s
    return before_s if version < _MOST_COMMITS else None


def remove_files(table: Location, paths: Sequence[str], ends: Callable[[], bool]) -> None:
    """Remove files, and in a local table the folders that are empty then, until ``ends`` says so. The paths are
    relative to the table. A file that is gone is no error. Raises OSError."""
    for start in range(0, len(paths), PORTION):
        if ends():
            return
        portion = paths[start : start + PORTION]
        if not table.is_local:
            store = attempt_files.store_of(table)
            for path in portion:
                store.delete_file(path)
            continue
        for path in portion:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(table.uri, path))
        for folder in {os.path.dirname(path) for path in portion} - {""}:
            with suppress(OSError):  # it has other files
                os.rmdir(os.path.join(table.uri, folder))


def _vacuumed(table: DeltaTable, hours: int | None, *, full: bool = False, dry_run: bool = True) -> list[str]:
    """What deltalake's vacuum removes, or would remove. ``hours``: None is the table's own time. ``full``: also what no
    commit names."""
    return table.vacuum(hours, dry_run=dry_run, enforce_retention_duration=False, full=full)
