"""Which of some tables the server does not have any more: their oids may be given to others.

The reader asks when it has opened the slot, for the tables that are parked (``pipeline.parked``).
"""

from __future__ import annotations

from collections.abc import Collection

from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.login import Dsn

_GONE = """
SELECT asked.relid::bigint FROM unnest(%s::bigint[]) AS asked (relid)
WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = asked.relid::oid)
"""
_WAL_END = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
       ELSE pg_catalog.pg_current_wal_insert_lsn() END::text
"""


def gone_tables(dsn: Dsn, relids: Collection[int]) -> tuple[frozenset[int], Lsn]:
    """The oids of the tables that were dropped, and an LSN after the commits that dropped them. Raises as
    ``sql_connection``."""
    if not relids:
        return frozenset(), INVALID_LSN
    with sql_connection(dsn, "the tables that are parked") as connection:
        # In this order: what is not seen was dropped before the position.
        gone = frozenset(int(relid) for (relid,) in connection.execute(_GONE, (list(relids),)).fetchall())
        position = connection.execute(_WAL_END).fetchone()
    assert position is not None
    return gone, Lsn.parse(position[0])
