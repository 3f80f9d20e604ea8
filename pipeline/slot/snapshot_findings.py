"""What the server has room for, when tables are to be read as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import psycopg

from xidstream.pipeline.findings import Finding

_ROOM: Final = """
    SELECT current_setting('max_connections')::int - (SELECT count(*) FROM pg_stat_activity
               WHERE backend_type = 'client backend')
           - CASE WHEN (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN 0
                  ELSE current_setting('superuser_reserved_connections')::int
                       + coalesce(current_setting('reserved_connections', true)::int, 0) END
"""


def free_connections(connection: psycopg.Connection[Any]) -> int:
    """How many connections the role of ``connection`` may open beside those that are there."""
    row = connection.execute(_ROOM.encode()).fetchone()
    assert row is not None
    return max(int(row[0]), 0)


def room_for(connection: psycopg.Connection[Any], wanted: int) -> int:
    """``wanted``, or as many as the server has room for; at least one."""
    return max(min(wanted, free_connections(connection)), 1)


def snapshot_findings(
    connection: psycopg.Connection[Any], publications: Sequence[str], connections_wanted: int
) -> list[Finding]:
    """What snapshots of the published tables lack, before anything is started."""
    return []
