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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import ColumnNames, table_label
from xidstream.pipeline.postgres.admin import Blocker, sql_connection, translated
from xidstream.pipeline.postgres.failures import from_error
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.snapshot_findings import room_for
from xidstream.pipeline.postgres.snapshot_sources import measured, survey
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
        self._column_names = column_names
        self._wal_end = _REPLAYED if of_standby else _INSERTED
        """The function that tells where the WAL ends: inserted on a primary, replayed on a standby."""
        self._publications = tuple(publications)
        """The publications whose tables may be held."""
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
        relid, doing = source.relation.relid, f"the snapshot of table {source.name}"
        waiting = _Waiting(self, relid, on_wait)
        with self._guard:
            self._wanted[relid] = waiting
        try:
            with self._observing(doing) as observer:
                _check_access(observer, source, self._wal_end is _REPLAYED)
                session = self._session(doing)
                try:
                    with _reported(doing):
                        _lock(session, observer, source, lock_timeout_ms, waiting)
                        now = self._again(observer, source)
                        checkpoint = None if self._wal_end is _REPLAYED else _checkpoint(observer)
                        locked_lsn = _wal_end(observer, self._wal_end)
                        if locked_lsn.minus(2) <= behind:
                            observer.execute("SELECT txid_current()")
                            locked_lsn = _wal_end(observer, self._wal_end)
                        if wait_for_writers:
                            _await_writers(observer, now, waiting)
                        name, bounds = take(session, now, locked_lsn, self._wal_end)
                        # A partition may be attached under our lock, and brings its rows.
                        self._again(observer, now)
                    bounds = bounds.knowing(checkpoint)
                    if wait_for_writers and self._wal_end is not _REPLAYED:
                        bounds = replace(bounds, writers_upto=bounds.snapshot_lsn)
                    (now,) = measured(session, [now])
                    held = HeldSnapshot(name, bounds, now, observer.info.server_version >= PG14)
                    with self._guard:
                        self._check_wanted(relid, waiting)
                        previous, self._sessions[relid] = self._sessions.get(relid), session
                    if previous is not None:
                        self._end_unused([previous])
                    return held
                except BaseException:
                    session.close()
                    raise
        finally:
            with self._guard:
                self._waiting.pop(relid, None)

    def hold_together(
        self, sources: Sequence[PublishedSource], *, behind: Lsn = INVALID_LSN
    ) -> dict[int, HeldSnapshot]:
        """Take one snapshot of all of these tables, and keep it until each of them is released. By relid.

        Nobody is waited for, and a table that cannot be held now, for whatever reason, is not among them: ``hold`` it
        alone, which says why. ``behind``: as there. Raises what ``hold`` raises where that concerns all.
        """
        doing = f"the snapshot of {len(sources)} tables"
        relids = [source.relation.relid for source in sources]
        call = object()
        with self._guard:
            self._wanted |= dict.fromkeys(relids, call)
        with self._observing(doing, len(sources)) as observer:
            session = self._session(doing)
            try:
                with _reported(doing):
                    locked = _lock_at_once(session, _readable(observer, sources))
                    checkpoint = _checkpoint(observer)
                    locked_lsn = _wal_end(observer, self._wal_end)
                    if locked_lsn.before.before <= behind:
                        observer.execute("SELECT txid_current()")
                        locked_lsn = _wal_end(observer, self._wal_end)
                    leaves = [leaf for source in locked for leaf in source.leaves]
                    name, bounds, rewritten = _take(session, leaves, locked_lsn, self._wal_end)
                    locked = [each for each in locked if not rewritten.intersection(each.leaves)]
                    # Once, behind the snapshot: what was altered before the lock is found here, too.
                    locked = measured(session, self._unchanged(observer, locked))
                bounds, by_range = bounds.knowing(checkpoint), observer.info.server_version >= PG14
                held = {each.relation.relid: HeldSnapshot(name, bounds, each, by_range) for each in locked}
                with self._guard:
                    is_over = self._closed.is_set()
                    held = {
                        relid: each
                        for relid, each in held.items()
                        if self._wanted.get(relid) is call and not is_over
                    }
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
                if self._wal_end is _REPLAYED:  # what is replayed was flushed before
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

    def _again(self, observer: psycopg.Connection[Any], source: PublishedSource) -> PublishedSource:
        """The table under the lock. Raises SnapshotInterrupted where it is another one."""
        relid = source.relation.relid
        found = self._survey(observer, [relid])
        now = next((each for each in found if each.relation.relid == relid), None)
        if now is None:
            raise SnapshotInterrupted(f"table {source.name} was dropped, or is not published any more")
        if _definition(now) != _definition(source):
            reason = reason_it_ended(signature_of(source), now) or "its definition changed"
            raise SnapshotInterrupted(f"table {source.name} changed before its snapshot: {reason}")
        return now

    def _unchanged(
        self, observer: psycopg.Connection[Any], sources: Sequence[PublishedSource]
    ) -> list[PublishedSource]:
        """The tables that are what they were, as ``_again`` finds them."""
        relids = [source.relation.relid for source in sources]
        found = self._survey(observer, relids)
        now = {each.relation.relid: each for each in found}
        asked = ((source, now.get(source.relation.relid)) for source in sources)
        return [
            each for source, each in asked if each is not None and _definition(each) == _definition(source)
        ]

    def _survey(
        self, observer: psycopg.Connection[Any], relids: Sequence[int]
    ) -> tuple[PublishedSource, ...]:
        return survey(
            observer,
            self._publications,
            within=relids,
            lock_timeout_ms=_CATALOG_WAIT_MS,
            column_names=self._column_names,
        )

    def _check_wanted(self, relid: int, call: object) -> None:
        """Raises SnapshotLost where the holder was closed, or the table released since ``call`` began."""
        if self._closed.is_set() or self._wanted.get(relid) is not call:
            raise SnapshotLost("the snapshot of a table was given up")

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
        self._holder._check_wanted(self._relid, self)


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


