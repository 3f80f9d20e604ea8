"""What a role and a database set for their sessions, and what our sessions have all the same.

Each kind of session is opened as a run opens it, by a role that is no superuser.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from tests.postgres_fixtures import Database
from xidstream.pipeline.account import Window
from xidstream.pipeline.errors import SlotLost
from xidstream.pipeline.findings import Status
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import Streaming
from xidstream.pipeline.postgres.admin import (
    advance_slot,
    create_slot,
    describe_slot,
    sql_connection,
)
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.heartbeat import heartbeat_connection, write_heartbeat
from xidstream.pipeline.postgres.opening import connect_slot
from xidstream.pipeline.postgres.preflight import server_findings
from xidstream.pipeline.postgres.range_copy import RangeCopy
from xidstream.pipeline.postgres.sessions import pinned
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.slot_account import slot_part
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.snapshot.tables import CtidRange, RangeTask

pytestmark = pytest.mark.postgres

_PASSWORD: Final = "a password of this test"
_LONGER_S: Final = 2.2
"""Than every limit that the tests set."""
_numbers = itertools.count(1)

HOSTILE: Final = {
    "search_path": "shadow, pg_catalog",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "row_security": "on",
    "quote_all_identifiers": "on",
    "standard_conforming_strings": "off",
    "datestyle": "SQL, DMY",
    "intervalstyle": "sql_standard",
    "extra_float_digits": "-15",
    "timezone": "Asia/Tokyo",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "enable_tidscan": "off",
    "jit": "on",
    "client_min_messages": "error",
    "exit_on_error": "on",
    "synchronous_commit": "remote_apply",
}


class Limited:
    """A role for a run, whose settings and those of the database are set by the test."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.role = f"limited_{next(_numbers)}"
        database.execute(f"CREATE ROLE {self.role} LOGIN REPLICATION PASSWORD '{_PASSWORD}'")
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        database.execute(f"GRANT SELECT ON t TO {self.role}")
        database.execute("CREATE PUBLICATION p FOR TABLE t")
        # Over TCP, where a server's tcp_user_timeout counts.
        self.dsn = database.dsn(over_tcp=True, user=self.role, password=_PASSWORD)

    def set(self, settings: dict[str, str]) -> None:
        """For the role, for the database, and for the role in the database."""
        name, role = sql.Identifier(self.database.name), sql.Identifier(self.role)
        places = (
            sql.SQL("ROLE {}").format(role),
            sql.SQL("DATABASE {}").format(name),
            sql.SQL("ROLE {} IN DATABASE {}").format(role, name),
        )
        for place, (setting, value) in itertools.product(places, settings.items()):
            self.database.connection.execute(
                sql.SQL("ALTER {} SET {} = {}").format(place, sql.Identifier(setting), sql.SQL(value))
                if setting == "search_path"
                else sql.SQL("ALTER {} SET {} = {}").format(
                    place, sql.Identifier(setting), sql.Literal(value)
                )
            )

    def limit_everything(self) -> None:
        """Each time limit that a session may have, whatever this server's version calls it: one second."""
        rows = self.database.execute(
            "SELECT name FROM pg_settings WHERE name LIKE '%timeout%' AND unit IN ('ms', 's')"
            " AND context IN ('user', 'superuser')"
        )
        names = [name for (name,) in rows]
        assert {"statement_timeout", "lock_timeout", "wal_sender_timeout", "tcp_user_timeout"} <= set(names)
        assert ("transaction_timeout" in names) == (self.database.version >= 17)
        self.set(dict.fromkeys(names, "1s"))

    def close(self) -> None:
        # The role's last settings are those of its database, which goes at the end.
        self.database.execute(f"DROP OWNED BY {self.role}")
        self.database.execute(f"DROP ROLE {self.role}")


@pytest.fixture
def limited(database: Database) -> Iterator[Limited]:
    limited = Limited(database)
    yield limited
    limited.close()


def settings_of(limited: Limited, **options: Any) -> SlotSettings:
    return SlotSettings(limited.dsn, f"s_{limited.database.name}", ("p",), **options)


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_a_stream_outlives_every_limit_of_one_second(limited: Limited, streaming: Streaming) -> None:
    """Before its first status, within a transaction, and while its reader is paused, so that the server waits."""
    settings = settings_of(limited, streaming=streaming)
    create_slot(limited.database.dsn(), settings.slot)
    limited.database.execute(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 20000) i"
    )
    limited.limit_everything()
    slot = connect_slot(settings, create=False)
    with slot.connection as connection:
        time.sleep(_LONGER_S)
        slot.start()
        time.sleep(_LONGER_S)  # a take-over
        n_messages, has_ended = 0, False
        while not has_ended:
            data = connection.get_copy_data()
            if data is None:
                assert connection.wait_readable(20)
                continue
            n_messages += 1
            has_ended = data[0] == ord("w") and bytes(data[25:26]) in (b"C", b"c")
            if n_messages == 100:
                for _ in range(4):
                    time.sleep(_LONGER_S / 4)
                    connection.send_status(INVALID_LSN, INVALID_LSN, INVALID_LSN)
    assert n_messages > 20_000


