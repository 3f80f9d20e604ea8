"""Scratch: replaced by the helper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.relations.relation import Column, ReplicaIdentity
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource


def survey(connection: psycopg.Connection[Any], publications: Sequence[str]) -> tuple[PublishedSource, ...]:
    found = []
    rows = connection.execute(
        "SELECT DISTINCT ON (c.oid) c.oid::int8, n.nspname, c.relname, c.relreplident::text, t.rowfilter, t.attnames::text[]"
        " FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname"
        " JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename WHERE t.pubname = ANY(%s)",
        (list(publications),),
    ).fetchall()
    for oid, schema, table, ident, rowfilter, names in rows:
        cols = connection.execute(
            "SELECT a.attname, a.atttypid::int8, a.atttypmod, coalesce(i.indisprimary, false), ty.typtype::text, ty.typbasetype::int8"
            " FROM pg_attribute a JOIN pg_type ty ON ty.oid = a.atttypid"
            " LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY(i.indkey)"
            " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            (oid,),
        ).fetchall()
        columns = tuple(
            Column(n, t, m, True if ident == "f" else k, None) for n, t, m, k, _, _ in cols if n in names
        )
        relation = RelationVersion(oid, schema, table, ReplicaIdentity(ident), columns)
        leaves = tuple(
            Leaf(*row)
            for row in connection.execute(
                "WITH RECURSIVE m AS (SELECT %s::oid AS oid UNION SELECT inhrelid FROM pg_inherits JOIN m ON inhparent = m.oid)"
                " SELECT c.oid::int8, n.nspname, c.relname, pg_relation_size(c.oid)/8192, pg_table_size(c.oid)"
                " FROM m JOIN pg_class c ON c.oid = m.oid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE relkind = 'r'"
                " ORDER BY 1",
                (oid,),
            )
        )
        found.append(PublishedSource(relation, f"x:{oid}", rowfilter, leaves))
    return tuple(found)
