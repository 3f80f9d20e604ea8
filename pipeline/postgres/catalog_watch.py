"""Looks at the catalog over one lasting session: has anything changed, what is published, and what does that prove?

A look costs the server one scan of a few catalogs, and this process nothing: the server adds up a number for each
catalog row that a table of users depends on, from the row's name and its xmin. While the sum stays, nothing was written
there, and what was read before still holds. (With 10,000 tables of 20 columns the sum took 0.2 s on PostgreSQL 18, on a
busy machine.) Otherwise the published tables are read (``snapshot_sources``).

The order within a look is what makes it a proof (``pipeline.snapshot.proven``): position, holders of locks, a short
pause, catalog. The pause is for changes that take no lock that lasts: ALTER PUBLICATION … SET writes its row and holds
nothing. On a server that waits for synchronous standbys such a change may stay unseen for longer. If it left a message
in the stream (``postgres.ddl_trigger``), nothing is proven beyond it before a look has seen it. Else it is found by a
later look, and what was answered in between was wrong.

On a standby the position is what was replayed. What is replayed is visible, so nobody has to be looked for.

Used by the slot reader's actor, one call at a time.
"""

from __future__ import annotations

import threading
import time
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.postgres.admin import held_wal_bytes, read_slot, translated
from xidstream.pipeline.postgres.ddl_trigger import installed
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.snapshot_sources import survey_unless_locked
from xidstream.pipeline.postgres.stream_options import PG11, PG13, PG14, PG15
from xidstream.pipeline.snapshot.proven import Look
from xidstream.pipeline.snapshot.tables import PublishedSource, Surveyed

_DOING: Final = "the published tables"
_PAUSE_S: Final = 0.05
_POSITION: Final = """
    SELECT pg_is_in_recovery(),
           (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)::text,
           current_setting('synchronous_standby_names') <> ''
"""
# A lock that is weaker alters nothing. Whoever has no xid has written nothing: VACUUM, most of the time.
_HOLDERS: Final = """
    SELECT DISTINCT x.transactionid::text::bigint
    FROM pg_locks AS l JOIN pg_locks AS x ON x.virtualtransaction = l.virtualtransaction
    WHERE l.locktype = 'relation' AND l.relation >= 16384 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                     'AccessExclusiveLock')
      AND x.locktype = 'transactionid' AND x.granted AND x.mode = 'ExclusiveLock'
"""


def fingerprint_query(server_version: int) -> str:
    """One text that changes when a catalog row is written that a published table may depend on. Temporary tables do not
    count: they are never published, and they come and go."""
    # A number for a row: its catalog, its oid and its xmin, in 64 bits. A sum does not depend on the rows' order.
    hash_of = (
        "hashint8extended({key} * 4294967296 + r.xmin::text::bigint, {salt})"
        if server_version >= PG11
        else "hashtext({salt} || ' ' || {key} || ' ' || r.xmin::text)"
    )
    of_users = "{0}.oid >= 16384 AND {0}.relkind IN ('r', 'p') AND {0}.relpersistence <> 't'"
    tables = f"JOIN pg_class AS t ON t.oid = r.{{}} AND {of_users.format('t')}"
    parts = [
        ("r.oid::bigint", "pg_class AS r", of_users.format("r")),
        ("r.attrelid::bigint", f"pg_attribute AS r {tables.format('attrelid')}", "r.attnum > 0"),
        ("r.oid::bigint", f"pg_attrdef AS r {tables.format('adrelid')}", "true"),
        ("r.indexrelid::bigint", f"pg_index AS r {tables.format('indrelid')}", "r.indisunique"),
        ("r.inhrelid::bigint", "pg_inherits AS r", "true"),
        ("r.oid::bigint", "pg_publication AS r", "true"),
        ("r.oid::bigint", "pg_publication_rel AS r", "true"),
        ("r.oid::bigint", "pg_namespace AS r", "r.nspname !~ '^pg_(temp|toast)'"),
        ("r.oid::bigint", "pg_type AS r", "r.oid >= 16384 AND r.typtype IN ('e', 'd', 'r')"),
        ("r.oid::bigint", "pg_enum AS r", "true"),
        # Attributes of composite types.
        (
            "r.attrelid::bigint",
            "pg_attribute AS r JOIN pg_class AS t ON t.oid = r.attrelid AND t.relkind = 'c' AND t.oid >= 16384",
            "r.attnum > 0",
        ),
    ]
    if server_version >= PG15:
        parts.append(("r.oid::bigint", "pg_publication_namespace AS r", "true"))
    sums = (
        f"(SELECT count(*) || ':' || coalesce(sum({hash_of.format(key=key, salt=i)}), 0) FROM {rows} WHERE {which})"
        for i, (key, rows, which) in enumerate(parts)
    )
    return f"SELECT concat_ws(' ', {', '.join(sums)})"


class CatalogWatch:
    """Connects at the first look, and again after an error. Raises from ``look`` what a session raises, and
    SnapshotInterrupted while somebody keeps a published table locked so that nothing can be planned."""

    def __init__(
        self,
        dsn: Dsn,
        publications: tuple[str, ...],
        slot: str,
        column_names: ColumnNames = MappingProxyType({}),
    ) -> None:
        self._column_names = column_names
        self._dsn = dsn
        self._publications = publications
        self._slot = slot
        self._connection: psycopg.Connection[Any] | None = None
        self._lock = threading.Lock()

    def look(self, known: str | None) -> Surveyed:
        """What is published now; ``sources`` is None where nothing has changed since ``known``, the fingerprint of an
        earlier look."""
        with self._lock:
            try:
                with translated(_DOING):
                    return self._look(known)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _look(self, known: str | None) -> Surveyed:
        began_s = time.thread_time()
        if self._connection is None:
            self._connection = open_session(self._dsn, _DOING)
        connection = self._connection
        look = self._position(connection)
        version = connection.info.server_version
        seen = "pg_current_snapshot()::text" if version >= PG13 else "NULL"
        fingerprint, snapshot = _row(connection, f"{fingerprint_query(version)}, {seen}")
        sources, end_lsn = None, INVALID_LSN
        if fingerprint != known:
            sources, end_lsn = self._sources(connection), self._wal_end(connection)
        held = held_wal_bytes(connection, read_slot(connection, self._slot))
        mark = installed(connection).mark if version >= PG14 else None
        cpu_s = time.thread_time() - began_s
        return Surveyed(
            sources, held, look, fingerprint, cpu_s=cpu_s, mark=mark, snapshot=snapshot, end_lsn=end_lsn
        )

    def _sources(self, connection: psycopg.Connection[Any]) -> tuple[PublishedSource, ...]:
        return survey_unless_locked(connection, self._publications, self._column_names)

    def _wal_end(self, connection: psycopg.Connection[Any]) -> Lsn:
        _, lsn, _ = _row(connection, _POSITION)
        return Lsn.parse(lsn)

    def _position(self, connection: psycopg.Connection[Any]) -> Look:
        is_standby, lsn, waits_for_standby = _row(connection, _POSITION)
        if lsn is None:
            raise EnvironmentFault("the server has no WAL position yet")
        holders: frozenset[int] = frozenset()
        if not is_standby:
            holders = frozenset(xid for (xid,) in connection.execute(_HOLDERS.encode()).fetchall())
            time.sleep(_PAUSE_S)
        return Look(Lsn.parse(lsn), holders, waits_for_standby, time.monotonic())


def _row(connection: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return tuple(row)
