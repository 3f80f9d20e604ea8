"""Slots described, created and dropped on real servers, and what their creation waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ConfigError, PreconditionMissing, SlotInUse, Unsupported
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import (
    Blocker,
    create_slot,
    current_flush_lsn,
    describe_slot,
    drop_slot,
    held_wal_bytes,
    read_slot,
    stream_stats,
)
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import stream_options

pytestmark = pytest.mark.postgres


def test_slot_is_created_described_and_dropped(database: Database) -> None:
    name = f"s_{database.name}"
    assert describe_slot(database.dsn(), name).exists is False
    consistent_point = create_slot(database.dsn(), name)
    state = describe_slot(database.dsn(), name)
    assert (state.exists, state.plugin, state.database) == (True, "pgoutput", database.name)
    assert (state.active, state.active_pid) == (False, None)
    assert (state.two_phase, state.is_lost, state.wal_status) == (False, False, "reserved")
    assert state.confirmed_flush == consistent_point
    assert state.restart_lsn is not None
    assert INVALID_LSN < state.restart_lsn <= consistent_point
    drop_slot(database.dsn(), name)
    assert describe_slot(database.dsn(), name).exists is False


def test_two_phase_and_failover_are_set_where_the_server_has_them(database: Database) -> None:
    name = f"s_{database.name}"
    if database.version < 17:
        with pytest.raises(Unsupported, match="PostgreSQL 17"):
            create_slot(database.dsn(), name, failover=True)
        create_slot(database.dsn(), name, two_phase=True)
    else:
        create_slot(database.dsn(), name, two_phase=True, failover=True)
        asked = "select failover, temporary from pg_replication_slots where slot_name = %s"
        assert database.execute(asked, name) == [(True, False)]
    assert describe_slot(database.dsn(), name).two_phase is True


def test_name_that_is_taken_and_names_that_are_not_legal(database: Database) -> None:
    name = f"s_{database.name}"
    create_slot(database.dsn(), name)
    with pytest.raises(PreconditionMissing, match="already exists"):
        create_slot(database.dsn(), name)
    for illegal in ("", "Upper", "a-b", "s'; DROP TABLE t", "x" * 64):
        with pytest.raises(ConfigError, match="not a slot's name"):
            create_slot(database.dsn(), illegal)


def test_dropping_what_is_not_there_or_in_use(database: Database) -> None:
    made = SlotSettings(database.dsn(), f"s_{database.name}", ("pub",))
    with pytest.raises(PreconditionMissing, match="does not exist") as missing:
        drop_slot(made.dsn, made.slot)
    assert "check its name" in missing.value.remedy and "create" not in missing.value.remedy
    create_slot(made.dsn, made.slot)
    with pytest.raises(PreconditionMissing, match="slot nope does not exist") as missing:
        drop_slot(made.dsn, "nope")
    assert made.slot in missing.value.remedy
    with ReplicationConnection(made) as connection:
        connection.start_replication(made.slot, INVALID_LSN, stream_options(made, connection.server_version))
        state = describe_slot(made.dsn, made.slot)
        assert (state.active, state.active_pid) == (True, connection.pgconn.backend_pid)
        with pytest.raises(SlotInUse):
            drop_slot(made.dsn, made.slot)


def test_creation_names_the_prepared_transaction_it_waits_for(database: Database) -> None:
    """Fact 28. The waiting is real: the test ends it from inside on_wait."""
    name = f"s_{database.name}"
    gid = "../../etc/'\"; drop|é"
    with database.connect() as other:
        other.execute("CREATE TABLE t (id int)")
        other.execute("BEGIN; INSERT INTO t VALUES (1)")
        other.execute("PREPARE TRANSACTION '../../etc/''\"; drop|é'")
    seen: list[Blocker] = []

    def on_wait(blockers: tuple[Blocker, ...]) -> None:
        seen.extend(blockers)
        if blockers:
            database.connection.execute("ROLLBACK PREPARED '../../etc/''\"; drop|é'")

    create_slot(database.dsn(), name, on_wait=on_wait, wait_notice_s=0.1)
    assert describe_slot(database.dsn(), name).exists
    assert seen[0].gid == gid
    assert seen[0].database == database.name
    assert seen[0].pid is None
    assert f"prepared transaction {gid!r}" in str(seen[0])


def test_creation_names_the_open_session_it_waits_for(database: Database) -> None:
    name = f"s_{database.name}"
    seen: list[Blocker] = []
    with psycopg.connect(database.dsn(), application_name="batch") as other:
        other.execute("CREATE TABLE t (id int)")

        def on_wait(blockers: tuple[Blocker, ...]) -> None:
            seen.extend(blockers)
            if blockers:
                other.commit()

        create_slot(database.dsn(), name, on_wait=on_wait, wait_notice_s=0.1)
        assert seen[0].pid == other.info.backend_pid
    assert (seen[0].gid, seen[0].application, seen[0].user) == (None, "batch", "postgres")
    assert "session" in str(seen[0])


def test_creation_given_up_while_waiting_leaves_no_slot(database: Database) -> None:
    name = f"s_{database.name}"

    class Cancelled(Exception):
        pass

    def on_wait(_: tuple[Blocker, ...]) -> None:
        raise Cancelled

    with psycopg.connect(database.dsn()) as other:
        other.execute("CREATE TABLE t (id int)")
        with pytest.raises(Cancelled):
            create_slot(database.dsn(), name, on_wait=on_wait, wait_notice_s=0.1)
        # The server removes the half-made slot as soon as it has taken in the cancellation.
        wait_until(lambda: not describe_slot(database.dsn(), name).exists)
        with pytest.raises(Cancelled):
            create_slot(database.dsn(), name, on_wait=on_wait, wait_notice_s=0.1)
        wait_until(lambda: not describe_slot(database.dsn(), name).exists)


def test_creation_by_a_process_that_is_killed_while_waiting_leaves_no_slot(database: Database) -> None:
    name = f"s_{database.name}"
    program = f"from xidstream.pipeline.postgres.admin import create_slot; create_slot({database.dsn()!r}, {name!r})"
    slots = "SELECT count(*) FROM pg_replication_slots"
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
    with psycopg.connect(database.dsn()) as other:
        other.execute("CREATE TABLE t (id int)")
        creator = subprocess.Popen([sys.executable, "-c", program])
        try:
            wait_until(lambda: database.execute(waiting) == [(1,)])
        finally:
            creator.kill()
            creator.wait()
        # The transaction that it waited for is open still: the server let go of its own accord.
        wait_until(lambda: database.execute(slots) == [(0,)])


def test_creation_outlasts_a_statement_timeout_of_the_database(database: Database) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET statement_timeout = '150ms'")
    waits = 0
    with psycopg.connect(database.dsn()) as other:
        other.execute("CREATE TABLE t (id int)")

        def on_wait(_: tuple[Blocker, ...]) -> None:
            nonlocal waits
            waits += 1
            if waits == 3:
                other.commit()

        create_slot(database.dsn(), f"s_{database.name}", on_wait=on_wait, wait_notice_s=0.1)
    assert waits >= 3  # one more may be told while the slot becomes ready


def test_no_free_slot_is_a_missing_precondition(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(settings={"max_replication_slots": "1"})
    create_slot(server.conninfo(), "one")
    with pytest.raises(PreconditionMissing, match="replication slots are in use") as caught:
        create_slot(server.conninfo(), "two")
    assert "max_replication_slots" in caught.value.remedy


def test_role_without_replication_may_not_create(database: Database) -> None:
    database.execute("CREATE ROLE no_repl LOGIN PASSWORD 'geheim'")
    try:
        with pytest.raises(PreconditionMissing) as caught:
            create_slot(database.dsn(over_tcp=True, user="no_repl", password="geheim"), "s")
        assert "REPLICATION" in caught.value.remedy
        assert "geheim" not in str(caught.value)
    finally:
        database.execute("DROP ROLE no_repl")


def test_flush_position_advances_with_writes(database: Database) -> None:
    before = current_flush_lsn(database.dsn())
    database.execute("CREATE TABLE t (id int)")
    assert (
        before
        < current_flush_lsn(database.dsn())
        <= Lsn.parse(database.execute("SELECT pg_current_wal_lsn()::text")[0][0])
    )


def test_a_slot_keeps_the_wal_that_was_written_since_it_was_last_confirmed(database: Database) -> None:
    name = f"s_{database.name}"

    def held() -> int | None:
        return held_wal_bytes(database.connection, read_slot(database.connection, name))

    assert held() is None
    create_slot(database.dsn(), name)
    before = held()
    database.execute("SELECT pg_logical_emit_message(true, 'test', repeat('x', 1000000))")
    after = held()
    assert before is not None and after is not None and after >= before + 1_000_000
    drop_slot(database.dsn(), name)


def test_stream_stats_are_none_without_a_slot_and_zero_for_a_new_one(database: Database) -> None:
    name = f"s_{database.name}"
    assert stream_stats(database.dsn(), name) is None
    create_slot(database.dsn(), name)
    stats = stream_stats(database.dsn(), name)
    assert stats is not None
    assert (stats.stream_txns, stats.stream_bytes, stats.total_txns) == (0, 0, 0)