def _check_access(observer: psycopg.Connection[Any], source: PublishedSource, of_standby: bool) -> None:
    """Before the lock, whose own error does not say what is missing."""
    if is_standby(observer) and not of_standby:
        raise Unsupported("a snapshot cannot be taken on a standby", remedy=REMEDY_STANDBY)
    for access in access_to(observer, source.locked):
        if access.lacks is not None:
            raise TableUnreadable(
                f"the snapshot of table {access.name}: the role lacks {access.lacks.value}",
                remedy=REMEDY_ROW_SECURITY if access.lacks is Access.ALL_ROWS else REMEDY_SELECT,
            )


def _readable(observer: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[PublishedSource]:
    """The tables that the role may read. Raises Unsupported on a standby."""
    if is_standby(observer):
        raise Unsupported("a snapshot cannot be taken on a standby", remedy=REMEDY_STANDBY)
    locked = [relid for source in sources for relid in source.locked]
    lacking = {access.name for access in access_to(observer, locked) if access.lacks is not None}
    return [each for each in sources if lacking.isdisjoint([each.name, *map(_leaf_text, each.leaves)])]


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
    lock_timeout_ms: int,
    waiting: _Waiting,
) -> None:
    while True:
        session.execute(f"SET LOCAL lock_timeout = {lock_timeout_ms}".encode())
        try:
            session.execute(_lock_statement([source]))
            break
        except psycopg.errors.LockNotAvailable:
            session.execute("ROLLBACK")
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            waiting.pause(
                tuple(w.blocker for w in lock_holders(observer, source.locked, "AccessExclusiveLock"))
            )
    session.execute("SET LOCAL lock_timeout = 0")


def _await_writers(observer: psycopg.Connection[Any], source: PublishedSource, waiting: _Waiting) -> None:
    older: tuple[Writer, ...] = writers_of(observer, source.locked)
    while older:
        waiting.pause(tuple(writer.blocker for writer in older))
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
    session: psycopg.Connection[Any], source: PublishedSource, locked_lsn: Lsn, wal_end: str = _INSERTED
) -> tuple[str, SnapshotBounds]:
    """The snapshot of ``session``'s transaction, which has the table locked: its name, and what it contains.
    ``locked_lsn`` is B. Raises SnapshotInterrupted if the snapshot is older than a file of the table."""
    name, bounds, rewritten = _take(session, source.leaves, locked_lsn, wal_end)
    if rewritten:
        raise SnapshotInterrupted(
            f"table {_leaf_text(min(rewritten, key=_leaf_text))} was rewritten or dropped as its snapshot was taken"
        )
    return name, bounds


def _take(
    session: psycopg.Connection[Any], leaves: Sequence[Leaf], locked_lsn: Lsn, wal_end: str
) -> tuple[str, SnapshotBounds, set[Leaf]]:
    """What ``take`` returns, and the tables that have another file than their snapshot knows."""
    is_new = session.info.server_version >= PG13
    snapshot = "pg_current_snapshot" if is_new else "txid_current_snapshot"
    query = _TAKE.format(snapshot=snapshot, wal_end=wal_end)
    row = session.execute(query.encode(), ([leaf.relid for leaf in leaves],)).fetchone()
    assert row is not None
    snapshot, name, after, taken_at_us, in_place = row
    rewritten = {leaf for leaf in leaves if leaf.relid not in (in_place or ())}
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
    return name, bounds, rewritten


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
