"""Who has written to a table and is still open, as pg_locks tells it.

A transaction that writes rows to a table holds ROW EXCLUSIVE on it until its end. A prepared transaction keeps its
locks, without a session. ``ShareUpdateExclusiveLock`` is left out: VACUUM and ANALYZE have it, and write no rows.

A transaction is known again by its virtual id, or by a transaction id: before PostgreSQL 14 PREPARE gives it another
virtual id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from xidstream.pipeline.findings import enumerate_names
from xidstream.pipeline.postgres.admin import Blocker

_WRITING: Final = (
    "RowExclusiveLock",
    "ShareLock",
    "ShareRowExclusiveLock",
    "ExclusiveLock",
    "AccessExclusiveLock",
)

_HOLDERS: Final = """
    WITH holder AS (
        SELECT DISTINCT l.virtualtransaction AS vxid, l.pid FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.granted AND l.mode = ANY(%s)
          AND (l.relation = ANY(%s::oid[]) OR %s)
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.pid IS DISTINCT FROM pg_backend_pid()
    ), xid AS (
        SELECT h.vxid, h.pid, array_agg(l.transactionid::text::bigint) AS xids
        FROM holder AS h JOIN pg_locks AS l ON l.locktype = 'transactionid' AND l.granted
            AND l.mode = 'ExclusiveLock' AND l.virtualtransaction = h.vxid AND l.pid IS NOT DISTINCT FROM h.pid
        GROUP BY 1, 2
    )
    SELECT h.vxid, coalesce(x.xids, '{}'), h.pid, p.gid, coalesce(p.database, a.datname) AS database,
           coalesce(p.owner, a.usename) AS role, a.application_name, coalesce(p.prepared, a.xact_start) AS since
    FROM holder AS h
    LEFT JOIN xid AS x ON x.vxid = h.vxid AND x.pid IS NOT DISTINCT FROM h.pid
    LEFT JOIN pg_prepared_xacts AS p ON h.pid IS NULL AND p.transaction::text::bigint = ANY(x.xids)
    LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
    ORDER BY since
"""


@dataclass(frozen=True)
class Writer:
    """``xids``: its own and those of its subtransactions, as far as they are open. Empty: it has not written yet."""

    virtual_id: str
    xids: frozenset[int]
    blocker: Blocker

    def is_same(self, other: Writer) -> bool:
        return self.virtual_id == other.virtual_id or not self.xids.isdisjoint(other.xids)


def writers_of(connection: psycopg.Connection[Any], relids: Sequence[int]) -> tuple[Writer, ...]:
    """The open transactions that have written, or are about to write, to one of the tables."""
    return lock_holders(connection, relids, *_WRITING)


def lock_holders(
    connection: psycopg.Connection[Any], relids: Sequence[int], *modes: str
) -> tuple[Writer, ...]:
    """The open transactions, but the caller's, that have one of the tables locked in one of the modes."""
    return _lock_holders(connection, modes, relids)


def describe_lockers(connection: psycopg.Connection[Any]) -> str:
    """In words: the transactions that have locked any relation of the database so that nobody can look at it."""
    holders = _lock_holders(connection, ("AccessExclusiveLock",), None)
    return enumerate_names([str(each.blocker) for each in holders]) or "nobody any more"


def _lock_holders(
    connection: psycopg.Connection[Any], modes: Sequence[str], relids: Sequence[int] | None
) -> tuple[Writer, ...]:
    arguments = (list(modes), list(relids or ()), relids is None)
    rows = connection.execute(_HOLDERS.encode(), arguments).fetchall()
    return tuple(
        Writer(
            vxid, frozenset(xids), Blocker(min(xids, default=0), pid, gid, database, role, application, since)
        )
        for vxid, xids, pid, gid, database, role, application, since in rows
    )
