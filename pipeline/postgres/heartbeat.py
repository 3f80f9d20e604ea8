"""A heartbeat: a logical message of our own in the server's WAL, which comes back through the slot.

Its transaction is confirmed like any other, so that the slot moves although nothing else of its publications changes.
It needs no table and no right beyond CONNECT. It goes through reader, buffers and sequencer; the decoder leaves it out
(``pg_rules.HEARTBEAT_PREFIX``), so that no sink sees it, and a batch of nothing else makes no Delta commit.

``actors.reader.heartbeat_thread`` beats, on a thread of its own. It is off by default. A reader should not write to its
source unasked, and keepalives did as much in all that was measured (docs/failover.md). It is for servers whose
keepalives tell no position.

Rejected: a table of heartbeats, as Debezium's users make one, because it needs a right, a publication and vacuum; and
a message that is not transactional, because it has no commit to be confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from xidstream.pipeline.pg_rules import HEARTBEAT_PREFIX
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.login import Dsn, Login

_TIME_LIMIT_S = 10


@contextmanager
def heartbeat_connection(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """The connection that ``write_heartbeat`` takes. Raises what connecting raises; an error inside the block is one of
    ours."""
    timed = Login.of(dsn).to(connect_timeout=str(_TIME_LIMIT_S))
    with sql_connection(timed, "heartbeat", {"statement_timeout": f"{_TIME_LIMIT_S}s"}) as connection:
        yield connection


def write_heartbeat(connection: psycopg.Connection[Any]) -> None:
    """Write one heartbeat. On a standby this is an error."""
    connection.execute("SELECT pg_logical_emit_message(true, %s, '')", (HEARTBEAT_PREFIX.decode(),))
