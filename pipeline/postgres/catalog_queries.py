"""The queries over the catalogs that ``snapshot_sources`` asks, for the server's version.

What a version lacks is read by ``to_jsonb`` where the rows are few, else the query is written for the version. An oid
comes as bigint. An int2vector comes as text, because its array begins at 0.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.postgres.stream_options import PG12, PG14, PG15

FIRST_TYPE_WITH_Y: Final = 10_000
"""FirstGenbkiObjectId: of types from here on Y messages tell the names (12+)."""
FIRST_TYPE_WITH_Y_10: Final = 16_384
_FIRST_NORMAL_OID: Final = 16_384

# In the order of the caller's list, which is the order in which the server looks at them.
PUBLICATIONS: Final = """
    SELECT p.oid::bigint, coalesce((to_jsonb(p) ->> 'pubviaroot')::bool, false),
           ARRAY[p.pubinsert, p.pubupdate, p.pubdelete,
                 coalesce((to_jsonb(p) ->> 'pubtruncate')::bool, false)],
           coalesce(to_jsonb(p) ->> 'pubgencols', 'n')
    FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (name, place)
    JOIN pg_publication AS p ON p.pubname = wanted.name ORDER BY wanted.place
"""

# CREATE TABLE … PARTITION OF makes the table's columns together with its system columns, so some of them have one cmin
# (columns with a default are written once more). ATTACH writes each column anew: it is inherited from then on
# (MergeAttributesIntoExisting in src/backend/commands/tablecmds.c).
RELATIONS: Final = """
    SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text,
           coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.reltoastrelid::bigint, c.relpages,
           EXISTS (
               SELECT FROM pg_inherits AS i JOIN pg_attribute AS s ON s.attrelid = i.inhrelid AND s.attnum = -1
               JOIN pg_attribute AS a ON a.attrelid = i.inhrelid AND a.attnum > 0 AND NOT a.attisdropped
               WHERE i.inhrelid = c.oid AND s.xmin = i.xmin AND a.xmin = s.xmin
                 AND a.cmin::text = s.cmin::text)
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s::oid[])
"""

FILLED_IN: Final = """
    SELECT a.attrelid::bigint, a.attname FROM pg_attribute AS a
    WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.atthasmissing
"""

BASE_TYPES: Final = """
    WITH RECURSIVE base AS (
        SELECT t.oid AS named, t.oid, t.typtype, t.typbasetype FROM pg_type AS t WHERE t.oid = ANY(%s::oid[])
      UNION ALL
        SELECT b.named, t.oid, t.typtype, t.typbasetype
        FROM base AS b JOIN pg_type AS t ON b.typtype = 'd' AND t.oid = b.typbasetype
    )
    SELECT b.named::bigint, CASE WHEN n.nspname = 'pg_catalog' THEN '' ELSE n.nspname || '.' END || t.typname
    FROM base AS b JOIN pg_type AS t ON t.oid = b.oid JOIN pg_namespace AS n ON n.oid = t.typnamespace
    WHERE b.typtype <> 'd'
"""

# An index with a condition is no identity, nor one that is being dropped (RelationGetIndexList).
IDENTITY_INDEXES: Final = """
    SELECT x.indrelid::bigint, x.indisprimary, x.indisreplident, x.indisvalid, x.indimmediate, x.indkey::text,
           coalesce((to_jsonb(x) ->> 'indnkeyatts')::int, x.indnatts),
           coalesce((SELECT k.oid::bigint FROM pg_constraint AS k
                     WHERE k.conrelid = x.indrelid AND k.conindid = x.indexrelid AND k.contype = 'p'), 0)
    FROM pg_index AS x
    WHERE x.indrelid = ANY(%s::oid[]) AND x.indisunique AND x.indislive AND x.indpred IS NULL
      AND (x.indisprimary OR x.indisreplident)
"""

# Both functions open the table, so they wait for whoever has locked it.
SIZES: Final = """
    SELECT oid::bigint, pg_relation_size(oid) / current_setting('block_size')::bigint, pg_table_size(oid)
    FROM unnest(%s::oid[]) AS oid
"""


def attributes(server_version: int) -> str:
    """Relation, attnum, name, type, modifier, ``attgenerated`` (12+), and the expression's row in pg_attrdef of all
    columns of a list of relations."""
    if server_version >= PG12:
        generated = """
            a.attgenerated::text, CASE WHEN a.attgenerated = '' THEN 0 ELSE coalesce((
                SELECT d.oid::bigint FROM pg_attrdef AS d WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum), 0) END
        """
    else:
        generated = "'', 0"
    return f"""
        SELECT a.attrelid::bigint, a.attnum, a.attname, a.atttypid::bigint, a.atttypmod, {generated}
        FROM pg_attribute AS a
        WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY a.attrelid, a.attnum
    """


def memberships(server_version: int) -> str:
    """Publication, relation, the row's own oid, its column list and its row filter, for a list of publications."""
    shown = "r.prattrs::text, pg_get_expr(r.prqual, r.prrelid)" if server_version >= PG15 else "NULL, NULL"
    return f"""
        SELECT r.prpubid::bigint, r.prrelid::bigint, r.oid::bigint, {shown}
        FROM pg_publication_rel AS r WHERE r.prpubid = ANY(%s::oid[])
    """


def published_rows(server_version: int, is_within: bool) -> str:
    """Relation, its kind, publication, the ancestor that the publication has (or the relation itself), its level above
    the relation, and the kind of catalog row that says so. Arguments: the relations to look within (``is_within``), and
    twice the publications."""
    attached = "AND NOT i.inhdetachpending" if server_version >= PG14 else ""
    schemas = """
      UNION ALL
        SELECT a.relid, a.kind, n.pnpubid, a.ancestor, a.level, 'schema ' || n.oid
        FROM ancestry AS a JOIN pg_class AS c ON c.oid = a.ancestor
        JOIN pg_publication_namespace AS n ON n.pnnspid = c.relnamespace
    """
    within = """
        inside AS (
            SELECT unnest(%s::oid[]) AS oid
          UNION
            SELECT i.inhrelid FROM inside JOIN pg_inherits AS i ON i.inhparent = inside.oid
        ),
    """
    return f"""
        WITH RECURSIVE {within if is_within else ""}
        ancestry (relid, kind, ancestor, is_partition, level) AS (
            SELECT c.oid, c.relkind, c.oid, c.relispartition, 0 FROM pg_class AS c
            WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= {_FIRST_NORMAL_OID}
              {"AND c.oid IN (SELECT oid FROM inside)" if is_within else ""}
          UNION ALL
            SELECT a.relid, a.kind, c.oid, c.relispartition, a.level + 1
            FROM ancestry AS a JOIN pg_inherits AS i ON a.is_partition AND i.inhrelid = a.ancestor {attached}
            JOIN pg_class AS c ON c.oid = i.inhparent
        ),
        hit (relid, kind, publication, ancestor, level, name) AS (
            SELECT a.relid, a.kind, p.oid, a.ancestor, a.level, 'all tables'
            FROM ancestry AS a CROSS JOIN pg_publication AS p WHERE p.puballtables AND p.oid = ANY(%s::oid[])
          UNION ALL
            SELECT a.relid, a.kind, r.prpubid, a.ancestor, a.level, 'table'
            FROM ancestry AS a JOIN pg_publication_rel AS r ON r.prrelid = a.ancestor
            {schemas if server_version >= PG15 else ""}
        )
        SELECT relid::bigint, kind::text, publication::bigint, ancestor::bigint, level, name
        FROM hit WHERE publication = ANY(%s::oid[]) ORDER BY relid
    """
