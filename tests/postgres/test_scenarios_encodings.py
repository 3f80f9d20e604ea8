"""Scenario *encodings and settings*: what a database or a role sets for itself changes nothing in the stream."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from psycopg import sql

from tests.differential.scenario import Scenario
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.findings import Status
from xidstream.pipeline.postgres.preflight import server_findings
from xidstream.pipeline.postgres.settings import SlotSettings

pytestmark = pytest.mark.postgres

TEXT_SETTINGS = {
    "datestyle": "German, DMY",
    "intervalstyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "timezone": "Asia/Kolkata",
    "xmlbinary": "hex",
    "client_encoding": "LATIN1",
}


def test_settings_of_the_database_and_the_role_that_change_text_change_no_value(
    scenario_in: Callable[..., Scenario],
) -> None:
    scenario = scenario_in("UTF8")
    name = sql.Identifier(scenario.database.name)
    connection = scenario.database.connection
    for i, (setting, value) in enumerate(TEXT_SETTINGS.items()):
        of = sql.SQL("ALTER ROLE postgres IN DATABASE {}" if i % 2 else "ALTER DATABASE {}").format(name)
        connection.execute(sql.SQL("{} SET {} = {}").format(of, sql.Identifier(setting), sql.Literal(value)))
    scenario.run(
        "CREATE TABLE t (id int PRIMARY KEY, d date, ts timestamp, tz timestamptz, f float8, n numeric(6,2), b bytea,"
        " i interval, note text)"
    )
    scenario.open()
    scenario.session(
        "INSERT INTO t VALUES (1, '2024-03-01', '2024-03-01 12:00:00', '2024-03-01 12:00:00+00', 1/3.0::float8, 1.25,"
        " '\\x00ff', '1 year -2 days 3 hours', U&'\\00e9\\20ac')"
    ).execute("COMMIT")
    # A session of this database does see them.
    with scenario.database.connect() as session:
        assert session.execute("SELECT date '2024-03-01'::text").fetchone() == ("01.03.2024",)
    scenario.agree()
    (row,) = scenario.sink.rows()
    assert row["d"].isoformat() == "2024-03-01" and row["ts"].isoformat() == "2024-03-01T12:00:00"
    assert row["tz"].timestamp() == 1709294400
    assert (row["f"], row["n"], row["b"]) == (1 / 3, Decimal("1.25"), b"\0\xff")
    assert (row["i"], row["note"], row["_text"]) == ("1 year -2 days +03:00:00", "é€", None)


def test_a_latin1_database_arrives_as_unicode_names_and_all(scenario_in: Callable[..., Scenario]) -> None:
    scenario = scenario_in("LATIN1")
    scenario.run('CREATE TABLE "été" (id int PRIMARY KEY, "prénom" text)')
    scenario.open(two_phase=True)
    scenario.session("INSERT INTO \"été\" VALUES (1, 'José ½')").execute("COMMIT")
    scenario.session("INSERT INTO \"été\" VALUES (2, 'ÿ')").execute("PREPARE TRANSACTION 'à faire'")
    scenario.run("COMMIT PREPARED 'à faire'", "SELECT pg_logical_emit_message(false, 'préfixe', 'x')")
    scenario.agree()
    assert [(r["table"], r["id"], r["prénom"]) for r in scenario.sink.rows()] == [
        ("public.été", 1, "José ½"),
        ("public.été", 2, "ÿ"),
    ]
    assert [t.gid for t in scenario.transactions] == [None, "à faire"]
    assert [m.prefix for m in scenario.sink.messages] == ["préfixe"]


def test_a_gid_a_prefix_and_an_origin_of_a_sql_ascii_database_do_not_stop_the_run_though_not_utf8(
    scenario_in: Callable[..., Scenario],
) -> None:
    """They were told as malformed messages: the server's fault, status 4."""
    scenario = scenario_in("SQL_ASCII")
    scenario.run("CREATE TABLE t (id int PRIMARY KEY)")
    scenario.open(two_phase=True)
    with scenario.database.connect(client_encoding="SQL_ASCII") as session:
        session.execute(b"SELECT pg_replication_origin_create('n\xe9')")
        try:
            session.execute(b"SELECT pg_replication_origin_session_setup('n\xe9')")
            session.execute(b"BEGIN")
            session.execute(b"INSERT INTO t VALUES (1)")
            session.execute(b"SELECT pg_replication_origin_xact_setup('0/1', now())")
            session.execute(b"COMMIT")
            session.execute(b"SELECT pg_replication_origin_session_reset()")
            session.execute(b"BEGIN")
            session.execute(b"INSERT INTO t VALUES (2)")
            session.execute(b"SELECT pg_logical_emit_message(true, 'caf\xe9', 'x')")
            session.execute(b"PREPARE TRANSACTION 'g\xff'")
            session.execute(b"SELECT pg_logical_emit_message(false, '\xe8', 'y')")
            scenario.read()
            # Its record is in storage; another run goes on with it.
            scenario.streamed.crash()
            session.execute(b"COMMIT PREPARED 'g\xff'")
            scenario.agree()
        finally:
            session.execute(b"SELECT pg_replication_origin_drop('n\xe9')")
    assert [(t.gid, t.origin) for t in scenario.transactions] == [(None, "n\\xe9"), ("g\\xff", None)]
    assert sorted(m.prefix for m in scenario.sink.messages) == ["\\xe8", "caf\\xe9"]
    assert scenario.ids() == [1, 2]


def test_a_table_of_a_sql_ascii_database_whose_name_is_not_utf8_is_poison_with_a_remedy(
    scenario_in: Callable[..., Scenario],
) -> None:
    scenario = scenario_in("SQL_ASCII")
    with scenario.database.connect(client_encoding="SQL_ASCII") as session:
        session.execute(b'CREATE TABLE "t\xe9" (id int PRIMARY KEY)')
        scenario.open()
        session.execute(b'INSERT INTO "t\xe9" VALUES (1)')
    with pytest.raises(PoisonedChange, match="the relation's name is not valid UTF-8") as raised:
        scenario.read()
    assert "publication" in raised.value.remedy and "\\xe9" not in str(raised.value)


def test_a_table_of_1600_columns_arrives_whole_from_a_streamed_transaction(
    scenario_in: Callable[..., Scenario],
) -> None:
    scenario = scenario_in("UTF8")
    scenario.run(f"CREATE TABLE t ({', '.join(f'c{i} int' for i in range(1600))})")
    scenario.open()
    values = ", ".join(str(i) for i in range(1600))
    scenario.session(f"INSERT INTO t SELECT {values} FROM generate_series(1, 3)").execute("COMMIT")
    scenario.agree()
    rows = scenario.sink.rows()
    assert len(rows) == 3
    assert all(row[f"c{i}"] == i for row in rows for i in range(1600))


def test_the_checks_before_a_run_name_a_catalog_that_is_not_utf8(
    scenario_in: Callable[..., Scenario],
) -> None:
    scenario = scenario_in("SQL_ASCII")
    with scenario.database.connect(client_encoding="SQL_ASCII") as session:
        session.execute(b'CREATE TABLE "t\xe9" (id int PRIMARY KEY)')
        session.execute(b"CREATE PUBLICATION latin FOR ALL TABLES")
    settings = SlotSettings(dsn=scenario.database.dsn(), slot="s", publications=("latin",))
    failed = [f for f in server_findings(settings, will_create_slot=True) if f.status is Status.FAILED]
    assert len(failed) == 1 and "not valid UTF-8" in failed[0].statement, failed
    assert "publication" in (failed[0].remedy or "")
