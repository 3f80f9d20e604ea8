"""The sessions that hold tables for their readers: each from its snapshot (``table_snapshot``) to ``release``.

Each table has a session of its own, in an open transaction. Small ones share one (``hold_together``): the session stays
until the last of them is released, and all of them are locked until then. Of t1, t3 and t5, which were held together,
t1 and t3 may be released, and an ALTER TABLE t1 waits until t5 is released, too.

The server ends the snapshot with the session, and readers that have imported it go on alone. While a table is held, an
ALTER TABLE waits, and all that comes after that ALTER TABLE waits with it. (``lock_timeout`` in the session of the
ALTER TABLE is the remedy.) The other way round, a table that somebody has locked is asked for again and again, a while
each time.

``hold`` may be called by several threads, for different tables. All waiting ends when ``close`` is called. A release,
or a later call for the same table, ends the wait of an earlier one.

Rejected: one session for all tables, large ones among them, because a snapshot lives as long as its transaction, and
cleaning up of all tables would wait for the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import ConnectionLost, PreconditionMissing, SnapshotInterrupted, SnapshotLost
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.postgres.admin import Blocker, sql_connection, translated
from xidstream.pipeline.postgres.failures import from_error
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.snapshot_findings import room_for
from xidstream.pipeline.postgres.table_access import REMEDY_LOCKS
from xidstream.pipeline.postgres.table_snapshot import BEGIN, HeldSnapshot, Patience, SnapshotTaking
from xidstream.pipeline.snapshot.tables import PublishedSource

_LOCK_TIMEOUT_MS: Final = 2_000
_POLL_S: Final = 0.2
_NOTICE_S: Final = 2.0
_MOST_IDLE: Final = 2
_RENEWED_AFTER: Final = 500
"""Tables. A backend keeps some 15 KiB in memory of each one that it was asked about."""
_KEEPALIVES: Final = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
"""The server's keepalives: else it would keep the lock of a machine that is gone for two hours."""

OnWait = Callable[[tuple[Blocker, ...]], None]


