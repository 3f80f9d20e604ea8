"""Each precondition broken on a real server, and the finding it gives."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import (
    LoginRefused,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.postgres.admin import create_slot, describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.preflight import server_findings
from xidstream.pipeline.postgres.settings import SlotSettings, Streaming
from xidstream.pipeline.postgres.stream_options import stream_options

pytestmark = pytest.mark.postgres

SECRET = "streng_geheim"


def settings(database: Database, **options: object) -> SlotSettings:
    values: dict[str, object] = {
        "dsn": database.dsn(),
        "slot": f"s_{database.name}",
        "publications": ("pub",),
    }
    return SlotSettings(**{**values, **options})  # type: ignore[arg-type]


def finding(findings: list[Finding], check: str) -> Finding:
    found = [f for f in findings if f.check == check]
    assert len(found) == 1, (check, findings)
    assert "\n" not in found[0].statement
    assert (found[0].remedy is None) == (found[0].status is Status.OK)
    return found[0]


def failed(findings: list[Finding]) -> set[str]:
    return {f.check for f in findings if f.status is Status.FAILED}


def not_ok(findings: list[Finding]) -> set[str]:
    return {f.check for f in findings if f.status is not Status.OK}


@pytest.fixture
def sound(database: Database) -> Database:
    """A database where nothing is missing."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION pub FOR TABLE t")
    create_slot(database.dsn(), f"s_{database.name}")
    return database


def test_sound_setup_has_nothing_but_ok(sound: Database) -> None:
    findings = server_findings(settings(sound))
    assert not_ok(findings) == set(), findings
    assert (
        "64kB"
        in finding(
            server_findings(settings(sound, logical_decoding_work_mem="64kB")), "logical_decoding_work_mem"
        ).statement
    )
    assert sound.name in finding(findings, "connection").statement
    assert {f.check for f in findings} >= {
        "connection", "version", "wal_level", "replication", "max_wal_senders", "publication",
        "replica_identity", "column_names", "slot", "streaming", "logical_decoding_work_mem",
    }  # fmt: skip


def test_failover_is_refused_where_the_server_has_none_and_else_says_what_it_lacks(sound: Database) -> None:
    findings = server_findings(settings(sound, failover=True, heartbeat_interval_s=5))
    assert finding(findings, "heartbeat").statement == "a heartbeat each 5 s"
    if sound.version < 17:
        assert finding(findings, "failover").status is Status.FAILED
        return
    warned = [f.statement for f in findings if f.check == "failover" and f.status is Status.WARNING]
    assert ["turn it on for good" in warned[0], "synchronized_standby_slots is empty" in warned[1]] == [
        True,
        True,
    ]
    assert failed(findings) == set()


def test_preflight_changes_nothing(sound: Database) -> None:
    before = describe_slot(sound.dsn(), f"s_{sound.name}")
    server_findings(settings(sound, two_phase=True))
    assert describe_slot(sound.dsn(), f"s_{sound.name}") == before


@pytest.mark.parametrize(
    ("change", "statement", "raises"),
    [
        ({"host": "127.0.0.1", "port": "1"}, "no server listens there", PreconditionMissing),
        ({"host": "no-such-host.invalid"}, "unknown host", PreconditionMissing),
        ({"dbname": "no_such_db"}, "unknown database", PreconditionMissing),
        ({"user": "no_such_role"}, "unknown role", LoginRefused),
    ],
)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_server_out_of_reach_is_one_failed_finding(
    sound: Database, change: dict[str, str], statement: str, raises: type[XidstreamError]
) -> None:
    dsn = psycopg.conninfo.make_conninfo(sound.dsn(password=SECRET), **change)
    (only,) = server_findings(settings(sound, dsn=dsn))
    assert (only.check, only.status, only.raises) == ("connection", Status.FAILED, raises)
    assert only.statement.startswith(statement)
    assert only.remedy
    assert SECRET not in repr(only)


def test_wrong_password_over_tcp(sound: Database) -> None:
    sound.execute("CREATE ROLE pre LOGIN REPLICATION PASSWORD 'right'")
    try:
        (only,) = server_findings(settings(sound, dsn=sound.dsn(over_tcp=True, user="pre", password=SECRET)))
        assert only.statement.startswith("wrong or missing password")
        assert SECRET not in repr(only)
    finally:
        sound.execute("DROP ROLE pre")


def test_role_without_replication_is_named_and_the_rest_still_checked(sound: Database) -> None:
    sound.execute(f"CREATE ROLE pre2 LOGIN PASSWORD '{SECRET}'")
    try:
        findings = server_findings(
            settings(sound, dsn=sound.dsn(over_tcp=True, user="pre2", password=SECRET))
        )
    finally:
        sound.execute("DROP ROLE pre2")
    assert failed(findings) == {"replication"}
    assert finding(findings, "replication").statement == "role pre2 may not replicate"
    assert finding(findings, "publication").status is Status.OK
    assert SECRET not in repr(findings)


