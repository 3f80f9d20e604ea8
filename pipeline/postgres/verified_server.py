"""What a verification asks of the server, beside the snapshots of its tables: whose server it is, and a commit.

*Which server.* A change log belongs to one database of one system identifier. Rows of another one would differ, and
tell nothing. A database that was renamed has another name than its log; the log's slot is still one of its own.

*A commit.* A change log says that it has everything up to a commit. On a server where nothing is committed none would
ever stand after a snapshot. So one is made: a transaction with nothing but a logical message, which needs no right and
no table, and comes through the slot. It is the only thing that a verification writes to the source. It has a prefix of
its own, because heartbeats never reach the sink (``postgres.heartbeat``). A standby cannot write one, and before
PostgreSQL 14 pgoutput sends none.

*Who reads.* A log that is waited for has to be written by somebody. Whether a run has the slot, the server knows whose
slot it is. A standby's copy of a slot that fails over is read by nobody: the run is at the primary.

Called by ``pipeline.verify``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.postgres.admin import read_slot, sql_connection
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.stream_options import PG14

VERIFY_PREFIX: Final = "xidstream.verify"
"""The prefix of the message, in ``_messages``."""
_ASKED: Final = (
    "SELECT system_identifier::text, current_database(), pg_is_in_recovery() FROM pg_control_system()"
)
_HAS_SLOT: Final = (
    "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s AND database = current_database())"
)


@dataclass(frozen=True)
class VerifiedServer:
    """``database``: of the session. ``has_slot``: whether the log's slot belongs to it. ``can_mark``: whether ``mark``
    has an effect that the log shows."""

    system_identifier: str
    database: str
    has_slot: bool
    is_standby: bool
    can_mark: bool


def verified_server(dsn: Dsn, slot: str) -> VerifiedServer:
    """``slot``: of the log. Raises what connecting raises."""
    with sql_connection(dsn, "the server's identity") as connection:
        row, slots = (
            connection.execute(_ASKED).fetchone(),
            connection.execute(_HAS_SLOT, (slot,)).fetchone(),
        )
        assert row is not None and slots is not None
        can_mark = connection.info.server_version >= PG14 and not row[2]
        return VerifiedServer(row[0], row[1], slots[0], row[2], can_mark)


def is_read(dsn: Dsn, slot: str) -> bool:
    """Whether somebody reads the slot; also where this server cannot tell, because it is none of this database, or a
    standby's copy. Raises what connecting raises."""
    with sql_connection(dsn, "whether the slot is read") as connection:
        state, row = read_slot(connection, slot), connection.execute("SELECT current_database()").fetchone()
    assert row is not None
    is_known = state.exists and state.database == row[0] and not state.awaits_promotion
    return not is_known or bool(state.active)


def mark(dsn: Dsn) -> None:
    """Commit a message. Raises what connecting raises."""
    with sql_connection(dsn, "a commit after the snapshot") as connection:
        connection.execute("SELECT pg_logical_emit_message(true, %s, '')", (VERIFY_PREFIX,))
