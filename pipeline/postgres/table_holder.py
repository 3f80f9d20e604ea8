"""Takes the snapshot of a table, and holds it for the readers: steps 1 to 4 of a snapshot, in this order.

1. *Lock* the table and its leaves IN ACCESS SHARE MODE. From here on nobody rewrites, truncates or drops them. Then ask
   the catalog again: the table must still be what was surveyed.
2. *B*: where the WAL ends now. The snapshot's rows get a place before it.
3. *Wait* for the transactions that have written to the table and are still open, prepared ones included, where they may
   have begun to write before the table was published. The stream has their later changes and not those, and a snapshot
   that they are not in would miss those rows for ever. The same holds for what was left out while a table was parked,
   and for a commit from before the slot's first position that still waits for its synchronous standby.
   Only holders of a lock of the table are waited for. So then the snapshot has all of the table that committed below B.
4. *The snapshot*: which transactions it sees, its name for the readers, and *E*, where the WAL ends after it, all in
   one statement. It is the first of its transaction that needs a snapshot: LOCK and SET need none. That statement also
   compares the files that its snapshot knows (``pg_class.relfilenode``) with those that are there
   (``pg_relation_filenode``). They differ if a rewrite came between snapshot and lock: an older snapshot would read no
   rows there, without an error. The lock alone keeps that from happening; this is its proof.

Each table has a session of its own, in an open transaction, until ``release``. Small ones share one
(``hold_together``): the steps are the same, for all of them at once, and the session stays until the last of them is
released. It waits for no lock. A session that has some tables locked, and waits for another one's owner, who waits for
one of these, is a deadlock, and the server may end either of them. So what is not to be had at once is left out.

The server ends the snapshot with the session, and readers that have imported it go on alone. While a table is held, an
ALTER TABLE waits, and all that comes after that ALTER TABLE waits with it. (``lock_timeout`` in the session of the
ALTER TABLE is the remedy.) The other way round, a table that somebody has locked is asked for again and again, a while
each time. The catalog is asked while the lock is held, and opens a table to tell its row filter, behind whoever waits
to alter it. So that question waits a second at most, and then the snapshot is given up (SnapshotInterrupted).

``hold`` may be called by several threads, for different tables. All waiting ends when ``close`` is called.

On a standby a snapshot's ids tell nothing (``pg_current_snapshot`` shows no running transaction there), and B and E are
how far it has replayed. A run's snapshots need the ids, so they are refused there. A verification does without them
(``pipeline.changelog.moment``), and asks for a holder ``of_standby``.

Rejected: one session for all tables, large ones among them, because a snapshot lives as long as its transaction, and
cleaning up of all tables would wait for the last; and waiting for all open transactions, as PostgreSQL's slots do,
because some never end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import (
    ConnectionLost,
    PreconditionMissing,
    SnapshotInterrupted,
    SnapshotLost,
    TableUnreadable,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import ColumnNames, table_label
from xidstream.pipeline.postgres.admin import Blocker, sql_connection, translated
from xidstream.pipeline.postgres.failures import from_error
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.snapshot_findings import room_for
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.stream_options import PG13, PG14, quote_identifier
from xidstream.pipeline.postgres.table_access import (
    REMEDY_LOCKS,
    REMEDY_ROW_SECURITY,
    REMEDY_SELECT,
    REMEDY_STANDBY,
    Access,
    access_to,
    is_standby,
)
from xidstream.pipeline.postgres.writers import Writer, lock_holders, writers_of
from xidstream.pipeline.snapshot.bounds import Checkpoint, SnapshotBounds
from xidstream.pipeline.snapshot.invalidation import reason_it_ended, signature_of
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource

_LOCK_TIMEOUT_MS: Final = 2_000
_CATALOG_WAIT_MS: Final = 1_000
"""For who waits to alter a published table that has a row filter: the catalog's text of the filter waits behind it, and
it waits for the lock that is held meanwhile."""
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

_TAKE: Final = """
    SELECT {snapshot}()::text, pg_export_snapshot(), {wal_end}()::text,
           (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
           (SELECT array_agg(c.oid::bigint) FROM pg_class AS c
            WHERE c.oid = ANY(%s::oid[]) AND c.relfilenode = pg_relation_filenode(c.oid))
"""

_INSERTED: Final = "pg_current_wal_insert_lsn"
_REPLAYED: Final = "pg_last_wal_replay_lsn"
"""Where the WAL ends, of a primary and of a standby."""

OnWait = Callable[[tuple[Blocker, ...]], None]


@dataclass(frozen=True)
class HeldSnapshot:
    """``snapshot_name``: for SET TRANSACTION SNAPSHOT. ``source``: as it is under the lock, with the sizes of now.
    ``by_range``: whether the server scans ranges of ctid (14+)."""

    snapshot_name: str
    bounds: SnapshotBounds
    source: PublishedSource
    by_range: bool


@dataclass(frozen=True)
class Patience:
    """How a table that is taken alone waits: for its writers, perhaps, and for its lock, so long at a time.

    ``pause`` comes between two questions, and is told for whom it waits. It raises what ends the waiting."""

    for_writers: bool
    lock_timeout_ms: int
    pause: Callable[[tuple[Blocker, ...]], None]


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

    def confirm(self, relid: int, valid_from: Lsn) -> None:
        """Return when all that the snapshot saw is flushed, with the table still held: what was read is the table.

        To be called when the last row is read. The question goes through the table's own session. If that ended before,
        its lock may have been gone while rows were still read, and the server may have lost commits that the snapshot
        saw. Raises SnapshotLost then.
        """
        doing = "the end of a table's snapshot"
        while True:
            with self._guard:
                session = self._sessions.get(relid)
            if session is None:
                raise SnapshotLost("the session that held a table's snapshot has ended")
            with _reported(doing):
                if self._of_standby:  # what is replayed was flushed before
                    session.execute("SELECT")
                    return
                row = session.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            if Lsn.parse(row[0]) >= valid_from.next_record.record_end or self.flushed_past(valid_from):
                return
            if self._closed.wait(_POLL_S):
                raise SnapshotLost("the holder of snapshots was closed")

    def confirm_together(self, relids: Sequence[int], valid_from: Lsn) -> list[int]:
        """``confirm`` for tables with one snapshot. Returns those that were held all the time; the others are to be
        taken anew."""
        with self._guard:
            sessions = {relid: self._sessions[relid] for relid in relids if relid in self._sessions}
        lost: set[int] = set()
        for first in {id(session): relid for relid, session in sessions.items()}.values():
            try:
                self.confirm(first, valid_from)
            except SnapshotLost:
                lost.add(id(sessions[first]))
        return [relid for relid, session in sessions.items() if id(session) not in lost]

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
                session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
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


class SnapshotTaking:
    """``publications``: those whose tables are taken. ``of_standby``: the server is a standby. Without state."""

    def __init__(
        self, publications: Sequence[str], column_names: ColumnNames, *, of_standby: bool = False
    ) -> None:
        self._publications = tuple(publications)
        self._column_names = column_names
        self._of_standby = of_standby
        self._wal_end = _REPLAYED if of_standby else _INSERTED
        """The function that tells where the WAL ends: inserted on a primary, replayed on a standby."""

    def take(
        self,
        observer: psycopg.Connection[Any],
        session: psycopg.Connection[Any],
        sources: Sequence[PublishedSource],
        behind: Lsn,
        patience: Patience | None,
    ) -> dict[int, HeldSnapshot]:
        """Steps 1 to 4. The tables that ``session`` holds now, by relid.

        ``session``: its transaction has begun, and has no snapshot yet. ``observer`` asks all else. ``patience``: how a
        table that is alone waits. If it cannot be held, why is raised. None for several tables: nobody is waited for,
        and what cannot be held is left out. Errors are psycopg's, beside ours.
        """
        is_alone = patience is not None
        waits = patience if patience is not None and patience.for_writers else None
        if is_standby(observer) and not self._of_standby:
            raise Unsupported("a snapshot cannot be taken on a standby", remedy=REMEDY_STANDBY)
        # Before the lock, whose own error does not say what is missing.
        access = access_to(observer, [relid for source in sources for relid in source.locked])
        lacks = {each.name: each.lacks for each in access if each.lacks is not None}
        sources = _fit(sources, lambda source: _unreadable(source, lacks), is_alone)
        if patience is None:
            sources = _lock_at_once(session, sources)
        else:
            _lock(session, observer, sources[0], patience)
        if waits is not None:
            self._unchanged(observer, sources, is_alone)  # else it would wait for nothing
        checkpoint = None if self._of_standby else _checkpoint(observer)
        locked_lsn = _wal_end(observer, self._wal_end)
        if locked_lsn.minus(2) <= behind:
            observer.execute("SELECT txid_current()")
            locked_lsn = _wal_end(observer, self._wal_end)
        if waits is not None:
            _await_writers(observer, sources[0], waits)
        leaves = [leaf.relid for source in sources for leaf in source.leaves]
        name, bounds, rewritten = take(session, leaves, locked_lsn, self._wal_end)
        bounds = bounds.knowing(checkpoint)
        if waits is not None and not self._of_standby:
            bounds = replace(bounds, writers_upto=bounds.snapshot_lsn)
        # What was altered before the lock is found behind the snapshot, too. A partition may be attached under the
        # lock, and brings its rows.
        sources = self._unchanged(observer, sources, is_alone)
        sources = _fit(sources, lambda source: _rewritten(source, rewritten), is_alone)
        by_range = observer.info.server_version >= PG14
        return {each.relation.relid: HeldSnapshot(name, bounds, each, by_range) for each in sources}

    def _unchanged(
        self, observer: psycopg.Connection[Any], sources: Sequence[PublishedSource], is_alone: bool
    ) -> list[PublishedSource]:
        """The tables that are what they were, with the sizes of now."""
        relids = [source.relation.relid for source in sources]
        found = survey(
            observer,
            self._publications,
            within=relids,
            lock_timeout_ms=_CATALOG_WAIT_MS,
            column_names=self._column_names,
        )
        now = {each.relation.relid: each for each in found}
        fit = _fit(sources, lambda source: _changed(source, now.get(source.relation.relid)), is_alone)
        return [now[source.relation.relid] for source in fit]


def _fit(
    sources: Sequence[PublishedSource],
    fault_of: Callable[[PublishedSource], XidstreamError | None],
    is_alone: bool,
) -> list[PublishedSource]:
    """The tables without a fault. One that is alone raises it."""
    fit: list[PublishedSource] = []
    for source in sources:
        fault = fault_of(source)
        if fault is None:
            fit.append(source)
        elif is_alone:
            raise fault
    return fit


def _unreadable(source: PublishedSource, lacks: Mapping[str, Access]) -> TableUnreadable | None:
    for name in (source.name, *map(_leaf_text, source.leaves)):
        if name in lacks:
            return TableUnreadable(
                f"the snapshot of table {name}: the role lacks {lacks[name].value}",
                remedy=REMEDY_ROW_SECURITY if lacks[name] is Access.ALL_ROWS else REMEDY_SELECT,
            )
    return None


def _changed(source: PublishedSource, now: PublishedSource | None) -> SnapshotInterrupted | None:
    if now is None:
        return SnapshotInterrupted(f"table {source.name} was dropped, or is not published any more")
    if _definition(now) != _definition(source):
        reason = reason_it_ended(signature_of(source), now) or "its definition changed"
        return SnapshotInterrupted(f"table {source.name} changed before its snapshot: {reason}")
    return None


def _rewritten(source: PublishedSource, relids: set[int]) -> SnapshotInterrupted | None:
    """The snapshot is older than a file of the table."""
    for leaf in source.leaves:
        if leaf.relid in relids:
            return SnapshotInterrupted(
                f"table {_leaf_text(leaf)} was rewritten or dropped as its snapshot was taken"
            )
    return None


def _lock_at_once(
    session: psycopg.Connection[Any], sources: Sequence[PublishedSource]
) -> list[PublishedSource]:
    """Lock those that nobody keeps, or waits to have."""
    try:
        if sources:
            session.execute(_lock_statement(sources, " NOWAIT"))
        return list(sources)
    except psycopg.errors.OutOfMemory:
        raise
    except psycopg.Error:
        session.execute("ROLLBACK")
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    locked = []
    for source in sources:
        session.execute("SAVEPOINT one")
        try:
            session.execute(_lock_statement([source], " NOWAIT"))
            locked.append(source)
        except psycopg.Error:
            session.execute("ROLLBACK TO one")
        session.execute("RELEASE one")
    return locked


def _lock_statement(sources: Sequence[PublishedSource], nowait: str = "") -> bytes:
    names: dict[tuple[str, str], None] = {}
    for source in sources:
        names[source.relation.schema, source.relation.table] = None
        names |= dict.fromkeys((leaf.schema, leaf.table) for leaf in source.leaves)
    # With ONLY, because a partition that was attached since would be locked without a check of what it is.
    tables = ", ".join(f"ONLY {quote_identifier(s)}.{quote_identifier(t)}" for s, t in names)
    return f"LOCK TABLE {tables} IN ACCESS SHARE MODE{nowait}".encode()


def _lock(
    session: psycopg.Connection[Any],
    observer: psycopg.Connection[Any],
    source: PublishedSource,
    patience: Patience,
) -> None:
    while True:
        session.execute(f"SET LOCAL lock_timeout = {patience.lock_timeout_ms}".encode())
        try:
            session.execute(_lock_statement([source]))
            break
        except psycopg.errors.LockNotAvailable:
            session.execute("ROLLBACK")
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            holders = lock_holders(observer, source.locked, "AccessExclusiveLock")
            patience.pause(tuple(each.blocker for each in holders))
    session.execute("SET LOCAL lock_timeout = 0")


def _await_writers(observer: psycopg.Connection[Any], source: PublishedSource, patience: Patience) -> None:
    older: tuple[Writer, ...] = writers_of(observer, source.locked)
    while older:
        patience.pause(tuple(writer.blocker for writer in older))
        # Only those that were there at the start: who writes from now on, writes to a published table.
        current = writers_of(observer, source.locked)
        older = tuple(writer for writer in current if any(writer.is_same(other) for other in older))


def _wal_end(observer: psycopg.Connection[Any], function: str) -> Lsn:
    row = observer.execute(f"SELECT {function}()::text".encode()).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


def _checkpoint(observer: psycopg.Connection[Any]) -> Checkpoint | None:
    """The last one; None where the server tells nobody of it."""
    try:
        row = observer.execute("SELECT redo_lsn::text, next_xid FROM pg_control_checkpoint()").fetchone()
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported):
        return None
    assert row is not None
    epoch, xid = row[1].split(":")
    return Checkpoint(Lsn.parse(row[0]), (int(epoch) << 32) + int(xid))


def take(
    session: psycopg.Connection[Any], relids: Sequence[int], locked_lsn: Lsn, wal_end: str = _INSERTED
) -> tuple[str, SnapshotBounds, set[int]]:
    """The snapshot of ``session``'s transaction, which has these tables locked: its name, what it contains, and the
    tables that have another file than it knows. ``locked_lsn`` is B."""
    is_new = session.info.server_version >= PG13
    snapshot = "pg_current_snapshot" if is_new else "txid_current_snapshot"
    query = _TAKE.format(snapshot=snapshot, wal_end=wal_end)
    row = session.execute(query.encode(), (list(relids),)).fetchone()
    assert row is not None
    snapshot, name, after, taken_at_us, in_place = row
    xmin, xmax, xip = snapshot.split(":")
    bounds = SnapshotBounds(
        # Both positions are where a commit may begin (``pipeline.snapshot.bounds``).
        snapshot_lsn=locked_lsn.minus(2),
        valid_from=Lsn.parse(after).before,
        xmin=int(xmin),
        xmax=int(xmax),
        xip=tuple(sorted(int(xid) for xid in xip.split(",") if xid)),
        taken_at_us=taken_at_us,
    )
    return name, bounds, set(relids) - set(in_place or ())


def _definition(source: PublishedSource) -> tuple[object, ...]:
    """All but sizes and files, which may change before the lock."""
    leaves = tuple((leaf.relid, leaf.schema, leaf.table) for leaf in source.leaves)
    return (
        source.relation,
        source.attnums,
        source.published_as,
        source.row_filter,
        source.unpublished_operations,
        leaves,
    )


def _leaf_text(leaf: Leaf) -> str:
    return table_label(leaf.schema, leaf.table)
