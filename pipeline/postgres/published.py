"""Checks what the publications publish: tables, columns and replica identity.

The catalogs are read as they are now. The stream may still be at an earlier definition, because its relations are those
of the WAL's time. So these findings warn early, and the run checks each R message again.

From version 15 on ``pg_publication_tables`` opens each table (``pg_get_publication_tables`` in
``src/backend/catalog/pg_publication.c``), so it waits for whoever has locked one: a VACUUM FULL, an ALTER TABLE that is
not committed. One such table must not keep a run of all others from starting. So the wait is short, and what could not
be looked at is a finding that names the holder of the lock.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.findings import Finding, enumerate_names
from xidstream.pipeline.pg_rules import ColumnNames, table_label
from xidstream.pipeline.postgres.stream_options import PG12, PG15, PG18, quote_identifier
from xidstream.pipeline.postgres.writers import describe_lockers
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS

_LOCK_TIMEOUT_MS: Final = 2000

_COLUMNS_15: Final = """
    SELECT pubname, schemaname, tablename, attnames::text[] FROM pg_publication_tables
    WHERE pubname = ANY(%s) ORDER BY 2, 3, 1
"""
_COLUMNS_10: Final = """
    SELECT t.pubname, t.schemaname, t.tablename,
           array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attname IS NOT NULL)
    FROM pg_publication_tables AS t
    JOIN pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE t.pubname = ANY(%s) GROUP BY 1, 2, 3 ORDER BY 2, 3, 1
"""
# Partitions are checked, not their root, because the identity is needed where the row is. RelationGetIdentityKeyBitmap
# and CheckCmdReplicaIdentity (relcache.c, execReplication.c) define an identity. The query walks pg_inherits itself,
# because pg_partition_tree() exists only since version 12.
_WITHOUT_IDENTITY: Final = """
    WITH RECURSIVE member AS (
        SELECT c.oid, c.relkind
        FROM pg_publication_tables AS t
        JOIN pg_publication AS p ON p.pubname = t.pubname AND (p.pubupdate OR p.pubdelete)
        JOIN pg_namespace AS n ON n.nspname = t.schemaname
        JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
        WHERE t.pubname = ANY(%s)
      UNION
        SELECT c.oid, c.relkind
        FROM member JOIN pg_inherits AS i ON i.inhparent = member.oid JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE member.relkind = 'p'
    )
    SELECT n.nspname, c.relname
    FROM member JOIN pg_class AS c ON c.oid = member.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind <> 'p' AND (
        c.relreplident = 'n'
        OR c.relreplident = 'd' AND NOT EXISTS (
            SELECT FROM pg_index AS x WHERE x.indrelid = c.oid AND x.indisprimary AND x.indimmediate)
        OR c.relreplident = 'i' AND NOT EXISTS (
            SELECT FROM pg_index AS x WHERE x.indrelid = c.oid AND x.indisreplident))
    ORDER BY 1, 2
"""


# The server sends what any of a table's publications publishes. (pubtruncate is there since version 11.)
_LEFT_OUT: Final = """
    SELECT t.schemaname, t.tablename,
           bool_or(p.pubinsert), bool_or(p.pubupdate), bool_or(p.pubdelete),
           bool_or(coalesce((to_jsonb(p) ->> 'pubtruncate')::bool, true))
    FROM pg_publication_tables AS t JOIN pg_publication AS p ON p.pubname = t.pubname
    WHERE t.pubname = ANY(%s) GROUP BY 1, 2 ORDER BY 1, 2
"""
_GENERATED: Final = """
    SELECT DISTINCT t.schemaname, t.tablename, a.attnum, a.attname
    FROM pg_publication_tables AS t
    JOIN pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped
    WHERE t.pubname = ANY(%s) ORDER BY 1, 2, 3
