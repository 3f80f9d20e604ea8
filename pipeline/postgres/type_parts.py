"""What decides the text of a column's values beside the rows: labels of enums, and attributes of composite types.

``ALTER TYPE … RENAME VALUE`` and ``ALTER TYPE … ADD ATTRIBUTE`` write no row and are not in the stream. From then on
the server shows other text for rows that nobody changed, and an old tuple in the stream has that text, too. So a
snapshot from before is not the table any more (``pipeline.snapshot.invalidation``).

Parts are looked for within arrays, domains, ranges and composite types. Built-in types have none that change.

Called by ``snapshot_sources``, in its transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import psycopg

from xidstream.pipeline.snapshot.tables import PublishedSource

_PARTS: Final = """
    WITH RECURSIVE part AS (
        SELECT t.oid AS named, t.oid FROM pg_type AS t WHERE t.oid = ANY(%s::oid[])
      UNION
        SELECT part.named, inside.oid
        FROM part CROSS JOIN LATERAL (
            SELECT t.typelem AS oid FROM pg_type AS t WHERE t.oid = part.oid AND t.typcategory = 'A'
          UNION ALL
            SELECT t.typbasetype FROM pg_type AS t WHERE t.oid = part.oid AND t.typtype = 'd'
          UNION ALL
            SELECT r.rngsubtype FROM pg_range AS r WHERE r.rngtypid = part.oid
          UNION ALL
            SELECT a.atttypid FROM pg_type AS t JOIN pg_attribute AS a ON a.attrelid = t.typrelid
            WHERE t.oid = part.oid AND t.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped
        ) AS inside
        WHERE inside.oid <> 0
    )
    SELECT part.named::bigint, e.oid::bigint, e.enumlabel || ' ' || e.xmin
    FROM part JOIN pg_enum AS e ON e.enumtypid = part.oid
  UNION ALL
    SELECT part.named::bigint, t.oid::bigint,
           string_agg(concat_ws(' ', a.attnum, a.atttypid, a.atttypmod, a.xmin), ', ' ORDER BY a.attnum)
    FROM part JOIN pg_type AS t ON t.oid = part.oid AND t.typtype = 'c'
         JOIN pg_attribute AS a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    GROUP BY part.named, t.oid
    ORDER BY 1, 2
"""
_FIRST_OF_USERS: Final = 16_384
"""``FirstNormalObjectId``: types with a smaller oid came with the server, and do not change."""


def with_type_parts(
    connection: psycopg.Connection[Any], sources: Sequence[PublishedSource]
) -> list[PublishedSource]:
    """``sources`` with their ``type_parts``. Errors are psycopg's."""
    types = {column.type_oid for source in sources for column in source.relation.columns}
    asked = sorted(oid for oid in types if oid >= _FIRST_OF_USERS)
    parts = connection.execute(_PARTS.encode(), (asked,)).fetchall() if asked else []
    return [
        dataclasses.replace(source, type_parts=tuple(part for part in parts if part[0] in of_source))
        for source in sources
        for of_source in [{column.type_oid for column in source.relation.columns}]
    ]
