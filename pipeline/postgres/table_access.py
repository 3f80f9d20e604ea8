"""Whether a role may read published tables whole, on a server where snapshots can be taken.

Asked by the preflight for all tables, and by the holder for one, before its lock: the error of LOCK names no table of a
long list.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from xidstream.pipeline.pg_rules import table_label

REMEDY_SELECT: Final = (
    "GRANT SELECT ON the table, and USAGE ON its schema, TO the role of the dsn; each partition needs a GRANT"
)
REMEDY_ROW_SECURITY: Final = (
    "ALTER ROLE … BYPASSRLS for the role of the dsn, or leave the table out of the publication"
)
REMEDY_LOCKS: Final = "raise max_locks_per_transaction and restart the server: each partition needs a lock"
REMEDY_STANDBY: Final = "give the primary's dsn: a standby does not know which transactions are open"

# NULL, of a table that was dropped meanwhile, is not false: whoever locks it will say so.
_ACCESS: Final = """
    SELECT n.nspname, c.relname, has_schema_privilege(n.oid, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
           c.relkind = 'r' AND row_security_active(c.oid)
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s::oid[]) ORDER BY 1, 2
"""


class Access(enum.Enum):
    USAGE = "USAGE on its schema"
    SELECT = "SELECT on it"
    ALL_ROWS = "the rows that its row security hides"


@dataclass(frozen=True)
class TableAccess:
    """``name``: ``schema.table``. ``lacks``: what the role has not; None where nothing is missing."""

    name: str
    lacks: Access | None


def access_to(connection: psycopg.Connection[Any], relids: Sequence[int]) -> tuple[TableAccess, ...]:
    """The access of the session's role. Row security of a partitioned table does not count: its partitions are read."""
    return tuple(
        TableAccess(
            table_label(schema, table),
            Access.USAGE
            if may_use is False
            else Access.SELECT
            if may_read is False
            else Access.ALL_ROWS
            if is_filtered
            else None,
        )
        for schema, table, may_use, may_read, is_filtered in connection.execute(
            _ACCESS.encode(), (sorted(set(relids)),)
        )
    )


def is_standby(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return row is not None and bool(row[0])
