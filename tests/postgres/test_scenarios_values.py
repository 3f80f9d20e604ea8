"""Scenario *values*: unchanged TOAST, and every type at its corners, as the server says it."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pytest

from tests.differential.compare import Model, final_difference
from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import Scenario
from tests.differential.source_schema import TYPES

pytestmark = pytest.mark.postgres
BIG = "repeat(md5('x'), 200)"
EXTERNAL = "ALTER TABLE t ALTER big SET STORAGE EXTERNAL"


def big() -> str:
    return "9dd4e461268c8034f5c8564e155c67a6" * 200


def row(scenario: Scenario, place: int = -1) -> dict[str, Any]:
    return scenario.sink.rows()[place]


def test_unchanged_toast_with_the_default_identity_is_marked_and_never_null(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, small text, big text)", EXTERNAL)
    scenario.open()
    scenario.session(
        f"INSERT INTO t VALUES (1, 'a', {BIG}), (2, 'a', NULL)",
        "UPDATE t SET small = 'b'",
        "UPDATE t SET id = id + 10",
    ).execute("COMMIT")
    scenario.agree()
    updates = [r for r in scenario.sink.rows() if r["_change_type"] == "update_postimage"]
    assert [(r["id"], r["small"], r["big"], r["_unchanged"]) for r in updates] == [
        (1, "b", None, ["big"]),
        (2, "b", None, None),
        (11, "b", None, ["big"]),
        (12, "b", None, None),
    ]


def test_unchanged_toast_with_replica_identity_full_is_filled_from_the_old_tuple(scenario: Scenario) -> None:
    scenario.run(
        "CREATE TABLE t (id bigint PRIMARY KEY, small text, big text)",
        EXTERNAL,
        "ALTER TABLE t REPLICA IDENTITY FULL",
    )
    scenario.open()
    scenario.session(f"INSERT INTO t VALUES (1, 'a', {BIG})", "UPDATE t SET small = 'b'").execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", 1, "a", big()),
        ("update_preimage", 1, "a", big()),
        ("update_postimage", 1, "b", big()),
    ]
    assert [r["_unchanged"] for r in scenario.sink.rows()] == [None, None, None]


def test_fact_17_a_toasted_key_is_sent_though_unchanged_and_fills_the_new_tuple(scenario: Scenario) -> None:
    """The row is over 2 kB, so that the toaster acts at all, and its target so small that the key goes too."""
    scenario.run(
        "CREATE TABLE t (big text PRIMARY KEY, small int, filler text DEFAULT repeat('f', 1500))", EXTERNAL
    )
    scenario.run("ALTER TABLE t ALTER filler SET STORAGE EXTERNAL, SET (toast_tuple_target = 128)")
    scenario.open()
    key, filler = "k" * 1000, "f" * 1500
    scenario.session("INSERT INTO t VALUES (repeat('k', 1000), 1)", "UPDATE t SET small = 2").execute(
        "COMMIT"
    )
    scenario.agree()
    (update,) = scenario.streamed.bodies("U")
    assert update[8:9] == b"K" and key.encode() in update
    assert scenario.changes() == [
        ("insert", key, 1, filler),
        ("update_preimage", key, None, None),
        ("update_postimage", key, 2, None),
    ]
    assert [r["_unchanged"] for r in scenario.sink.rows()] == [None, None, ["filler"]]


def test_fact_17_a_key_tuple_has_null_where_nothing_was_sent(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (a text, id bigint PRIMARY KEY, b text NOT NULL)")
    scenario.open()
    scenario.session("INSERT INTO t VALUES ('a', 1, 'b')", "UPDATE t SET id = 2", "DELETE FROM t").execute(
        "COMMIT"
    )
    scenario.agree()
    assert scenario.changes() == [
        ("insert", "a", 1, "b"),
        ("update_preimage", None, 1, None),
        ("update_postimage", "a", 2, "b"),
        ("delete", None, 2, None),
    ]


def test_add_column_with_default_gives_old_rows_the_default_under_full_identity(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.run("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    scenario.open()
    session = scenario.session("UPDATE t SET v = 'x' WHERE id = 1")
    scenario.read()
    session.execute("ALTER TABLE t ADD COLUMN d int DEFAULT 7")
    session.execute("UPDATE t SET v = 'y' WHERE id = 2")
    session.execute("DELETE FROM t WHERE id = 1")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("update_preimage", 1, "old"),
        ("update_postimage", 1, "x"),
        ("update_preimage", 2, "old", 7),
        ("update_postimage", 2, "y", 7),
        ("delete", 1, "x", 7),
    ]


def test_special_numbers_dates_and_arrays_are_native_or_their_text(scenario: Scenario) -> None:
    scenario.run(
        "CREATE TABLE t (f float8, g float4, n numeric(6,2), big numeric, d date, ts timestamp, tz timestamptz,"
        " a int[], r int4range)"
    )
    scenario.open()
    scenario.session(
        "INSERT INTO t VALUES ('NaN', '-Infinity', 'NaN', 'Infinity', 'infinity', '-infinity', '0044-03-15 BC',"
        " '{{1,2},{3,4}}', '[1,5)')",
        "INSERT INTO t VALUES ('-0', 1e-45, 1.5, 1e400, '0044-03-15 BC', '294276-12-31 23:59:59.999999', 'infinity',"
        " '[0:1]={5,6}', 'empty')",
        "INSERT INTO t VALUES (0.1, 0.1, -9999.99, 1.10, '2024-02-29', '2024-02-29 12:00:00.000001',"
        " '2024-02-29 12:00:00+05:30', '{1,NULL}', '(,)')",
    ).execute("COMMIT")
    scenario.agree()
    first, second, third = scenario.sink.rows()
    assert math.isnan(first["f"]) and first["g"] == -math.inf
    assert first["n"] is first["d"] is first["ts"] is first["tz"] is first["a"] is None
    assert dict(first["_text"]) == {
        "n": "NaN",
        "d": "infinity",
        "ts": "-infinity",
        "tz": "0044-03-15 00:00:00+00 BC",
        "a": "{{1,2},{3,4}}",
    }
    assert (first["big"], first["r"]) == ("Infinity", "[1,5)")
    assert math.copysign(1, second["f"]) == -1 and second["n"] == Decimal("1.50")
    assert second["big"] == "1" + "0" * 400 and second["r"] == "empty"
    assert dict(second["_text"]) == {
        "d": "0044-03-15 BC",
        "ts": "294276-12-31 23:59:59.999999",
        "tz": "infinity",
        "a": "[0:1]={5,6}",
    }
    assert third["_text"] is None and third["a"] == [1, None] and third["big"] == "1.10"
    assert third["d"] == datetime.date(2024, 2, 29) and third["n"] == Decimal("-9999.99")
    assert third["ts"] == datetime.datetime(2024, 2, 29, 12, 0, 0, 1)
    assert third["tz"] == datetime.datetime(2024, 2, 29, 6, 30, tzinfo=datetime.timezone.utc)


def test_enums_domains_composites_and_arrays_of_them_are_lossless(scenario: Scenario) -> None:
    scenario.run(
        "CREATE TYPE mood AS ENUM ('sad', 'with space')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE DOMAIN price AS numeric(10,2)",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t (m mood, p positive, pr price, c pair, ms mood[], ps positive[])",
    )
    scenario.open()
    session = scenario.session("INSERT INTO t VALUES ('sad', 1, 12.5, '(1,\"x y\")', '{sad,NULL}', '{1,2}')")
    scenario.read()
    session.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'glad'")
    session.execute("INSERT INTO t VALUES ('glad', 2, NULL, NULL, '{\"with space\"}', NULL)")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", "sad", 1, "12.50", '(1,"x y")', "{sad,NULL}", "{1,2}"),
        ("insert", "glad", 2, None, None, '{"with space"}', None),
    ]


def test_every_type_at_its_corners_is_as_the_source_table_says(scenario: Scenario) -> None:
    """All literals of the differential's pool; the oracle is the table."""
    columns = ", ".join(f"c{i:02d} {t}" for i, t in enumerate(TYPES))
    for statement in (
        "CREATE SCHEMA s",
        "CREATE TYPE s.mood AS ENUM ('sad', 'ok', 'with space')",
        "CREATE DOMAIN s.positive AS int",
        "CREATE DOMAIN s.price AS numeric(10,2)",
        "CREATE TYPE s.pair AS (a int, b text)",
        f"CREATE TABLE s.t (id bigint PRIMARY KEY, {columns})",
    ):
        scenario.run(statement)
    scenario.open()
    inserts = []
    for n in range(max(map(len, TYPES.values())) + 1):
        values = ", ".join(
            f"CAST({(*pool, 'NULL')[n % (len(pool) + 1)]} AS {t})" for t, pool in TYPES.items()
        )
        inserts.append(f"INSERT INTO s.t VALUES ({n}, {values})")
    scenario.session(*inserts).execute("COMMIT")
    scenario.agree()
    model = Model()
    model.apply(scenario.transactions)
    assert final_difference(model, scenario.database.connection) is None
    assert scenario.transactions[0].n_rows == len(inserts)
