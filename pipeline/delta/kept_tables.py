"""Delta tables that are asked again and again, at a few requests, or milliseconds, each time.

Who opens a table reads its last checkpoint, which names each file that was removed in the last day, and the log from
there on, commit by commit: up to a hundred, each of them twice. Here the handle is kept, and reads what came after it:
a listing, the hint of a checkpoint, and each new commit.

Another table may stand in the place by then: somebody has removed it, its versions are counted from 0 again, and may
have come further than before. deltalake does not notice, and would take the one log for the other's continuation. So
after each look the commit of the version that was known is read again. It must be what it was (it names files and
moments that no other commit does), or the table is opened anew. After, because the place may change its table between
the two. So a look that finds nothing is four requests.

The versions of application transactions are remembered with it (``table_handle``).

What is kept is one handle on the newest version, which goes on with the next look. So it is for whoever looks, acts and
looks again. After an error ``forget`` lets all handles go: a handle after a failed commit is of no further use. A
handle that has gone on for ``_RENEWED_AFTER`` versions is opened anew, because it lists the log from where it began.

Called by the mirror, and for it by ``changelog.log_root`` and ``changelog.manifest``. deltalake only. Safe from any
thread; what is done with one table's handle, one thread does at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from deltalake.exceptions import DeltaError

from xidstream.pipeline.delta.table_handle import TableHandle
from xidstream.pipeline.log_tables.locations import Location

_MOST: Final = 2_048
"""Handles at a time, those that were asked for last: two of each of a thousand tables, the log's and the base. Each has
the list of its table's files in memory (measured: 0.1 MB for a small table). With 64 of them, a refresh of a hundred
tables opened all of them anew each time, which took half of its CPU time."""
_RENEWED_AFTER: Final = 1_000


class _Kept:
    def __init__(self, location: Location) -> None:
        self.lock = threading.Lock()
        self.notes: dict[str, frozenset[str]] = {}
        self._location = location
        self._table: TableHandle | None = None
        self._opened_version = -1
        self._version = -1
        self._commit = b""

    def newest(self) -> TableHandle:
        with self.lock:
            if self._table is None or not self._goes_on(self._table):
                self.notes.clear()
                self._table = None
                self._table = TableHandle(self._location)
                self._opened_version = self._table.version()
            if self._table.version() != self._version or not self._commit:
                self._version = self._table.version()
                self._commit = self._table.commit_of(self._version)
            return self._table

    def noted(self) -> dict[str, frozenset[str]]:
        with self.lock:
            ids = {} if self._table is None else self._table.take_ids()
            self.notes.update({f"{version:020d}.json": each for version, each in ids.items()})
            return self.notes

    def _goes_on(self, table: TableHandle) -> bool:
        """Bring it up to date. Returns whether it still is the table that stands there, and may be kept."""
        if self._version - self._opened_version >= _RENEWED_AFTER:
            return False
        try:
            table.update_incremental()
        except DeltaError:
            return False  # opening it anew says what is wrong, if something is
        return table.commit_of(self._version) == self._commit != b""


class KeptTables:
    """The handles, by the tables' locations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def newest(self, location: Location) -> TableHandle:
        """A handle on the newest version, which a later call moves on. Raises ``TableNotFoundError`` where there is no
        table, OSError, DeltaError."""
        return self._of(location).newest()

    def notes(self, location: Location) -> dict[str, frozenset[str]]:
        """What a caller wants to remember of the table's commits, by their files' names, which is the application ids
        that are in them: those of commits that the handle has read are there already. Empty where another table stands
        there."""
        return self._of(location).noted()

    def forget(self) -> None:
        """All handles."""
        with self._lock:
            self._kept.clear()

    def _of(self, location: Location) -> _Kept:
        with self._lock:
            kept = self._kept.pop(location.uri, None) or _Kept(location)
            self._kept[location.uri] = kept
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
            return kept


def opened(location: Location, version: int | None = None) -> TableHandle:
    """A handle of its own. Raises as ``KeptTables.newest``."""
    return TableHandle(location, version)
