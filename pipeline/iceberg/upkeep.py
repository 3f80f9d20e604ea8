"""Removes what no snapshot of the sink's Iceberg tables names any more, beside the commits.

pyiceberg expires snapshots and removes no file. Three kinds of files stay behind:

- what *expired* snapshots named alone: their lists of manifests, manifests that were merged since, and data files that
  another program has replaced (a compaction). Which these are is read from the snapshots that a commit has expired, so
  it costs what was expired, and not what the table has. They go ``DELAY_S`` later: a reader that began to plan its scan
  before needs its manifests for some seconds, and a scan of replaced files its files for as long as it takes;
- *leftovers*: files that nobody ever named, of writers that failed or were killed, and what was due when a run ended.
  They are found by a look at the table's folder, once in ``SWEEP_COMMITS`` commits and once an hour at most. They must
  be older than a batch, or a snapshot, can take to be committed. Files whose names the sink does not give stay.
- old files of metadata, which pyiceberg removes itself (``write.metadata.delete-after-commit.enabled``).

The delay is measured by a clock that never jumps; what is due when the process ends becomes a leftover. The age of a
leftover is by the wall clock, and ``watched_clock`` makes it as much longer as that may be ahead.

Where a table has branches or tags of a user, nothing is expired that they need, and no data file goes: pyiceberg does
not tell what a branch has replaced. What a snapshot has replaced that the main branch does not come from stays, too:
somebody has set the table back to the one before it, or never published it, and the table has these files.

With the look at the folder of ``_transactions``, which gets every commit, the change logs are cut by their own
retention (``sinks.log_shortening``).

A thread of the driver's process, started by the first table of which something was expired. No commit waits for it. The
change logs are cut on another one, for a fold of a large table takes as long as Spark takes for it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table.snapshots import Operation

from xidstream.pipeline import events
from xidstream.pipeline.iceberg.catalogs import bare
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.locations import TRANSACTIONS
from xidstream.pipeline.log_tables.watched_clock import WatchedClock

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

    from xidstream.pipeline.log_tables.locations import Location

DELAY_S: Final = 3600.0
PORTION: Final = 64
"""So many files are removed before the next look whether to stop."""
SWEEP_COMMITS: Final = 1_000
SWEEP_S: Final = 3600.0
LEFTOVER_H: Final = {"data-": 7 * 24, "snapshot-": 30 * 24, "metadata": 7 * 24}
"""Hours, by how a path begins: by then a file has its commit, or never gets one."""
_METADATA: Final = (".avro", ".metadata.json")
_LOCAL: Final = ("file:", "/")
_END_S: Final = 5.0
_LOGGER: Final = logging.getLogger(__name__)


class _Due(NamedTuple):
    at_s: float
    number: int
    io: FileIO
    label: str
    paths: Sequence[str]


class _Expired(NamedTuple):
    table: Table
    metadata: TableMetadata
    """What the commit left."""
    location: Location
    label: str
    snapshots: Sequence[Snapshot]
    line: Collection[int]


class IcebergUpkeep:
    """The upkeep of one sink's tables. ``note`` is for the threads that commit."""

    def __init__(
        self,
        delay_s: float = DELAY_S,
        clock: Callable[[], float] = time.monotonic,
        ages: WatchedClock | None = None,
        shorten: Callable[[], None] = lambda: None,
    ) -> None:
        """``shorten``: cuts the change logs. It never runs twice at a time."""
        self._shorten = shorten
        self._shortening: threading.Thread | None = None
        """The thread in which ``shorten`` runs or ran last."""
        self._delay_s = delay_s
        self._clock = clock
        self._ages = ages or WatchedClock()
        self._changed = threading.Condition()
        """Guards ``_noted``, ``_due`` and ``_ends``. Wakes the thread."""
        self._noted: list[_Expired] = []
        """What commits have expired, oldest first, until the thread takes it."""
        self._due: list[_Due] = []
        """A heap, by the time: paths that are to be removed once readers have had the delay."""
        self._numbers = itertools.count()
        """One for each of ``_due``, so that two of the same time are never compared further."""
        self._n_expired: dict[str, int] = {}
        """By table: the snapshots that expired since the last sweep for leftovers."""
        self._swept_s: dict[str, float] = {}
        """By table: when leftovers were last swept, by ``clock``."""
        self._failed: set[tuple[str, str]] = set()
        """The table and the class of each error that was logged; the next is not."""
        self._thread: threading.Thread | None = None
        self._ends = False

    def note(
        self,
        table: Table,
        location: Location,
        label: str,
        expired: Sequence[Snapshot],
        line: Collection[int],
    ) -> None:
        """A commit has expired these snapshots of ``table``, which is as it left it. ``line``: the ids of those that
        its main branch comes from."""
        self._ages.look()
        with self._changed:
            if self._ends:
                return
            self._noted.append(_Expired(table, table.metadata, location, label, expired, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="iceberg-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()

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
        while (step := self._next()) is not None:
            try:
                if isinstance(step, _Due):
                    self._remove(step.io, step.paths)
                else:
                    self._read(step)
            except NoSuchTableError:
                continue  # somebody removed it
            except Exception as error:  # noqa: BLE001 - of drivers and stores; it is tried again as a leftover
                self._tell(step.label, error)

    def _next(self) -> _Due | _Expired | None:
        with self._changed:
            while not self._ends:
                if self._noted:
                    return self._noted.pop(0)
                wait_s = self._due[0].at_s - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)
                self._changed.wait(wait_s)
            return None

    def _read(self, expired: _Expired) -> None:
        location, io = expired.table.location(), expired.table.io
        paths = unnamed_by(expired.metadata, io, expired.snapshots, expired.line, location)
        due = _Due(self._clock() + self._delay_s, next(self._numbers), io, expired.label, paths)
        with self._changed:
            heapq.heappush(self._due, due)
        name = expired.table.metadata.location
        n_expired = self._n_expired.get(name, 0) + len(expired.snapshots)
        now_s = self._clock()
        if n_expired >= SWEEP_COMMITS and now_s - self._swept_s.get(name, float("-inf")) >= SWEEP_S:
            self._n_expired[name] = 0
            self._swept_s[name] = now_s
            if expired.label == TRANSACTIONS:
                self._begin_to_shorten(expired.label)
            with self._changed:
                waiting = {path for each in self._due for path in each.paths}
            before_s = self._before_s(expired)
            found = expired.table.catalog.load_table(expired.table.name())
            old = (path for path in leftovers(found, expired.location, self._ages, before_s))
            self._remove(found.io, [path for path in old if path not in waiting])
        else:
            self._n_expired[name] = n_expired

    def _begin_to_shorten(self, label: str) -> None:
        """Where the last one is still at work, this turn is left out."""

        def shorten() -> None:
            try:
                self._shorten()
            except Exception as error:  # noqa: BLE001 - of drivers and stores, and of a run that was taken over
                self._tell(label, error)

        if self._shortening is None or not self._shortening.is_alive():
            self._shortening = threading.Thread(target=shorten, name="log-shortening", daemon=True)
            self._shortening.start()

    def _before_s(self, expired: _Expired) -> float | None:
        """When the last commit before this process was made; as ``WatchedClock`` takes it."""
        snapshots = (*expired.snapshots, *expired.metadata.snapshots)
        times_s = [s.timestamp_ms / 1000 for s in snapshots if s.timestamp_ms / 1000 < self._ages.began_at_s]
        return max(times_s, default=None)

    def _remove(self, io: FileIO, paths: Sequence[str]) -> None:
        remove_files(io, paths, lambda: self._ends)

    def _tell(self, label: str, error: BaseException) -> None:
        """Once for each kind of failure."""
        kind = type(error).__name__
        if (label, kind) in self._failed:
            return
        self._failed.add((label, kind))
        what = "what it does not need any more could not be removed"
        text = f"Iceberg table {label}: {what} ({kind}); this is tried again"
        _LOGGER.warning(events.Event("upkeep_failed", text, table=label))


def remove_files(io: FileIO, paths: Sequence[str], ends: Callable[[], bool] = lambda: False) -> None:
    """Remove files, by their whole paths, until ``ends`` says so. One that is gone is no error."""
    for start in range(0, len(paths), PORTION):
        if ends():
            return
        portion = paths[start : start + PORTION]
        for path in portion:
            with suppress(FileNotFoundError):
                io.delete(path)
        # Each file of a batch has a folder of its own: a table with a commit a second would get 86,400 a day.
        for folder in {os.path.dirname(bare(path)) for path in portion if path.startswith(_LOCAL)}:
            with suppress(OSError):  # it has other files
                os.rmdir(folder)


def unnamed_by(
    metadata: TableMetadata, io: FileIO, expired: Iterable[Snapshot], line: Collection[int], location: str
) -> list[str]:
    """The files that the ``expired`` snapshots named, and ``metadata`` does not: lists of manifests, manifests, and
    below ``location`` data files that one of them has replaced, if it is one of ``line``."""
    kept = {manifest.manifest_path for each in metadata.snapshots for manifest in each.manifests(io)}
    has_branches = len(metadata.refs) > 1
    found: dict[str, None] = {}
    for snapshot in expired:
        is_append = snapshot.summary is None or snapshot.summary.operation is Operation.APPEND
        replaces = not is_append and snapshot.snapshot_id in line
        for manifest in snapshot.manifests(io):
            if replaces and not has_branches and manifest.added_snapshot_id == snapshot.snapshot_id:
                found |= dict.fromkeys(
                    entry.data_file.file_path
                    for entry in manifest.fetch_manifest_entry(io, discard_deleted=False)
                    if entry.status == ManifestEntryStatus.DELETED
                    and entry.data_file.file_path.startswith(f"{location.rstrip('/')}/")
                )
            if manifest.manifest_path not in kept:
                found[manifest.manifest_path] = None
        found[snapshot.manifest_list] = None
    return list(found)


def leftovers(table: Table, location: Location, ages: WatchedClock, before_s: float | None) -> list[str]:
    """The files in the table's folder that have a name of the sink's or of pyiceberg's, that no snapshot names, and
    that are old enough."""
    metadata, io = table.metadata, table.io
    manifests = {m.manifest_path: m for each in metadata.snapshots for m in each.manifests(io)}
    named = {
        entry.data_file.file_path
        for manifest in manifests.values()
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=False)
    }
    named |= {*manifests, *(each.manifest_list for each in metadata.snapshots), table.metadata_location}
    named |= {each.metadata_file for each in metadata.metadata_log}
    base = metadata.location.rstrip("/")
    _, wall_s = ages.look()
    found = []
    least_s = {
        kind: age_h * 3600.0 + ages.ahead_s(age_h * 3600.0, before_s) for kind, age_h in LEFTOVER_H.items()
    }
    for path, changed_s in _files(location):
        kind = next((kind for kind in LEFTOVER_H if path.startswith(kind)), None)
        if kind is None or (kind == "metadata" and not path.endswith(_METADATA)):
            continue
        if f"{base}/{path}" not in named and wall_s - changed_s > least_s[kind]:
            found.append(f"{base}/{path}")
    return found


def _files(location: Location) -> Iterator[tuple[str, float]]:
    """All files below a table's location: the path there, and when it was written, by the wall clock."""
    if not location.is_local:
        store = attempt_files.store_of(location)
        for info in store.get_file_info_selector(attempt_files.Below("", recursive=True)):
            if info.is_file:
                yield info.path, info.mtime.timestamp()
        return
    for above, _, names in os.walk(location.uri):
        for name in names:
            path = os.path.join(above, name)
            with suppress(FileNotFoundError):
                yield os.path.relpath(path, location.uri), os.stat(path).st_mtime
