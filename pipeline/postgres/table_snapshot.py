"""The snapshot of a table, or of several, in one session: steps 1 to 4, in this order.

1. *Lock* the tables and their leaves IN ACCESS SHARE MODE. From here on nobody rewrites, truncates or drops them.
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
   rows there, without an error. The lock alone keeps that from happening; this is its proof. Then ask the catalog
   again: each table must still be what was surveyed.

Two ways to go them. A table that is *alone* waits, for its lock and for its writers, and if it cannot be held, the
error says why. Of tables that are taken *together* nobody waits. A session that has some tables locked, and waits for
another one's owner, who waits for one of these, is a deadlock, and the server may end either of them. So what is not to
be had at once is left out, and taken alone by the caller.

An example. Five tables are asked for. Somebody alters t2, and t4 was renamed since the look at the catalog. One LOCK of
all five with NOWAIT fails. So each is locked behind a savepoint of its own, and t1, t3 and t5 are had. B is 0/5008. The
snapshot is 740:760:752, and E is 0/5200. The catalog shows the three as they were::

    t1, t3, t5  one name, one snapshot_lsn 0/5006, one valid_from 0/51FF (``pipeline.snapshot.bounds``)
    t2          alone: LOCK is asked for again, 2 s each time, until the ALTER TABLE ends; then the catalog shows
                another definition, and SnapshotInterrupted says so
    t4          alone: LOCK finds no such table, and SnapshotInterrupted says so

The catalog is asked while the locks are held, and opens a table to tell its row filter, behind whoever waits to alter
it. So that question waits a second at most, and then the snapshot is given up (SnapshotInterrupted).

On a standby a snapshot's ids tell nothing (``pg_current_snapshot`` shows no running transaction there), and B and E are
how far it has replayed. A run's snapshots need the ids, so they are refused there. A verification does without them
(``pipeline.changelog.moment``), and asks for a taking ``of_standby``.

Called by the holder (``table_holder``), which has the sessions, and keeps them. Rejected: to wait for all open
transactions, as PostgreSQL's slots do, because some never end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import SnapshotInterrupted, TableUnreadable, Unsupported, XidstreamError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import ColumnNames, table_label
from xidstream.pipeline.postgres.admin import Blocker
from xidstream.pipeline.postgres.snapshot_sources import measured, survey
from xidstream.pipeline.postgres.stream_options import PG13, PG14, quote_identifier
from xidstream.pipeline.postgres.table_access import (
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

BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
"""The session's transaction. It takes its snapshot in step 4."""
_CATALOG_WAIT_MS: Final = 1_000
"""For who waits to alter a published table that has a row filter: the catalog's text of the filter waits behind it, and
it waits for the lock that is held meanwhile."""

_TAKE: Final = """
    SELECT {snapshot}()::text, pg_export_snapshot(), {wal_end}()::text,
           (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
           (SELECT array_agg(c.oid::bigint) FROM pg_class AS c
            WHERE c.oid = ANY(%s::oid[]) AND c.relfilenode = pg_relation_filenode(c.oid))
"""

_INSERTED: Final = "pg_current_wal_insert_lsn"
_REPLAYED: Final = "pg_last_wal_replay_lsn"
"""Where the WAL ends, of a primary and of a standby."""


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
        sources = measured(session, sources)
        by_range = observer.info.server_version >= PG14
        return {each.relation.relid: HeldSnapshot(name, bounds, each, by_range) for each in sources}

    def _unchanged(
        self, observer: psycopg.Connection[Any], sources: Sequence[PublishedSource], is_alone: bool
    ) -> list[PublishedSource]:
        """The tables that are what they were."""
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
        session.execute(BEGIN)
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
            session.execute(BEGIN)
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
