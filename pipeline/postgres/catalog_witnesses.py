"""The catalog rows that a published table depends on, with who wrote each: what shows that something came and went.

A survey compares values. ``SET SCHEMA`` there and back, ``ALTER TYPE … USING`` to the same type, or a publication whose
``publish`` was narrowed for one DELETE leave the values as they were. They do not leave the rows as they were: each
wrote a new version of a catalog row, and ``xmin`` names the transaction that did. VACUUM, ANALYZE and CREATE INDEX
update in place (``heap_inplace_update``), and leave ``xmin`` alone. Freezing keeps it, too (``HEAP_XMIN_FROZEN``).

Much that writes a catalog row changes no row of the table: GRANT, a trigger, storage options, the statistics target of
a column. So each row comes with a digest of its *harmless* values. Another xmin beside another digest says what it was.
Another xmin beside the same digest says that something happened which must be taken for the worst
(``pipeline.snapshot.invalidation``).

What stays hidden: a harmless change and one that is taken back, both between two surveys.

Called by ``snapshot_sources``, in its transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg

from xidstream.pipeline.postgres.stream_options import PG12, PG14, PG15
from xidstream.pipeline.snapshot.tables import PublishedSource, Witness

_TABLES: Final = """
    SELECT c.oid::bigint, 'pg_class ' || c.oid, c.xmin::text::bigint,
           md5(concat_ws('|', c.relfilenode, c.reltoastrelid, c.relowner, c.relacl, c.reloptions, c.reltablespace,
               c.relam, c.relnatts, c.relchecks, c.relhasrules, c.relhastriggers, c.relhassubclass, c.relrowsecurity,
               c.relforcerowsecurity)),
           'table ' || n.nspname || '.' || c.relname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY(%(relids)s::oid[])
  UNION ALL
    SELECT c.oid::bigint, 'pg_namespace ' || n.oid, n.xmin::text::bigint,
           md5(concat_ws('|', n.nspowner, n.nspacl)), 'schema ' || n.nspname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY(%(relids)s::oid[])
"""
# A partition's row tells when it came to its parent, and each parent's when it came to its own.
_PARTITIONS: Final = """
    WITH RECURSIVE place (leaf, child, parent, xmin) AS (
        SELECT i.inhrelid, i.inhrelid, i.inhparent, i.xmin FROM pg_inherits AS i
        WHERE i.inhrelid = ANY(%(relids)s::oid[])
      UNION ALL
        SELECT p.leaf, i.inhrelid, i.inhparent, i.xmin FROM place AS p JOIN pg_inherits AS i ON i.inhrelid = p.parent
    )
    SELECT p.leaf::bigint, 'pg_inherits ' || p.child || ' ' || p.parent, p.xmin::text::bigint, '',
           'partition ' || n.nspname || '.' || c.relname
    FROM place AS p JOIN pg_class AS c ON c.oid = p.child JOIN pg_namespace AS n ON n.oid = c.relnamespace
"""
_PUBLICATIONS: Final = """
    SELECT p.oid::bigint, 'pg_publication ' || p.oid, p.xmin::text::bigint, md5(concat_ws('|', p.pubname, p.pubowner)),
           'publication ' || p.pubname
    FROM pg_publication AS p WHERE p.oid = ANY(%(publications)s::oid[])
"""
_PUBLISHED_SCHEMAS: Final = """
  UNION ALL
    SELECT n.pnpubid::bigint, 'pg_publication_namespace ' || n.oid, n.xmin::text::bigint, '',
           'the schema in publication ' || p.pubname
    FROM pg_publication_namespace AS n JOIN pg_publication AS p ON p.oid = n.pnpubid
    WHERE p.oid = ANY(%(publications)s::oid[])
"""


def _columns(server_version: int) -> str:
    generated = "a.attgenerated" if server_version >= PG12 else "''"
    compression = "a.attcompression," if server_version >= PG14 else ""
    return f"""
        SELECT a.attrelid::bigint, 'pg_attribute ' || a.attrelid || ' ' || a.attnum, a.xmin::text::bigint,
               md5(concat_ws('|', a.atttypid, a.atttypmod, a.attnotnull, a.atthasdef, a.atthasmissing, a.attidentity,
                   a.attstorage, {compression} a.attstattarget, a.attacl, a.attoptions, a.attislocal, a.attinhcount,
                   CASE WHEN {generated} = '' THEN d.oid END)),
               'column ' || a.attname
        FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = ANY(%(published)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
    """


def with_witnesses(
    connection: psycopg.Connection[Any],
    sources: Sequence[PublishedSource],
    publications: Mapping[int, Sequence[int]],
) -> list[PublishedSource]:
    """``sources`` with their ``witnesses``. ``publications``: relid → oids of those that publish it. Errors are
    psycopg's."""
    version = connection.info.server_version
    schemas = _PUBLISHED_SCHEMAS if version >= PG15 else ""
    arguments = {
        "published": [source.relation.relid for source in sources],
        "relids": sorted({relid for source in sources for relid in source.locked}),
        "publications": sorted({oid for oids in publications.values() for oid in oids}),
    }

    def asked(query: str) -> dict[int, list[Witness]]:
        found: dict[int, list[Witness]] = {}
        for oid, *witness in connection.execute(query.encode(), arguments):
            found.setdefault(oid, []).append(Witness(*witness))
        return found

    columns, of_publications = asked(_columns(version)), asked(_PUBLICATIONS + schemas)
    of_relations = [asked(_TABLES), asked(_PARTITIONS)]

    def of(source: PublishedSource) -> tuple[Witness, ...]:
        relid = source.relation.relid
        published = {f"pg_attribute {relid} {attnum}" for attnum in source.attnums}
        found = [
            *(witness for witness in columns.get(relid, []) if witness.row in published),
            *(witness for each in source.locked for by in of_relations for witness in by.get(each, [])),
            *(witness for oid in publications.get(relid, []) for witness in of_publications.get(oid, [])),
        ]
        # Partitions of one table share their schema, and their place below it.
        return tuple(sorted(set(found), key=lambda witness: witness.row))

    return [dataclasses.replace(source, witnesses=of(source)) for source in sources]