class TableHolder:
    """``dsn`` leads to one server: the slot's. ``publications``: the slot's. ``of_standby``: the server is a standby,
    and the caller needs no transaction ids."""

    def __init__(
        self,
        dsn: Dsn,
        publications: Sequence[str],
        *,
        of_standby: bool = False,
        column_names: ColumnNames = MappingProxyType({}),
    ) -> None:
        self._dsn = dsn
        self._of_standby = of_standby
        self._taking = SnapshotTaking(publications, column_names, of_standby=of_standby)
        self._sessions: dict[int, psycopg.Connection[Any]] = {}
        """By relid: the session whose transaction holds the table's snapshot."""
        self._observers: list[psycopg.Connection[Any]] = []
        """Idle, for the next tables: a new backend would fill its caches of the catalog for each of them."""
        self._n_asked = 0
        """The tables that these were asked about since they were opened."""
        self._waiting: dict[int, tuple[Blocker, ...]] = {}
        """By relid: the writers that ``hold`` waits for now."""
        self._wanted: dict[int, object] = {}
        """By relid: the call of ``hold`` that counts. A release, or a later call, takes its place."""
        self._guard = threading.Lock()
        """Guards the dictionaries, which several threads use."""
        self._closed = threading.Event()
        """Set by ``close``: every wait ends."""

    def hold(
        self,
        source: PublishedSource,
        *,
        wait_for_writers: bool,
        behind: Lsn = INVALID_LSN,
        lock_timeout_ms: int = _LOCK_TIMEOUT_MS,
        on_wait: OnWait | None = None,
    ) -> HeldSnapshot:
        """Take the table's snapshot, and keep it until ``release``.

        ``behind``: the place of an earlier snapshot of the table; this one's is a higher one. Two that were taken with
        nothing written to the WAL in between would have one place, and the rows of the later one be taken for those of
        the earlier. So a commit of nothing is made then.

        ``on_wait`` is told every two seconds for whom it waits; an exception from it ends the waiting. Raises
        SnapshotInterrupted where the table is not what ``source`` says (any more), TableUnreadable where the role
        may not read it, Unsupported on a standby, ConnectionLost.
        """
        relid = source.relation.relid
        waiting = _Waiting(self, relid, on_wait)
        patience = Patience(wait_for_writers, lock_timeout_ms, waiting.pause)
        try:
            doing = f"the snapshot of table {source.name}"
            held = self._hold([source], doing, waiting, behind, patience)
        finally:
            with self._guard:
                self._waiting.pop(relid, None)
        if not held:
            raise _given_up()
        return held[relid]

    def hold_together(
        self, sources: Sequence[PublishedSource], *, behind: Lsn = INVALID_LSN
    ) -> dict[int, HeldSnapshot]:
        """Take one snapshot of all of these tables, and keep it until each of them is released. By relid.

        Nobody is waited for, and a table that cannot be held now, for whatever reason, is not among them: ``hold`` it
        alone, which says why. ``behind``: as there. Raises what ``hold`` raises where that concerns all.
        """
        return self._hold(sources, f"the snapshot of {len(sources)} tables", object(), behind)

    def _hold(
        self,
        sources: Sequence[PublishedSource],
        doing: str,
        call: object,
        behind: Lsn,
        patience: Patience | None = None,
    ) -> dict[int, HeldSnapshot]:
        """Take one snapshot of these tables, in one session."""
        with self._guard:
            self._wanted |= dict.fromkeys([source.relation.relid for source in sources], call)
        with self._observing(doing, len(sources)) as observer:
            session = self._session(doing)
            try:
                with _reported(doing):
                    held = self._taking.take(observer, session, sources, behind, patience)
                with self._guard:
                    held = {relid: each for relid, each in held.items() if self._is_wanted(relid, call)}
                    previous = [self._sessions.pop(relid) for relid in held if relid in self._sessions]
                    self._sessions |= dict.fromkeys(held, session)
                self._end_unused([*previous, session])
                return held
            except BaseException:
                session.close()
                raise

    def release(self, *relids: int) -> None:
        """Let go of tables' locks and snapshots, and give up to take them. Nothing happens if one is not held."""
        with self._guard:
            for relid in relids:
                self._wanted.pop(relid, None)
            sessions = [self._sessions.pop(relid) for relid in relids if relid in self._sessions]
        self._end_unused(sessions)

    def _end_unused(self, sessions: Iterable[psycopg.Connection[Any]]) -> None:
        """End those that hold no table any more."""
        with self._guard:
            used = set(map(id, self._sessions.values()))
        for session in sessions:
            if id(session) not in used:
                session.close()

    def close(self) -> None:
        """Release all, and end all waiting."""
        self._closed.set()
        with self._guard:
            sessions = list(self._sessions.values())
            sessions += self._observers
            self._sessions.clear()
            self._observers.clear()
        for session in sessions:
            session.close()

    def waiting_for(self) -> dict[int, tuple[Blocker, ...]]:
        """For whom each table waits now, by relid. Tables that wait for nobody are not there."""
        with self._guard:
            return dict(self._waiting)

    def flushed_past(self, valid_from: Lsn) -> bool:
        """Whether all that a snapshot which is valid from there saw is flushed, and so survives a crash of the server.

        Where it is not, a commit of nothing is made. The server flushes asynchronous commits within a second, but the
        WAL after them, which only ``valid_from`` knows of, perhaps not before the next checkpoint.
        """
        with sql_connection(self._dsn, "the flushed WAL") as connection:
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            if Lsn.parse(row[0]) >= valid_from.next_record.record_end:
                return True
            connection.execute("SELECT txid_current()")
            return False

    def confirm(self, relids: Sequence[int], valid_from: Lsn) -> dict[int, SnapshotLost]:
        """Return when all that the snapshot of these tables saw is flushed, with the tables still held: what was read
        is the table. Returns those that were not held all the time, with the reason. They are to be taken anew.

        To be called when the last row is read. The question goes through the tables' own session. If that ended before,
        its lock may have been gone while rows were still read, and the server may have lost commits that the snapshot
        saw.
        """
        with self._guard:
            sessions = {relid: self._sessions[relid] for relid in relids if relid in self._sessions}
        lost = {
            relid: SnapshotLost("the session that held a table's snapshot has ended")
            for relid in relids
            if relid not in sessions
        }
        for session in {id(each): each for each in sessions.values()}.values():
            try:
                self._confirm(session, valid_from)
            except SnapshotLost as error:
                lost |= {relid: error for relid, each in sessions.items() if each is session}
        return lost

    def _confirm(self, session: psycopg.Connection[Any], valid_from: Lsn) -> None:
        while True:
            with _reported("the end of a table's snapshot"):
                if self._of_standby:  # what is replayed was flushed before
                    session.execute("SELECT")
                    return
                row = session.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            if Lsn.parse(row[0]) >= valid_from.next_record.record_end or self.flushed_past(valid_from):
                return
            if self._closed.wait(_POLL_S):
                raise SnapshotLost("the holder of snapshots was closed")

    def room_for(self, wanted: int) -> int:
        """How many of ``wanted`` further connections the server has room for; at least one."""
        with sql_connection(self._dsn, "the server's connections") as connection:
            return room_for(connection, wanted)

    @contextmanager
    def _observing(self, doing: str, n_tables: int = 1) -> Iterator[psycopg.Connection[Any]]:
        """``sql_connection``, by the connection of an earlier table where that is idle, and still lives."""
        with self._guard:
            observer = self._observers.pop() if self._observers else None
        if observer is not None and not _is_alive(observer):
            observer.close()
            observer = None
        if observer is None:
            observer = open_session(self._dsn, doing, _KEEPALIVES)
        try:
            with translated(doing):
                yield observer
            with self._guard:
                before, self._n_asked = self._n_asked, self._n_asked + n_tables
                is_old = self._n_asked // _RENEWED_AFTER > before // _RENEWED_AFTER
                if len(self._observers) < _MOST_IDLE and not is_old and not self._closed.is_set():
                    self._observers.append(observer)
                    observer = None
        finally:
            if observer is not None:
                observer.close()

    def _session(self, doing: str) -> psycopg.Connection[Any]:
        """A session whose transaction has begun, and has no snapshot yet."""
        session = open_session(self._dsn, doing, _KEEPALIVES)
        try:
            with _reported(doing):
                session.execute(BEGIN)
        except BaseException:
            session.close()
            raise
        return session

    def _is_wanted(self, relid: int, call: object) -> bool:
        """Whether the holder was not closed, and the table not released, since ``call`` began."""
        return not self._closed.is_set() and self._wanted.get(relid) is call

    def _note_waiting(self, relid: int, blockers: tuple[Blocker, ...]) -> None:
        with self._guard:
            self._waiting[relid] = blockers