def test_missing_publication_names_the_close_ones(sound: Database) -> None:
    sound.execute('CREATE PUBLICATION "Orders"')
    findings = server_findings(settings(sound, publications=("orders", "pub")))
    found = finding(findings, "publication")
    assert found.statement == "there is no publication 'orders'"
    assert found.remedy is not None
    assert "did you mean Orders?" in found.remedy


def test_publication_without_tables_is_a_warning(sound: Database) -> None:
    sound.execute("CREATE PUBLICATION nothing")
    found = finding(server_findings(settings(sound, publications=("nothing",))), "publication")
    assert (found.status, "publishes no table" in found.statement) == (Status.WARNING, True)


def test_tables_without_replica_identity_are_named(sound: Database) -> None:
    sound.execute("CREATE TABLE bare (id int)")
    sound.execute("CREATE TABLE full_one (id int); ALTER TABLE full_one REPLICA IDENTITY FULL")
    sound.execute("CREATE TABLE none_one (id int PRIMARY KEY); ALTER TABLE none_one REPLICA IDENTITY NOTHING")
    sound.execute("CREATE TABLE indexed (id int NOT NULL UNIQUE)")
    sound.execute("ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id_key")
    sound.execute("CREATE TABLE parts (id int) PARTITION BY RANGE (id)")
    sound.execute("CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    sound.execute("CREATE TABLE part_2 PARTITION OF parts (PRIMARY KEY (id)) FOR VALUES FROM (10) TO (20)")
    sound.execute("CREATE PUBLICATION all_of_it FOR ALL TABLES WITH (publish_via_partition_root)")
    found = finding(server_findings(settings(sound, publications=("all_of_it",))), "replica_identity")
    assert found.status is Status.WARNING
    assert "no replica identity: public.bare, public.none_one, public.part_1;" in found.statement


def test_insert_only_publication_needs_no_identity(sound: Database) -> None:
    sound.execute("CREATE TABLE bare (id int)")
    sound.execute("CREATE PUBLICATION log FOR TABLE bare WITH (publish = 'insert, truncate')")
    assert (
        finding(server_findings(settings(sound, publications=("log",))), "replica_identity").status
        is Status.OK
    )


def test_operations_that_a_publication_leaves_out_are_named(sound: Database) -> None:
    sound.execute("CREATE TABLE log (id int PRIMARY KEY)")
    sound.execute("CREATE PUBLICATION inserts FOR TABLE log, t WITH (publish = 'insert')")
    found = finding(server_findings(settings(sound, publications=("inserts",))), "operations")
    assert found.status is Status.WARNING
    assert "no update, delete, truncate of public.log, public.t" in found.statement
    # What another publication of the slot publishes is sent all the same.
    found = finding(server_findings(settings(sound, publications=("inserts", "pub"))), "operations")
    assert found.statement.endswith("of public.log")
    assert finding(server_findings(settings(sound)), "operations").status is Status.OK


def test_a_column_that_clashes_with_the_contract_is_told_unless_left_out(sound: Database) -> None:
    sound.execute('CREATE TABLE clash (id int PRIMARY KEY, "_XID" int, "Name" text, name text)')
    sound.execute("CREATE PUBLICATION clashing FOR TABLE clash")
    found = finding(server_findings(settings(sound, publications=("clashing",))), "column_names")
    assert found.status is Status.WARNING
    assert "table public.clash: column _XID, name has the name" in found.statement
    assert "parks the table" in found.statement
    sound.execute("CREATE PUBLICATION listed FOR TABLE clash (id, name)")
    assert (
        finding(server_findings(settings(sound, publications=("listed",))), "column_names").status
        is Status.OK
    )


def test_column_lists_that_differ_between_publications_fail(sound: Database) -> None:
    sound.execute("CREATE PUBLICATION narrow FOR TABLE t (id)")
    found = finding(server_findings(settings(sound, publications=("narrow", "pub"))), "column_lists")
    assert found.status is Status.FAILED


def test_missing_slot_fails_unless_it_will_be_created(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    assert failed(server_findings(settings(database))) == {"slot"}
    assert failed(server_findings(settings(database), will_create_slot=True)) == set()
    assert "free" in finding(server_findings(settings(database)), "max_replication_slots").statement


def test_slot_of_another_database_or_kind(sound: Database) -> None:
    sound.execute("CREATE TABLE other (id int)")
    dsn = psycopg.conninfo.make_conninfo(sound.dsn(), dbname="postgres")
    found = finding(server_findings(settings(sound, dsn=dsn)), "slot")
    assert f"belongs to database {sound.name}, the DSN leads to postgres" in found.statement
    name = f"phys_{sound.name}"
    sound.execute("SELECT pg_create_physical_replication_slot(%s)", name)
    try:
        assert "is physical" in finding(server_findings(settings(sound, slot=name)), "slot").statement
    finally:
        sound.execute("SELECT pg_drop_replication_slot(%s)", name)


def test_slot_in_use_names_the_process(sound: Database) -> None:
    made = settings(sound)
    with ReplicationConnection(made) as connection:
        connection.start_replication(made.slot, INVALID_LSN, stream_options(made, connection.server_version))
        found = finding(server_findings(made), "slot")
        assert (found.status, found.raises) == (Status.FAILED, SlotInUse)
        assert f"its process {connection.pgconn.backend_pid}" in found.statement


def test_two_phase_on_a_slot_without_it_is_a_warning(sound: Database) -> None:
    found = finding(server_findings(settings(sound, two_phase=True)), "two_phase")
    assert (found.status, "for good" in found.statement) == (Status.WARNING, True)


def test_protocol_without_streaming_is_a_warning(sound: Database) -> None:
    found = finding(server_findings(settings(sound, proto_version=1)), "streaming")
    assert (found.status, "after their COMMIT" in found.statement) == (Status.WARNING, True)
    assert (
        finding(server_findings(settings(sound, streaming=Streaming.PARALLEL)), "streaming").status
        is Status.OK
    )
    with pytest.raises(Unsupported):
        stream_options(settings(sound, streaming=Streaming.PARALLEL), 150_000)


def test_sql_ascii_database_is_a_warning(database: Database) -> None:
    name = f"ascii_{database.name}"
    database.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    try:
        dsn = psycopg.conninfo.make_conninfo(database.dsn(), dbname=name)
        assert finding(server_findings(settings(database, dsn=dsn)), "encoding").status is Status.WARNING
    finally:
        database.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("version", [16, 18])
def test_server_without_anything_that_is_needed(
    own_postgres: Callable[..., EmbeddedPostgres], version: int
) -> None:
    server = own_postgres(
        version=version,
        settings={"wal_level": "replica", "max_replication_slots": "0", "max_prepared_transactions": "0"},
    )
    made = SlotSettings(server.conninfo(), "s", ("pub",), two_phase=True)
    findings = server_findings(made)
    assert failed(findings) == {"wal_level", "publication", "slot", "max_replication_slots"}
    assert finding(findings, "wal_level").statement == "wal_level is replica, must be logical"
    assert "max_prepared_transactions is 0" in finding(findings, "two_phase").statement


def test_no_free_walsender(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(settings={"max_wal_senders": "1"})
    made = SlotSettings(server.conninfo(), "s", ("pub",))
    with ReplicationConnection(made):
        findings = server_findings(made)
    assert finding(findings, "max_wal_senders").statement == "all 1 walsenders are in use"
    assert finding(findings, "replication").statement.startswith("the server has no free connection")


@pytest.mark.parametrize("version", [16, 18])
def test_lost_slot(own_postgres: Callable[..., EmbeddedPostgres], version: int) -> None:
    server = own_postgres(version=version, settings={"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"})
    made = SlotSettings(server.conninfo(), "s", ("pub",))
    create_slot(made.dsn, made.slot)
    with psycopg.connect(made.dsn, autocommit=True) as admin:
        for _ in range(3):
            admin.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000)), pg_switch_wal()")
            admin.execute("CHECKPOINT")
    found = finding(server_findings(made), "slot")
    assert (found.status, found.raises, "is lost" in found.statement) == (Status.FAILED, SlotLost, True)
    # It named two commands and another storage.
    assert "`xidstream resync` makes the slot anew" in str(found.remedy)


@pytest.mark.parametrize("is_told", [True, False], ids=["after a reload", "before it"])
def test_a_wal_level_that_is_set_and_waits_for_a_restart_is_told_so(
    own_postgres: Callable[..., EmbeddedPostgres], is_told: bool
) -> None:
    """It said once more what to set. A role that is no superuser sees it after a reload."""
    server = own_postgres(settings={"wal_level": "replica"})
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE ROLE reader LOGIN REPLICATION")
        before = finding(server_findings(SlotSettings(server.conninfo(), "s", ("pub",))), "wal_level")
        assert "ALTER SYSTEM" in str(before.remedy)
        admin.execute("ALTER SYSTEM SET wal_level = 'logical'")
        if is_told:
            admin.execute("SELECT pg_reload_conf()")
    role = "reader" if is_told else "postgres"

    def found() -> Finding:
        return finding(server_findings(SlotSettings(server.conninfo(user=role), "s", ("pub",))), "wal_level")

    wait_until(lambda: found().remedy == "restart the server")
    assert "a new value is set, and counts after a restart" in found().statement


def test_generated_columns_that_are_not_published_are_named(sound: Database) -> None:
    """They were missing in the sink, and nothing said so."""
    is_18 = sound.connection.info.server_version >= 180_000
    virtual = ', "Twice" int GENERATED ALWAYS AS (id * 2) VIRTUAL' if is_18 else ""
    sound.execute(
        f"CREATE TABLE g (id int PRIMARY KEY, sum int GENERATED ALWAYS AS (id + 1) STORED{virtual})"
    )
    sound.execute("ALTER PUBLICATION pub ADD TABLE g")
    found = finding(server_findings(settings(sound)), "generated_columns")
    assert found.status is Status.WARNING and found.statement.endswith(
        "do not arrive: sum, Twice of public.g" if is_18 else "do not arrive: sum of public.g"
    )
    if is_18:
        sound.execute("ALTER PUBLICATION pub SET (publish_generated_columns = stored)")
        found = finding(server_findings(settings(sound)), "generated_columns")
        assert found.statement.endswith("do not arrive: Twice of public.g")