"""
_OPERATIONS: Final = ("insert", "update", "delete", "truncate")


@dataclass(frozen=True)
class PublishedTable:
    schema: str
    table: str
    columns: tuple[str, ...]
    publications: tuple[str, ...]
    lists_differ: bool
    """Whether two publications publish different columns of it. The server refuses to stream that."""

    @property
    def name(self) -> str:
        return table_label(self.schema, self.table)

    def clashes(self, column_names: ColumnNames) -> list[str]:
        """Columns that equal an earlier column or a contract column, ignoring case, as in RelationVersion."""
        seen = {name.lower() for name in CONTRACT_COLUMNS}
        names = column_names.get((self.schema, self.table), {})
        found = []
        for column in self.columns:
            name = names.get(column, column).lower()
            if name in seen:
                found.append(column)
            seen.add(name)
        return found


def missing_publications(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[Finding]:
    """One failed finding for each publication that does not exist, with the names that are close to it."""
    present = [row[0] for row in connection.execute("SELECT pubname FROM pg_publication ORDER BY 1")]
    findings = []
    for name in names:
        if name in present:
            continue
        close = difflib.get_close_matches(name, present, n=3)
        # A name in quotes in the shell, or folded by CREATE PUBLICATION, is the usual cause.
        close += [other for other in present if other.lower() == name.lower() and other not in close]
        remedy = f"CREATE PUBLICATION {quote_identifier(name)} FOR TABLE …, before the slot is created"
        if close:
            remedy = f"did you mean {enumerate_names(close)}? Otherwise: {remedy}"
        elif present:
            remedy = f"there are: {enumerate_names(present)}. Otherwise: {remedy}"
        findings.append(Finding.failed("publication", f"there is no publication {name!r}", remedy))
    return findings


def published_tables(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[PublishedTable]:
    """The tables, ordered by schema and name, with all columns that any of the publications publishes.

    Raises psycopg's LockNotAvailable if somebody keeps one of them locked.
    """
    query = _COLUMNS_15 if connection.info.server_version >= PG15 else _COLUMNS_10
    lists: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    with _lock_timeout(connection):
        rows = connection.execute(query, (list(names),)).fetchall()
    for publication, schema, table, columns in rows:
        lists.setdefault((schema, table), {})[publication] = tuple(columns or ())
    return [
        PublishedTable(
            schema,
            table,
            columns=tuple(dict.fromkeys(name for columns in by_publication.values() for name in columns)),
            publications=tuple(by_publication),
            lists_differ=len({frozenset(columns) for columns in by_publication.values()}) > 1,
        )
        for (schema, table), by_publication in lists.items()
    ]


def published_names(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[tuple[str, str]]:
    """Schema and table of each published table. Empty if one is locked, which ``check_publications`` tells."""
    try:
        return [(table.schema, table.table) for table in published_tables(connection, names)]
    except psycopg.errors.LockNotAvailable:
        return []


def check_publications(
    connection: psycopg.Connection[Any],
    names: Sequence[str],
    column_names: ColumnNames = MappingProxyType({}),
) -> list[Finding]:
    """A table that cannot be delivered for its columns' names does not keep a run from starting: it is parked."""
    missing = missing_publications(connection, names)
    if missing:
        return missing
    try:
        with _lock_timeout(connection):
            return _check_published(connection, names, column_names)
    except psycopg.errors.LockNotAvailable:
        return [
            Finding.warning(
                "publication",
                "a published table is locked, and the server does not list what is published meanwhile. The lock is "
                f"one of: {describe_lockers(connection)}",
                "check again when the lock is gone; a run can start before, and delivers what is committed",
            )
        ]


def _check_published(
    connection: psycopg.Connection[Any], names: Sequence[str], column_names: ColumnNames
) -> list[Finding]:
    tables = published_tables(connection, names)
    what = f"publication {enumerate_names(list(names))}"
    if not tables:
        return [
            Finding.warning(
                "publication",
                f"{what} publishes no table",
                "ALTER PUBLICATION … ADD TABLE …; without a table nothing arrives",
            )
        ]
    return [
        Finding.ok("publication", f"{what} publishes {len(tables)} table{'s' * (len(tables) != 1)}"),
        _check_operations(connection, names),
        _check_identity(connection, names),
        *_check_columns(tables, column_names),
        *_check_generated(connection, names, tables),
    ]


