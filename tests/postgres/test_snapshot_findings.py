"""What the preflight says of the tables' snapshots."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.postgres import snapshot_findings as snapshot_findings_module
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.snapshot_findings import room_for, snapshot_findings

pytestmark = pytest.mark.postgres


def findings(dsn: str, connections_wanted: int = 8) -> dict[str, Finding]:
    with sql_connection(dsn, "a test") as connection:
        return {each.check: each for each in snapshot_findings(connection, ["p"], connections_wanted)}


def bad(found: dict[str, Finding]) -> dict[str, Status]:
    return {check: each.status for check, each in found.items() if each.status is not Status.OK}


def test_a_role_that_may_read_all_has_nothing_but_ok(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    found = findings(database.dsn())
    assert bad(found) == {}
    assert found["snapshot_size"].statement.startswith("1 table of ")


def test_tables_that_cannot_be_read_whole_are_named(database: Database) -> None:
    role = f"role_{database.name}"
    for statement in (
        "CREATE TABLE unread (id int)",
        "CREATE TABLE hidden (id int)",
        "CREATE TABLE fine (id int)",
        "ALTER TABLE hidden ENABLE ROW LEVEL SECURITY",
        "CREATE PUBLICATION p FOR ALL TABLES",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SELECT ON hidden, fine TO {role}",
    ):
        database.execute(statement)
    try:
        found = findings(database.dsn(user=role))
    finally:
        database.execute(f"DROP OWNED BY {role}")
        database.execute(f"DROP ROLE {role}")
    assert bad(found) == {"snapshot_select": Status.FAILED, "snapshot_row_security": Status.FAILED}
    assert found["snapshot_select"].statement == "the role may not read public.unread, as a snapshot does"
    assert "public.hidden" in found["snapshot_row_security"].statement


def test_limits_of_the_server_are_warned_of(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(
        settings={
            "max_connections": "12",
            "max_wal_senders": "2",
            "max_slot_wal_keep_size": "1MB",
            "idle_replication_slot_timeout": "1h",
            "max_locks_per_transaction": "10",
        }
    )
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE TABLE t (id int) PARTITION BY LIST (id)")
        for i in range(170):
            admin.execute(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES IN ({i})".encode())
        admin.execute("INSERT INTO t SELECT 1 FROM generate_series(1, 50000)")
        admin.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
        found = findings(server.conninfo(), 20)
        assert bad(found) == {
            "snapshot_connections": Status.WARNING,
            "snapshot_wal": Status.WARNING,
            "snapshot_idle_slot": Status.WARNING,
            "snapshot_locks": Status.WARNING,
        }
        wait_until(lambda: room_for(admin, 1000) == 11)
        assert room_for(admin, 4) == 4
        others = [psycopg.connect(server.conninfo()) for _ in range(9)]
        assert findings(server.conninfo())["snapshot_connections"].status is Status.FAILED
        for other in others:
            other.close()


def test_a_transaction_that_has_written_for_long_is_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_findings_module, "_OLD_WRITER", datetime.timedelta(0))
    database.execute("CREATE TABLE t (id int)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    with database.connect() as writer, database.connect() as reader:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (1)")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM t")
        found = findings(database.dsn())
        assert bad(found) == {"snapshot_writers": Status.WARNING}
        assert f"session {writer.info.backend_pid} " in found["snapshot_writers"].statement


def test_a_standby_is_a_failure_and_nothing_else_is_asked(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    server = own_postgres()
    server.stop()
    (server.data_dir / "standby.signal").touch()
    server.start()
    (found,) = findings(server.conninfo()).values()
    assert (found.check, found.status, found.raises) == ("snapshot_primary", Status.FAILED, Unsupported)