@pytest.mark.slow
def test_creation_advance_snapshot_check_and_status_outlive_every_limit_of_one_second(
    limited: Limited,
) -> None:
    database, settings = limited.database, settings_of(limited)
    database.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 30000) i")
    other = database.connect()
    limited.limit_everything()
    with other, other.transaction():
        other.execute("INSERT INTO t VALUES (0, '')")
        creating = threading.Thread(target=create_slot, args=(limited.dsn, settings.slot))
        creating.start()
        time.sleep(_LONGER_S)
    creating.join()
    assert describe_slot(limited.dsn, settings.slot).exists

    database.execute("UPDATE t SET v = v || 'y'")
    ((end,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    advance_slot(limited.dsn, settings.slot, Lsn.parse(end))
    assert describe_slot(limited.dsn, settings.slot).confirmed_flush == Lsn.parse(end)

    findings = server_findings(settings)
    assert [f.statement for f in findings if f.status is Status.FAILED] == []
    assert slot_part(limited.dsn, settings.slot, Window(60.0)).confirmed_lsn == end

    holder = TableHolder(limited.dsn, ["p"])
    (source,) = survey(database.connection, ["p"])
    held = holder.hold(source, wait_for_writers=True)
    time.sleep(_LONGER_S)
    reader = RangeCopy(limited.dsn)
    time.sleep(_LONGER_S)
    reader.begin(held.snapshot_name)
    n_rows = 0
    for rows in reader.blocks(
        RangeTask(held.source, held.snapshot_name, CtidRange(source.leaves[0], 0, 0, None))
    ):
        n_rows += len(rows.lengths)
        time.sleep(_LONGER_S / 4)
    reader.end()
    reader.close()
    assert not holder.confirm([source.relation.relid], held.bounds.valid_from)
    holder.close()
    assert n_rows == 30_001


_ASKED: Final = (
    "SELECT name, setting FROM pg_catalog.pg_settings"
    " WHERE source IN ('user', 'database', 'database user') ORDER BY name"
)


def _of_stream(limited: Limited) -> dict[str, str]:
    with ReplicationConnection(settings_of(limited)) as connection:
        return _rows(connection.pgconn)


def _of_sql(limited: Limited) -> dict[str, str]:
    with sql_connection(limited.dsn, "a test") as connection:
        return _rows(connection.pgconn)


def _of_heart(limited: Limited) -> dict[str, str]:
    with heartbeat_connection(limited.dsn) as connection:
        write_heartbeat(connection)
        return _rows(connection.pgconn)


def _of_range_reader(limited: Limited) -> dict[str, str]:
    reader = RangeCopy(limited.dsn)
    try:
        return _rows(reader._pgconn)
    finally:
        reader.close()


def _of_holder(limited: Limited) -> dict[str, str]:
    holder = TableHolder(limited.dsn, ["p"])
    session = holder._session("a test")
    try:
        return _rows(session.pgconn)
    finally:
        session.close()


def _rows(pgconn: psycopg.pq.abc.PGconn) -> dict[str, str]:
    result = pgconn.exec_(_ASKED.encode())
    assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
    rows = [[(result.get_value(i, j) or b"").decode() for j in (0, 1)] for i in range(result.ntuples)]
    return dict(rows)


@pytest.mark.parametrize("open_session", [_of_stream, _of_sql, _of_heart, _of_range_reader, _of_holder])
def test_no_session_keeps_what_role_and_database_set(
    limited: Limited, open_session: Callable[[Limited], dict[str, str]]
) -> None:
    limited.set(HOSTILE)
    limited.limit_everything()
    kept = open_session(limited)
    # What no session of ours reads by, or what only a server's owner may decide.
    kept.pop("deadlock_timeout")
    if open_session is not _of_range_reader:
        assert kept.pop("enable_tidscan") == "off"
        assert kept.pop("jit") == "on"
    if open_session is not _of_stream:
        assert kept.pop("wal_sender_timeout") == "1000"
    assert kept == {}


def test_each_hostile_setting_is_one_that_is_pinned(database: Database) -> None:
    of_readers = {"client_encoding", "enable_tidscan", "jit"}
    assert HOSTILE.keys() <= pinned(database.connection.info.server_version).keys() | of_readers


def test_a_role_that_asks_for_a_longer_wal_sender_timeout_has_it(limited: Limited) -> None:
    limited.set({"wal_sender_timeout": "45s"})
    with ReplicationConnection(settings_of(limited)) as connection:
        assert connection.show("wal_sender_timeout") == "45s"
    dsn = limited.database.dsn(options="-c wal_sender_timeout=2s")
    with ReplicationConnection(SlotSettings(dsn, "s", ("p",))) as connection:
        assert connection.show("wal_sender_timeout") == "2s", "who asks in the DSN means this very run"


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_functions_of_a_users_schema_do_not_take_the_place_of_the_servers(
    limited: Limited, tmp_path: Path
) -> None:
    database = limited.database
    database.execute("CREATE SCHEMA shadow")
    database.execute(f"GRANT USAGE ON SCHEMA shadow TO {limited.role}")
    database.execute(
        "CREATE FUNCTION shadow.pg_current_wal_flush_lsn() RETURNS pg_lsn LANGUAGE sql AS $$SELECT '0/1'::pg_lsn$$"
    )
    database.execute("CREATE VIEW shadow.pg_replication_slots AS SELECT 's' AS slot_name")
    limited.set({"search_path": "shadow, pg_catalog"})
    assert not describe_slot(limited.dsn, "s").exists


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_the_warning_that_changes_are_lost_comes_through_whatever_a_role_wants_to_hear(
    limited: Limited,
) -> None:
    """Without it nobody would know: PostgreSQL 18 goes on without the publication."""
    limited.set({"client_min_messages": "error"})
    settings = settings_of(limited)
    create_slot(limited.dsn, settings.slot)
    slot = connect_slot(settings, create=False)
    with slot.connection as connection, pytest.raises(SlotLost, match='"p"'):
        slot.start()
        limited.database.execute("DROP PUBLICATION p")
        limited.database.execute("INSERT INTO t VALUES (1, '')")
        for _ in range(30):
            connection.check_notices()
            connection.wait_readable(1)
            connection.get_copy_data()
