"""What the publications publish now: each table as the stream will declare it, and the tables that have its rows.

A snapshot must look like the stream, so the catalog is read as pgoutput reads it (``get_rel_sync_entry``,
``pgoutput_row_filter_init``, ``pgoutput_column_list_init`` and ``send_relation_and_attrs`` in
``src/backend/replication/pgoutput/pgoutput.c``; ``logicalrep_write_attrs`` and ``logicalrep_write_typ`` in
``src/backend/replication/logical/proto.c``; ``RelationGetIndexList`` and ``RelationGetIdentityKeyBitmap`` in
``src/backend/utils/cache/relcache.c``). ``pg_publication_tables`` was rejected: it shows names and no reasons, and
before 16 it gives no effective column list.

The rules, for each table with rows of its own (a leaf) and each publication:

- It is published if the publication has all tables, the leaf, one of its ancestors, or the schema of one of these.
- With ``publish_via_partition_root`` it is published as the topmost ancestor that the publication has, else as itself.
- Over all publications the highest ancestor wins, and only the publications that name it say which rows and columns are
  published. Operations are those of all publications.
- A publication of all tables, or of the schema, has no row filter. Several filters are joined by OR, for each operation
  apart: only the publications of that operation count.

A row from before is read if the stream would send its INSERT. (PostgreSQL's own initial copy joins the filters of all
publications, whatever their operations, so it copies rows whose INSERT would not come: ``fetch_remote_table_info`` in
``src/backend/replication/logical/tablesync.c``.) Where no publication publishes INSERT, all their filters count.

Some queries serve all tables, however many there are. They run in one transaction, so they see one catalog. The sizes
are asked last, and an ALTER TABLE that holds a table is not waited for: then they are those of the last ANALYZE.

Called by the reader (what is published), the holder (is it still so, under the lock), and the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import SnapshotInterrupted
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.postgres.catalog_queries import (
    BASE_TYPES,
    FILLED_IN,
    FIRST_TYPE_WITH_Y,
    FIRST_TYPE_WITH_Y_10,
    IDENTITY_INDEXES,
    PUBLICATIONS,
    RELATIONS,
    SIZES,
    attributes,
    memberships,
    published_rows,
)
from xidstream.pipeline.postgres.catalog_witnesses import with_witnesses
from xidstream.pipeline.postgres.stream_options import PG11, PG12, PG17
from xidstream.pipeline.postgres.type_parts import with_type_parts
from xidstream.pipeline.postgres.writers import describe_lockers
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, shared_columns
from xidstream.pipeline.snapshot.tables import Leaf, PrimaryKey, PublishedSource

_OPERATIONS: Final = ("insert", "update", "delete", "truncate")
_SIZE_LOCK_TIMEOUT_MS: Final = 1000
_LOCK_TIMEOUT_MS: Final = 2000
_PAGE_BYTES: Final = 8192


@dataclass(frozen=True)
class _Publication:
    """A row of pg_publication. ``operations``: whether it publishes each of ``_OPERATIONS``."""

    oid: int
    via_root: bool
    operations: tuple[bool, ...]
    generated: str
    """``pubgencols`` (18): ``s`` publishes stored generated columns."""


@dataclass(frozen=True)
class _Membership:
    """A row of pg_publication_rel: ``attnums`` is its column list."""

    oid: int
    attnums: tuple[int, ...] | None
    row_filter: str | None

    @property
    def text(self) -> str:
        columns = "" if self.attnums is None else " columns " + ",".join(map(str, sorted(self.attnums)))
        if self.row_filter is None:
            return f"table {self.oid}{columns}"
        return f"table {self.oid}{columns} where {hashlib.sha256(self.row_filter.encode()).hexdigest()[:16]}"


@dataclass
class _Published:
    """One relation as the stream names it. ``by``: the publications that decide over its rows and columns.
    ``publications``: all that publish it. ``unfiltered``: those that have all tables or the schema. ``names``: the
    catalog rows that publish it."""

    relid: int
    operations: tuple[bool, ...] = (False,) * len(_OPERATIONS)
    by: dict[int, _Publication] = field(default_factory=dict)
    publications: set[int] = field(default_factory=set)
    unfiltered: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    leaves: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Relation:
    schema: str
    table: str
    kind: str
    identity: str
    file_node: int
    toast: int
    n_pages: int
    made_as_partition: bool


@dataclass(frozen=True)
class _Attribute:
    """A column. ``generated``: ``attgenerated``; ``expression``: its row in pg_attrdef, 0 where it is not generated."""

    attnum: int
    generated: str
    expression: int
    column: Column


def survey(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    *,
    within: Sequence[int] | None = None,
    lock_timeout_ms: int = 0,
    column_names: ColumnNames = MappingProxyType({}),
) -> tuple[PublishedSource, ...]:
    """The published tables, ordered by schema and name. ``within``: only of these relations and their partitions.
    ``lock_timeout_ms``: how long it waits for whoever has locked a table with a row filter, because ``pg_get_expr``
    opens the table (``src/backend/utils/adt/ruleutils.c``); 0: for ever. ``column_names``: under which columns are
    delivered by another name.

    ``connection`` has autocommit, and no transaction that is open. Errors are psycopg's, LockNotAvailable among them.
    """
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = {lock_timeout_ms}".encode())
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # What pg_get_expr writes must not depend on the role's settings.
        connection.execute("SET LOCAL search_path = pg_catalog")
        catalog = _Catalog(connection, column_names)
        found = catalog.published(publications, within)
        sources = catalog.sources(found)
    return tuple(sorted(sources, key=lambda source: (source.relation.schema, source.relation.table)))


def survey_unless_locked(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    column_names: ColumnNames = MappingProxyType({}),
) -> tuple[PublishedSource, ...]:
    """``survey``, but it raises SnapshotInterrupted, which names the lock, if a table with a row filter stays
    locked."""
    try:
        return survey(connection, publications, lock_timeout_ms=_LOCK_TIMEOUT_MS, column_names=column_names)
    except psycopg.errors.LockNotAvailable:
        message = f"a published table with a row filter is locked, by one of: {describe_lockers(connection)}"
        remedy = "no snapshot is planned until the lock is gone: end the session that has it, or wait"
        raise SnapshotInterrupted(message, remedy=remedy) from None


def measured(session: psycopg.Connection[Any], sources: Sequence[PublishedSource]) -> list[PublishedSource]:
    """``sources`` with the sizes that their leaves have now. ``session`` has them locked, so it waits for nobody: any
    other one would wait behind whoever waits to alter one of them."""
    sizes = _sizes(session, [leaf.relid for source in sources for leaf in source.leaves])
    found = []
    for source in sources:
        leaves = (
            dataclasses.replace(leaf, n_pages=n_pages, n_bytes=n_bytes)
            for leaf in source.leaves
            for n_pages, n_bytes in [sizes.get(leaf.relid, (leaf.n_pages, leaf.n_bytes))]
        )
        found.append(dataclasses.replace(source, leaves=tuple(leaves)))
    return found


def _sizes(connection: psycopg.Connection[Any], relids: list[int]) -> dict[int, tuple[int, int]]:
    """Pages of the table, and bytes with its TOAST. Empty if somebody keeps one of the tables locked."""
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_SIZE_LOCK_TIMEOUT_MS}".encode())
            rows = connection.execute(SIZES.encode(), (relids,)).fetchall()
    except psycopg.errors.LockNotAvailable:
        return {}
    # Of a table that was dropped meanwhile the functions give NULL.
    return {relid: (n_pages, n_bytes) for relid, n_pages, n_bytes in rows if n_bytes is not None}


class _Catalog:
    """The queries of one survey, and what is made of their rows."""

    def __init__(self, connection: psycopg.Connection[Any], column_names: ColumnNames) -> None:
        self._column_names = column_names
        self._connection = connection
        self._version = connection.info.server_version
        self._memberships: dict[tuple[int, int], _Membership] = {}

    def published(self, names: Sequence[str], within: Sequence[int] | None) -> list[_Published]:
        publications = {
            oid: _Publication(oid, via_root, tuple(operations), generated)
            for oid, via_root, operations, generated in self._rows(PUBLICATIONS, list(names))
        }
        oids = list(publications)
        self._memberships = {
            (publication, relid): _Membership(oid, _numbers(attnums), row_filter)
            for publication, relid, oid, attnums, row_filter in self._rows(memberships(self._version), oids)
        }
        found: dict[int, _Published] = {}
        arguments = (oids, oids) if within is None else (list(within), oids, oids)
        rows = self._rows(published_rows(self._version, within is not None), *arguments)
        for relid, kind, hits in _by_relation(rows):
            self._add(found, relid, kind, hits, publications)
        return list(found.values())

    def _add(
        self,
        found: dict[int, _Published],
        relid: int,
        kind: str,
        hits: list[tuple[int, int, int, str]],
        publications: dict[int, _Publication],
    ) -> None:
        """``hits``: publication, ancestor (or the relation itself), its level, and the catalog row that says so."""
        # A partitioned table has no rows; changes of it are published where partitions are published as their root.
        tops = {
            oid: max((level, ancestor) for pub, ancestor, level, _ in hits if pub == oid)
            if publications[oid].via_root
            else (0, relid)
            for oid in dict.fromkeys(hit[0] for hit in hits)
            if kind != "p" or publications[oid].via_root
        }
        if not tops:
            return
        level, published_as = max(tops.values())
        table = found.setdefault(published_as, _Published(published_as))
        if kind == "r":
            table.leaves.append(relid)
        table.publications |= tops.keys()
        for oid in tops:
            sent = publications[oid].operations
            table.operations = tuple(a or b for a, b in zip(table.operations, sent, strict=True))
        for oid in [oid for oid in publications if tops.get(oid, (-1, 0))[0] == level]:
            table.by[oid] = publications[oid]
            for pub, ancestor, _, name in hits:
                if pub == oid and name == "table":
                    table.names.add(self._memberships[oid, ancestor].text)
                elif pub == oid:
                    table.names.add(f"{name} of {oid}")
                    if ancestor == published_as:
                        table.unfiltered.add(oid)

    def sources(self, published: list[_Published]) -> list[PublishedSource]:
        relids = sorted({relid for table in published for relid in (table.relid, *table.leaves)})
        relations = {row[0]: _Relation(*row[1:]) for row in self._rows(RELATIONS, relids)}
        # A table that was dropped after the first query saw it is not there any more.
        published = [
            table for table in published if all(r in relations for r in (table.relid, *table.leaves))
        ]
        columns = self._columns([table.relid for table in published])
        keys, primary_keys = self._keys([table.relid for table in published], relations)
        leaves = [relid for table in published for relid in table.leaves]
        filled: dict[int, set[str]] = {}
        for relid, name in self._rows(FILLED_IN, leaves) if self._version >= PG11 else ():
            filled.setdefault(relid, set()).add(name)
        sizes = _sizes(self._connection, leaves)
        sources = [self._source(table, relations, columns, keys, filled, sizes) for table in published]
        sources = [
            dataclasses.replace(source, primary_key=_named(source, *primary_keys[source.relation.relid]))
            if source.relation.relid in primary_keys
            else source
            for source in sources
        ]
        publications = {table.relid: sorted(table.publications) for table in published}
        return with_witnesses(self._connection, with_type_parts(self._connection, sources), publications)

    def _source(
        self,
        table: _Published,
        relations: dict[int, _Relation],
        columns: dict[int, list[_Attribute]],
        keys: dict[int, set[int]],
        filled: dict[int, set[str]],
        sizes: dict[int, tuple[int, int]],
    ) -> PublishedSource:
        relation = relations[table.relid]
        there = columns.get(table.relid, [])
        shown = self._shown(table, there)
        is_full = relation.identity == ReplicaIdentity.FULL.value
        key = keys.get(table.relid, set())
        names = self._column_names.get((relation.schema, relation.table), {})
        declared = tuple(
            dataclasses.replace(each.column, is_key=is_full or each.attnum in key).renamed(names)
            for each in shown
        )
        leaves = tuple(
            Leaf(
                relid,
                relations[relid].schema,
                relations[relid].table,
                *sizes.get(relid, (relations[relid].n_pages, relations[relid].n_pages * _PAGE_BYTES)),
                file_node=relations[relid].file_node,
                toast=relations[relid].toast,
                made_as_partition=relations[relid].made_as_partition,
            )
            for relid in sorted(table.leaves)
        )
        return PublishedSource(
            RelationVersion(
                table.relid,
                relation.schema,
                relation.table,
                ReplicaIdentity(relation.identity),
                shared_columns(declared),
            ),
            published_as=json.dumps(sorted(table.names)),
            row_filter=self._row_filter(table, 0 if table.operations[0] else None),
            change_filters=tuple(self._row_filter(table, operation) for operation in (1, 2)),
            leaves=leaves,
            unpublished_operations=tuple(
                name for name, sent in zip(_OPERATIONS, table.operations, strict=True) if not sent
            ),
            attnums=tuple(column.attnum for column in shown),
            unpublished=tuple(column.attnum for column in there if column not in shown),
            expressions=tuple((c.attnum, c.expression) for c in shown if c.generated),
            missing_defaults=tuple(
                c.name for c in declared if any(c.source_name in filled.get(r, ()) for r in table.leaves)
            ),
        )

    def _shown(self, table: _Published, columns: list[_Attribute]) -> list[_Attribute]:
        """The columns that are published."""
        if not any(table.operations[:3]):
            # For TRUNCATE alone the server looks at no list.
            return [column for column in columns if not column.generated]
        lists = [self._memberships.get((oid, table.relid)) for oid in table.by]
        attnums = next((row.attnums for row in lists if row is not None and row.attnums is not None), None)
        if attnums is not None:
            return [column for column in columns if column.attnum in attnums]
        kinds = ("", "s") if next(iter(table.by.values())).generated == "s" else ("",)
        return [column for column in columns if column.generated in kinds]

    def _row_filter(self, table: _Published, operation: int | None) -> str | None:
        """``operation``: an index of ``_OPERATIONS``, whose publications count; all of them where it is None."""
        filters: list[str] = []
        for oid, publication in table.by.items():
            if operation is not None and not publication.operations[operation]:
                continue
            row = self._memberships.get((oid, table.relid))
            if row is None or row.row_filter is None or oid in table.unfiltered:
                return None
            filters.append(row.row_filter)
        return " OR ".join(f"({text})" for text in dict.fromkeys(filters)) or None

    def _columns(self, relids: list[int]) -> dict[int, list[_Attribute]]:
        rows = self._rows(attributes(self._version), relids)
        first = FIRST_TYPE_WITH_Y if self._version >= PG12 else FIRST_TYPE_WITH_Y_10
        types = dict(self._rows(BASE_TYPES, list({row[3] for row in rows if row[3] >= first})))
        found: dict[int, list[_Attribute]] = {}
        for relid, attnum, name, type_oid, type_modifier, generated, expression in rows:
            column = Column(name, type_oid, type_modifier, False, types.get(type_oid))
            found.setdefault(relid, []).append(_Attribute(attnum, generated, expression, column))
        return found

    def _keys(
        self, relids: list[int], relations: dict[int, _Relation]
    ) -> tuple[dict[int, set[int]], dict[int, tuple[int, set[int]]]]:
        """The attnums of the replica identity's index, where there is one; and under FULL the primary key's constraint
        and attnums."""
        identities: dict[int, set[int]] = {}
        primary_keys: dict[int, tuple[int, set[int]]] = {}
        for relid, is_primary, is_chosen, is_valid, is_immediate, attnums, n_keys, constraint in self._rows(
            IDENTITY_INDEXES, relids
        ):
            relation = relations[relid]
            key = {number for number in (_numbers(attnums) or ())[:n_keys] if number != 0}
            # Since 17 the primary key of a partitioned table counts before it is there in all partitions.
            counts = is_valid or (is_primary and relation.kind == "p" and self._version >= PG17)
            chosen = {"d": is_primary, "i": is_chosen}.get(relation.identity, False)
            if chosen and counts and is_immediate:
                identities[relid] = key
            is_full = relation.identity == ReplicaIdentity.FULL.value
            # One that is not in all partitions lets equal keys be in two of them.
            if is_full and is_primary and is_valid and is_immediate:
                primary_keys[relid] = (constraint, key)
        return identities, primary_keys

    def _rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode(), arguments).fetchall()


def _named(source: PublishedSource, constraint: int, attnums: set[int]) -> PrimaryKey | None:
    """The primary key with the names of its columns; None where one of them is not published."""
    names = tuple(
        column.name
        for attnum, column in zip(source.attnums, source.relation.columns, strict=True)
        if attnum in attnums
    )
    return PrimaryKey(constraint, names) if len(names) == len(attnums) else None


def _by_relation(
    rows: Iterable[tuple[Any, ...]],
) -> Iterable[tuple[int, str, list[tuple[int, int, int, str]]]]:
    found: dict[tuple[int, str], list[tuple[int, int, int, str]]] = {}
    for relid, kind, publication, ancestor, level, name in rows:
        found.setdefault((relid, kind), []).append((publication, ancestor, level, name))
    return ((relid, kind, hits) for (relid, kind), hits in found.items())


def _numbers(vector: str | None) -> tuple[int, ...] | None:
    """An int2vector's text."""
    return None if vector is None else tuple(map(int, vector.split()))