class _Waiting:
    """One call's waiting: pauses that ``close`` ends, and the notices of it."""

    def __init__(self, holder: TableHolder, relid: int, on_wait: OnWait | None) -> None:
        self._holder = holder
        self._relid = relid
        self._on_wait = on_wait
        self._due = time.monotonic() + _NOTICE_S

    def pause(self, blockers: tuple[Blocker, ...]) -> None:
        """Some time later. Raises SnapshotLost if the holder is closed, and what ``on_wait`` raises."""
        self._holder._note_waiting(self._relid, blockers)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _NOTICE_S
            if self._on_wait is not None:
                self._on_wait(blockers)
        self._holder._closed.wait(_POLL_S)
        if not self._holder._is_wanted(self._relid, self):
            raise _given_up()


def _given_up() -> SnapshotLost:
    return SnapshotLost("the snapshot of a table was given up")


def _is_alive(idle: psycopg.Connection[Any]) -> bool:
    """The server may have ended it meanwhile (``idle_session_timeout``, a restart)."""
    try:
        idle.execute("SELECT")
    except psycopg.Error:
        return False
    return True


@contextmanager
def _reported(doing: str) -> Iterator[None]:
    """Errors of the server as ours. An object that is gone, or a session that ended, interrupts the snapshot."""
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName):
        raise SnapshotInterrupted(f"{doing}: the table was dropped or renamed") from None
    except psycopg.errors.LockNotAvailable:
        raise SnapshotInterrupted(
            f"{doing}: somebody has a published table with a row filter locked, or waits to alter it: that goes first"
        ) from None
    except psycopg.errors.OutOfMemory:
        raise PreconditionMissing(
            f"{doing}: the server has no room for so many locks", remedy=REMEDY_LOCKS
        ) from None
    except psycopg.Error as error:
        ours = from_error(error, doing)
        if isinstance(ours, ConnectionLost):
            raise SnapshotLost(ours.message) from None
        raise ours from None
