"""When the tables of one batch are committed: each as soon as its rows are in files, or all of them in one step.

``LogSink`` says how the rows of a table get into files, and what its commit is then (``TableCommit``). It does so in an
order that is right for both ways: the source's tables, ``_messages``, what ends snapshots, ``_transactions``.

- ``EachByItself`` commits a table at once. ``_transactions`` comes last, and what a crash leaves is tables that hold
  more than it names.
- ``AllAtOnce`` keeps the commits until the last is there, and has them made together. So no reader finds one table of a
  transaction without the other, a crash leaves all as they were, and a run that was taken over adds nothing to any.
  Where a table is not any more what its commit was made from, all commits are made anew.

Either may say what it says twice: all that a table has already is left out when its commit is made again.

Rejected: all at once behind one's back, in the tables' own ``commit``: who calls it goes on from what it has committed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated, TableCommit, Together
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.writer_cache import WriterCache

ATTEMPTS: Final = 3
"""Writes of one table, or of all at once, in the face of others' changes to columns or properties."""
MOST_TOGETHER: Final = 500
"""Tables of a batch. A commit that is still to be made keeps its table's handle (350 KB), and takes some KB of the
request."""
Prepare = Callable[[], TableCommit | None]
"""Has the rows of a table in files. None where there are none to be committed."""
Pass = Callable[[], None]
"""Passes a fault point."""


def _nothing() -> None:
    pass


class Guard:
    """``writers`` are the sink's open handles, and ``title`` says in errors which table a key is."""

    def __init__(self, writers: WriterCache, title: Callable[[str], str]) -> None:
        self._writers = writers
        self.title = title

    def __call__(self, key: str, write: Callable[[], None]) -> None:
        """Run ``write``, with a fresh snapshot after another's harmless change; after a failure forget the
        handle, whose snapshot may no longer be what the table is."""
        for _ in range(ATTEMPTS):
            try:
                write()
                return
            except SnapshotOutdated:
                self.forget(key)
            except Exception as error:
                self.forget(key)
                raise fault_of(error, f"writing {self.title(key)}") from error
        raise StorageFault(f"{self.title(key)} was changed by others during {ATTEMPTS} attempts to write")

    def forget(self, key: str) -> None:
        self._writers.pop(key, None)


class BatchCommits(ABC):
    """The commits of one batch. ``add`` may be called from several threads, for a table each."""

    @abstractmethod
    def add(self, key: str, prepare: Prepare, before: Pass = _nothing, behind: Pass = _nothing) -> None:
        """``before`` and ``behind``: the table's commit. Raises as ``LogSink.write``."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all are made. Raises as ``LogSink.write``."""


class EachByItself(BatchCommits):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def add(self, key: str, prepare: Prepare, before: Pass = _nothing, behind: Pass = _nothing) -> None:
        def write() -> None:
            commit = prepare()
            if commit is not None:
                before()
                commit.alone()
                behind()

        self._guard(key, write)

    def finish(self) -> None:
        """All were made when they were added."""


class AllAtOnce(BatchCommits):
    def __init__(self, guard: Guard, together: Together, root: str) -> None:
        self._guard = guard
        self._together = together
        self._root = root
        self._lock = threading.Lock()
        self._added: dict[str, tuple[Prepare, Pass, Pass]] = {}
        self._commits: dict[str, TableCommit] = {}

    def add(self, key: str, prepare: Prepare, before: Pass = _nothing, behind: Pass = _nothing) -> None:
        with self._lock:
            self._added[key] = prepare, before, behind
        self._prepare(key)

    def _prepare(self, key: str) -> None:
        prepare, before, _ = self._added[key]

        def write() -> None:
            commit = prepare()
            with self._lock:
                self._commits.pop(key, None)
                if commit is not None:
                    self._commits[key] = commit
            if commit is not None:
                before()

        self._guard(key, write)

    def finish(self) -> None:
        for _ in range(ATTEMPTS):
            try:
                self._commit()
            except SnapshotOutdated:
                self._forget()
                for key in self._added:
                    self._prepare(key)
                continue
            except Exception as error:
                self._forget()
                raise fault_of(error, f"committing {len(self._commits)} tables of {self._root}") from error
            for key in self._commits:
                _, _, behind = self._added[key]
                behind()
            return
        raise StorageFault(
            f"tables of {self._root} were changed by others during {ATTEMPTS} attempts to write"
        )

    def _commit(self) -> None:
        commits = list(self._commits.values())
        if len(commits) == 1:
            commits[0].alone()
        elif commits:
            self._together(commits)

    def _forget(self) -> None:
        for key in self._added:
            self._guard.forget(key)


def commits_of(n_tables: int, guard: Guard, together: Together | None, root: str) -> BatchCommits:
    """``together``: None where the format, or the catalog, cannot. ``root`` names all tables for people."""
    if together is None or n_tables > MOST_TOGETHER:
        return EachByItself(guard)
    return AllAtOnce(guard, together, root)
