"""What the tables' snapshots need of the server, checked before they begin. Nothing is changed.

Part of the preflight. ``unread_findings`` is of a run that takes none: what it will not read, and whether the role
could. All else is of a run that takes snapshots. A table that the role may not read whole ends such a run, so that
is a failure. All else can be waited for or costs time, so it is a warning. Transactions that are
old are named, because a table that was published since they wrote to it waits for their end.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import SnapshotInterrupted, Unsupported
from xidstream.pipeline.findings import Finding, enumerate_names
from xidstream.pipeline.postgres.snapshot_sources import survey_unless_locked
from xidstream.pipeline.postgres.stream_options import PG13, PG14, PG18, version_text
from xidstream.pipeline.postgres.table_access import (
    REMEDY_LOCKS,
    REMEDY_ROW_SECURITY,
    REMEDY_SELECT,
    REMEDY_STANDBY,
    Access,
    access_to,
    is_standby,
)
from xidstream.pipeline.postgres.writers import writers_of
from xidstream.pipeline.quantities import counted, human_bytes
from xidstream.pipeline.snapshot.tables import PublishedSource

_OLD_WRITER: Final = datetime.timedelta(minutes=1)
_FEWEST_CONNECTIONS: Final = 3
"""One that holds, one that reads, and one that asks."""

_ROOM: Final = """
    SELECT current_setting('max_connections')::int
           - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
           - CASE WHEN (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN 0
                  ELSE current_setting('superuser_reserved_connections')::int
                       + coalesce(current_setting('reserved_connections', true)::int, 0) END
"""


# The statistics know a table that was never analyzed; after a crash only pg_class does. -1 (14): neither knows.
_ROWS: Final = """
    SELECT oid, CASE WHEN pg_stat_get_live_tuples(oid) > 0 THEN pg_stat_get_live_tuples(oid) ELSE reltuples END
    FROM pg_class WHERE oid = ANY(%s::oid[])
"""


def free_connections(connection: psycopg.Connection[Any]) -> int:
    """How many connections the role of ``connection`` may open beside those that are there."""
    return max(int(_value(connection, _ROOM)), 0)


def room_for(connection: psycopg.Connection[Any], wanted: int) -> int:
    """``wanted``, or as many as the server has room for; at least one."""
    return max(min(wanted, free_connections(connection)), 1)


def snapshot_findings(
    connection: psycopg.Connection[Any], publications: Sequence[str], connections_wanted: int
) -> list[Finding]:
    """``connections_wanted``: of readers and holders together. ``connection`` is as for ``survey``."""
    if is_standby(connection):
        statement = "this is a standby: snapshots of tables cannot be taken here"
        return [Finding.failed("snapshot_primary", statement, REMEDY_STANDBY, Unsupported)]
    try:
        sources = survey_unless_locked(connection, publications)
    except SnapshotInterrupted as error:
        return [Finding.warning("snapshot_size", error.message, error.remedy)]
    if not sources:
        return [Finding.ok("snapshot_size", "no table is published, so there is none to read")]
    return [
        *_check_access(connection, sources),
        _check_connections(connection, connections_wanted),
        _check_size(sources),
        *_check_ranges(connection, sources),
        *_check_locks(connection, sources),
        *_check_slot_limits(connection, sources),
        *_check_writers(connection, sources),
    ]


def unread_findings(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    taken: Collection[int],
    *,
    is_first: bool,
    may_ask: bool = True,
) -> list[Finding]:
    """Findings about the rows that a run does not read. It takes no snapshots but of ``taken`` (relids). ``is_first``:
    the stream has delivered nothing yet; later nobody can tell rows from before from those that it brought.
    ``may_ask``: whether the sink takes snapshots. ``connection`` is as for ``survey``."""
    if is_standby(connection):
        return []  # it can have none
    try:
        sources = survey_unless_locked(connection, publications)
    except SnapshotInterrupted:
        return []  # the check of the publications has told it
    # An empty table has no page, but its TOAST has one.
    unread = [s for s in sources if s.relation.relid not in taken and any(leaf.n_pages for leaf in s.leaves)]
    if not unread:
        return []
    access = access_to(connection, [relid for source in unread for relid in source.locked])
    lacking = [each.name for each in access if each.lacks is not None]
    may = f"may not read {enumerate_names(lacking)} whole" if lacking else "may read them"
    if not is_first:
        statement = f"{counted(len(unread), 'table')} without a snapshot (snapshot = never): rows from before"
        return [Finding.ok("snapshot_none", f"{statement} the stream are not read; the role {may}")]
    relids = [leaf.relid for source in unread for leaf in source.leaves]
    n_rows = [max(n, 0) for _, n in connection.execute(_ROWS.encode(), (relids,))]
    about = (
        f"about {counted(int(sum(n_rows)), 'row')}"
        if any(n_rows)
        else human_bytes(sum(s.n_bytes for s in unread))
    )
    names = enumerate_names([source.name for source in unread])
    remedy = "if the sink is to have them: --snapshot initial (docs/snapshots.md)"
    if lacking:
        remedy += f"; first {REMEDY_SELECT}"
    return [
        Finding.warning(
            "snapshot_none",
            f"{counted(len(unread), 'table')}, {about} from before the slot are not read (snapshot = never): {names}; "
            f"the role {may}",
            remedy if may_ask else "only a Delta sink and foreach can have them",
        )
    ]


def _check_access(connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[Finding]:
    access = access_to(connection, [relid for source in sources for relid in source.locked])
    unread = [each.name for each in access if each.lacks is Access.SELECT or each.lacks is Access.USAGE]
    hidden = [each.name for each in access if each.lacks is Access.ALL_ROWS]
    findings = []
    if unread:
        statement = f"the role may not read {enumerate_names(unread)}, as a snapshot does"
        findings.append(Finding.failed("snapshot_select", statement, REMEDY_SELECT))
    if hidden:
        statement = f"row security would hide rows of {enumerate_names(hidden)} from a snapshot"
        findings.append(Finding.failed("snapshot_row_security", statement, REMEDY_ROW_SECURITY))
    return findings or [Finding.ok("snapshot_select", "the role may read every published table whole")]


def _check_connections(connection: psycopg.Connection[Any], wanted: int) -> Finding:
    free = free_connections(connection)
    statement = f"{counted(free, 'connection')} of {_value(connection, 'SHOW max_connections')} free"
    if free < _FEWEST_CONNECTIONS:
        return Finding.failed(
            "snapshot_connections",
            f"{statement}, a snapshot needs {_FEWEST_CONNECTIONS} at least",
            "end other clients, or raise max_connections and restart the server",
        )
    if free < wanted:
        return Finding.warning(
            "snapshot_connections",
            f"{statement}: snapshots would use {wanted}, and do with fewer",
            "end other clients, raise max_connections, or lower snapshot_connections",
        )
    return Finding.ok("snapshot_connections", f"{statement}, enough for the {wanted} of snapshots")


def _check_size(sources: Sequence[PublishedSource]) -> Finding:
    total = sum(source.n_bytes for source in sources)
    largest = max(sources, key=lambda source: source.n_bytes)
    statement = f"{counted(len(sources), 'table')} of {human_bytes(total)} to read"
    if len(sources) > 1:
        statement += f"; the largest is {largest.name} ({human_bytes(largest.n_bytes)})"
    return Finding.ok("snapshot_size", statement)


def _check_ranges(connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[Finding]:
    version = connection.info.server_version
    if version >= PG14:
        return []
    return [
        Finding.warning(
            "snapshot_ranges",
            f"PostgreSQL {version_text(version)} cannot scan a range of a table's pages: each table has one reader",
            "PostgreSQL 14 and newer can",
        )
    ]


def _check_locks(connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[Finding]:
    most = max(sources, key=lambda source: len(source.leaves))
    room = int(
        _value(
            connection,
            "SELECT current_setting('max_locks_per_transaction')::int"
            " * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)",
        )
    )
    if len(most.leaves) <= room // 2:
        return []
    statement = (
        f"{most.name} has {len(most.leaves):,} partitions to lock, and the server has {room:,} locks in all"
    )
    return [Finding.warning("snapshot_locks", statement, REMEDY_LOCKS)]


def _check_slot_limits(
    connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]
) -> list[Finding]:
    """What the server allows a slot that waits for the tables, or is slowed down by them."""
    findings = []
    total = sum(source.n_bytes for source in sources)
    version = connection.info.server_version
    if version >= PG13:
        keep_mb = int(
            _value(connection, "SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size'")
        )
        if 0 <= keep_mb << 20 < total:
            findings.append(
                Finding.warning(
                    "snapshot_wal",
                    f"max_slot_wal_keep_size is {human_bytes(keep_mb << 20)}, less than there is to read: if the "
                    "stream waits for the tables, and more than that is written meanwhile, the slot is lost",
                    "raise max_slot_wal_keep_size while tables are read; a Delta sink's stream does not wait",
                )
            )
    if version >= PG18:
        timeout_s = int(
            _value(connection, "SELECT setting FROM pg_settings WHERE name = 'idle_replication_slot_timeout'")
        )
        if timeout_s > 0:
            findings.append(
                Finding.warning(
                    "snapshot_idle_slot",
                    f"idle_replication_slot_timeout is {timeout_s} s: a slot that nobody reads for so long is lost, "
                    "and the slot of a function waits unread for its tables",
                    "ALTER SYSTEM SET idle_replication_slot_timeout = 0 while tables are read",
                )
            )
    return findings


def _check_writers(connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[Finding]:
    now = _value(connection, "SELECT clock_timestamp()")
    writers = writers_of(connection, [relid for source in sources for relid in source.locked])
    old = [w.blocker for w in writers if w.blocker.since is not None and now - w.blocker.since > _OLD_WRITER]
    if not old:
        return []
    return [
        Finding.warning(
            "snapshot_writers",
            f"{enumerate_names([str(blocker) for blocker in old], 3)} wrote to published tables: the snapshot of a "
            "table that was published since waits for them",
            "end them, or wait",
        )
    ]


def _value(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