@contextmanager
def _lock_timeout(connection: psycopg.Connection[Any]) -> Iterator[None]:
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}".encode())
        yield


def _check_operations(connection: psycopg.Connection[Any], names: Sequence[str]) -> Finding:
    left_out: dict[str, list[str]] = {}
    for schema, table, *published in connection.execute(_LEFT_OUT, (list(names),)):
        missing = [name for name, is_sent in zip(_OPERATIONS, published, strict=True) if not is_sent]
        if missing:
            left_out.setdefault(", ".join(missing), []).append(table_label(schema, table))
    if not left_out:
        return Finding.ok("operations", "inserts, updates, deletes and truncates are published")
    listed = "; ".join(f"no {missing} of {enumerate_names(tables)}" for missing, tables in left_out.items())
    return Finding.warning(
        "operations",
        f"the publications leave operations out: {listed}",
        "if all changes are wanted: ALTER PUBLICATION … SET (publish = 'insert, update, delete, truncate'); what "
        "was changed before that is not sent",
    )


def _check_identity(connection: psycopg.Connection[Any], names: Sequence[str]) -> Finding:
    without = [table_label(*row) for row in connection.execute(_WITHOUT_IDENTITY, (list(names),))]
    if not without:
        return Finding.ok("replica_identity", "every published table has a replica identity")
    return Finding.warning(
        "replica_identity",
        f"no replica identity: {enumerate_names(without)}; UPDATE and DELETE fail there at the source",
        "add a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
    )


def _check_columns(tables: Sequence[PublishedTable], column_names: ColumnNames) -> list[Finding]:
    findings = [_clash(table, clashes) for table in tables if (clashes := table.clashes(column_names))]
    findings += [
        Finding.failed(
            "column_lists",
            f"table {table.name}: {enumerate_names(list(table.publications))} publish different columns of it",
            "give it the same column list in each publication",
        )
        for table in tables
        if table.lists_differ
    ]
    return findings or [Finding.ok("column_names", "no column name clashes with the contract's columns")]


def _check_generated(
    connection: psycopg.Connection[Any], names: Sequence[str], tables: Sequence[PublishedTable]
) -> list[Finding]:
    """The generated columns that nobody publishes: they would be missing in the sink without a word."""
    version = connection.info.server_version
    if version < PG12:
        return []
    # Before 15 the list of published columns was made here, of all columns; before 18 none of these can be published.
    published = {(t.schema, t.table): t.columns if version >= PG15 else () for t in tables}
    left_out: dict[str, list[str]] = {}
    for schema, table, _, column in connection.execute(_GENERATED, (list(names),)):
        if column not in published.get((schema, table), ()):
            left_out.setdefault(table_label(schema, table), []).append(column)
    if not left_out:
        return []
    listed = "; ".join(f"{enumerate_names(columns)} of {table}" for table, columns in left_out.items())
    return [
        Finding.warning(
            "generated_columns",
            f"generated columns are not published, and do not arrive: {listed}",
            "if they are wanted: ALTER PUBLICATION … SET (publish_generated_columns = stored), which sends those that "
            "are STORED; a virtual one is to be computed in the sink"
            if version >= PG18
            else "if they are wanted, compute them in the sink: PostgreSQL publishes generated columns from 18 on",
        )
    ]


def _clash(table: PublishedTable, clashes: Sequence[str]) -> Finding:
    return Finding.warning(
        "column_names",
        f"table {table.name}: column {', '.join(clashes)} has the name, ignoring case, of another column or "
        "of one of the contract's columns: its next change parks the table, and it has no snapshot",
        "give the column another name with the setting column_names, or leave it out of the publication with a column "
        "list",
    )
