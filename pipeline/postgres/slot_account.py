"""The slot's part of a run's account: one connection, a few questions of the server's views, all within seconds.

It is asked when somebody looks, and not otherwise. The views show a role its own session, so the runtime role of
docs/security.md is enough.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg

from xidstream.pipeline.account import SlotPart, Window
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import SlotState, require_slot, sql_connection
from xidstream.pipeline.postgres.login import Dsn, Login
from xidstream.pipeline.postgres.stream_options import PG13

RATE_WINDOW_S: Final = 60.0
_CONNECT_TIMEOUT_S: Final = 3
_STATEMENT_TIMEOUT_MS: Final = 3000
_SECOND_LOOK_S: Final = 0.3
"""Between two looks at the server's position, where nobody looked before."""
_POSITION: Final = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
    " ELSE pg_current_wal_flush_lsn() END::text"
)
_MIB: Final = 1 << 20


def slot_part(
    dsn: Dsn, slot: str, positions: Window, clock: Callable[[], float] = time.monotonic
) -> SlotPart:
    """``positions``: the server's, as earlier calls saw them; one is added. Raises PreconditionMissing where there is
    no such slot, and what connecting raises."""
    timed = Login.of(dsn).to(connect_timeout=str(_CONNECT_TIMEOUT_S))
    limit = {"statement_timeout": f"{_STATEMENT_TIMEOUT_MS}ms"}
    with sql_connection(timed, f"slot {slot}", limit) as connection:
        state = require_slot(connection, slot)
        server_lsn = _position(connection)
        positions.note(clock(), server_lsn)
        if positions.per_s is None:
            time.sleep(_SECOND_LOOK_S)
            server_lsn = _position(connection)
            positions.note(clock(), server_lsn)
        part = _part(state, server_lsn)
        if connection.info.server_version >= PG13:
            part = _with_limits(connection, part)
        part = dataclasses.replace(part, flush_lag_s=_flush_lag_s(connection, state))
    rate = positions.per_s
    return part if rate is None else with_forecast(part, rate[0])


def with_forecast(part: SlotPart, wal_bytes_per_s: float) -> SlotPart:
    """When the slot may be lost, if nothing more is confirmed and the server goes on to write as much. The server says
    how much it may still write (safe_wal_size) only where max_slot_wal_keep_size limits it."""
    lost_in_s = None
    if part.safe_wal_size_bytes is not None and wal_bytes_per_s > 0:
        lost_in_s = max(0.0, part.safe_wal_size_bytes / wal_bytes_per_s)
    return dataclasses.replace(part, wal_bytes_per_s=wal_bytes_per_s, lost_in_s=lost_in_s)


def _part(state: SlotState, server_lsn: Lsn) -> SlotPart:
    confirmed, restart = state.confirmed_flush, state.restart_lsn
    return SlotPart(
        name=state.name,
        database=state.database,
        plugin=state.plugin,
        active_pid=state.active_pid,
        two_phase=state.two_phase,
        confirmed_lsn=None if confirmed is None else str(confirmed),
        restart_lsn=None if restart is None else str(restart),
        server_lsn=str(server_lsn),
        behind_bytes=max(0, server_lsn - (server_lsn if confirmed is None else confirmed)),
        flush_lag_s=None,
        wal_held_bytes=max(0, server_lsn - (server_lsn if restart is None else restart)),
        wal_limit_bytes=None,
        wal_status=state.wal_status,
        safe_wal_size_bytes=None,
        invalidation_reason=state.invalidation_reason,
    )


def _with_limits(connection: psycopg.Connection[Any], part: SlotPart) -> SlotPart:
    row = connection.execute(
        "SELECT s.safe_wal_size, (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size')"
        " FROM pg_replication_slots AS s WHERE s.slot_name = %s",
        (part.name,),
    ).fetchone()
    if row is None:
        return part
    safe, limit_mb = row
    # The setting is in megabytes, and -1 means that nothing limits what a slot holds.
    limit = limit_mb * _MIB if limit_mb is not None and limit_mb >= 0 else None
    return dataclasses.replace(part, safe_wal_size_bytes=safe, wal_limit_bytes=limit)


def _flush_lag_s(connection: psycopg.Connection[Any], state: SlotState) -> float | None:
    if state.active_pid is None:
        return None
    row = connection.execute(
        "SELECT extract(epoch FROM flush_lag)::float8 FROM pg_stat_replication WHERE pid = %s",
        (state.active_pid,),
    ).fetchone()
    return None if row is None else row[0]


def _position(connection: psycopg.Connection[Any]) -> Lsn:
    row = connection.execute(_POSITION).fetchone()
    if row is None or row[0] is None:
        raise EnvironmentFault("the server has no WAL position yet")
    return Lsn.parse(row[0])
