"""Scenario *DDL*: each row under the definition that held for it, in and beside streams."""

from __future__ import annotations

import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import EXTREMES, Scenario

pytestmark = pytest.mark.postgres


def columns(scenario: Scenario) -> list[tuple[str, ...]]:
    """The table's own columns of each released row, in order."""
    rows = scenario.sink.rows()
    return [
        tuple(k for k in r if not k.startswith("_") and k not in ("table", "relid", "keys")) for r in rows
    ]


def test_017_add_column_mid_stream_gives_each_row_its_own_schema(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("INSERT INTO t VALUES (1, 'old')")
    scenario.read()
    session.execute("ALTER TABLE t ADD COLUMN c int")
    session.execute("INSERT INTO t VALUES (2, 'new', 5)")
    scenario.read()
    session.execute("ALTER TABLE t DROP COLUMN v, ALTER COLUMN c TYPE text USING 'five'")
    session.execute("INSERT INTO t VALUES (3, 'six')")
    session.execute("COMMIT")
    scenario.run("INSERT INTO t VALUES (4, 'seven')")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", 1, "old"),
        ("insert", 2, "new", 5),
        ("insert", 3, "six"),
        ("insert", 4, "seven"),
    ]
    assert columns(scenario) == [("id", "v"), ("id", "v", "c"), ("id", "c"), ("id", "c")]


def test_019_ddl_in_a_rolled_back_subtransaction_leaves_the_old_schema(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("INSERT INTO t VALUES (1, 'x')", "SAVEPOINT s")
    session.execute("ALTER TABLE t ADD COLUMN c int")
    session.execute("INSERT INTO t VALUES (2, 'gone', 2)")
    scenario.read()
    session.execute("ALTER TABLE t ADD COLUMN d int")
    session.execute("INSERT INTO t VALUES (3, 'gone', 3, 3)")
    scenario.read()
    session.execute("ROLLBACK TO s")
    session.execute("INSERT INTO t VALUES (4, 'y')")
    scenario.read()
    session.execute("COMMIT")
    scenario.run("INSERT INTO t VALUES (5, 'z')")
    scenario.agree()
    assert scenario.changes() == [("insert", 1, "x"), ("insert", 4, "y"), ("insert", 5, "z")]


def test_100_bugs_schema_renamed_in_a_transaction_has_rows_under_the_right_name(scenario: Scenario) -> None:
    scenario.run("CREATE SCHEMA sch1", "CREATE TABLE sch1.t (id int PRIMARY KEY)")
    scenario.open()
    session = scenario.session("INSERT INTO sch1.t VALUES (1)")
    scenario.read()
    session.execute("ALTER SCHEMA sch1 RENAME TO sch2")
    session.execute("CREATE SCHEMA sch1")
    session.execute("CREATE TABLE sch1.t (id int PRIMARY KEY)")
    session.execute("INSERT INTO sch1.t VALUES (2)")
    session.execute("INSERT INTO sch2.t VALUES (3)")
    scenario.read()
    session.execute("COMMIT")
    scenario.run("INSERT INTO sch2.t VALUES (4)", "INSERT INTO sch1.t VALUES (5)")
    scenario.agree()
    named = [(r["table"], r["id"]) for r in scenario.sink.rows()]
    twin = [(r["table"], r["id"]) for r in scenario.twin.sink.rows()]
    assert named == twin
    assert [n for n in named if n[1] != 3] == [("sch1.t", 1), ("sch1.t", 2), ("sch2.t", 4), ("sch1.t", 5)]
    relids = {r["id"]: r["relid"] for r in scenario.sink.rows()}
    assert relids[1] == relids[3] == relids[4] != relids[2] == relids[5]


def test_renamed_table_and_its_successor_keep_their_rows_apart(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("INSERT INTO t VALUES (1, 'x')")
    scenario.read()
    session.execute("ALTER TABLE t RENAME TO u")
    session.execute("CREATE TABLE t (id bigint PRIMARY KEY, w int)")
    session.execute("INSERT INTO t VALUES (2, 2)")
    session.execute("INSERT INTO u VALUES (3, 'y')")
    scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    found = [(r["table"], r["id"]) for r in scenario.sink.rows()]
    assert found == [("public.t", 1), ("public.t", 2), ("public.u", 3)]


def test_dropped_and_recreated_table_in_one_transaction(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("INSERT INTO t VALUES (1, 'x')")
    scenario.read()
    session.execute("DROP TABLE t")
    session.execute("CREATE TABLE t (id text PRIMARY KEY)")
    session.execute("INSERT INTO t VALUES ('a')")
    scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [("insert", 1, "x"), ("insert", "a")]
    assert len({r["relid"] for r in scenario.sink.rows()}) == 2


def test_replica_identity_switched_mid_stream_gives_the_right_keys(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, k int NOT NULL UNIQUE, v text)")
    scenario.open()
    session = scenario.session("INSERT INTO t VALUES (1, 10, 'a')", "UPDATE t SET id = 2")
    scenario.read()
    session.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    session.execute("UPDATE t SET v = 'b'")
    scenario.read()
    session.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX t_k_key")
    session.execute("UPDATE t SET k = 11, id = 3")
    scenario.read()
    session.execute("DELETE FROM t")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", 1, 10, "a"),
        ("update_preimage", 1, None, None),
        ("update_postimage", 2, 10, "a"),
        ("update_preimage", 2, 10, "a"),
        ("update_postimage", 2, 10, "b"),
        ("update_preimage", None, 10, None),
        ("update_postimage", 3, 11, "b"),
        ("delete", None, 11, None),
    ]


@EXTREMES
@pytest.mark.xfail(
    reason="PostgreSQL 16.14 and 18.4 forget others' snapshots after a concurrent abort", strict=True
)
def test_ddl_committed_beside_a_rolled_back_subtransaction_reaches_a_lagging_stream(
    scenario: Scenario,
) -> None:
    """A bug of the server, seen with pg_recvlogical too, and silent: the streamed row lacks the new column.

    The reader lags: when the subtransaction's rows are streamed it is rolled back already, which the server
    notices at a catalog look-up (``ReorderBufferProcessTXN``, ``ERRCODE_TRANSACTION_ROLLBACK``). It then drops all
    that is queued of the transaction, the snapshot that the other's commit had queued there included. Later
    rows of the transaction are decoded by the old catalogs; where the other rewrote or truncated the table,
    the server fails instead, at each attempt ("could not map filenumber"). Without streaming it is right.
    """
    scenario.run("CREATE TABLE a (id int)", "CREATE TABLE b (id int, v text)", "CREATE TABLE t (id int)")
    scenario.open(immediate=False)
    session = scenario.session("INSERT INTO b VALUES (0)")
    other = scenario.session("ALTER TABLE t ADD COLUMN c text")
    session.execute("SAVEPOINT p")
    session.execute("TRUNCATE a")
    other.execute("COMMIT")
    session.execute("INSERT INTO b SELECT i, repeat('x', 200) FROM generate_series(1, 1000) i")
    session.execute("ROLLBACK TO p")
    session.execute("INSERT INTO t VALUES (2, 'there')")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes("public.t") == [("insert", 2, "there")]


@EXTREMES
def test_fact_15_relations_are_sent_for_each_stream_and_again_after_each_of_its_aborts(
    scenario: Scenario,
) -> None:
    scenario.tables("t")
    first = scenario.session("INSERT INTO t VALUES (1, 'x')")
    second = scenario.session("INSERT INTO t VALUES (2, 'x')")
    scenario.read()
    assert scenario.streamed.kinds().count("R") == 2
    first.execute("SAVEPOINT s")
    first.execute("INSERT INTO t VALUES (3, 'x')")
    scenario.read()
    assert scenario.streamed.kinds().count("R") == 2
    first.execute("ROLLBACK TO s")
    first.execute("INSERT INTO t VALUES (4, 'x')")
    scenario.read()
    assert scenario.streamed.kinds().count("R") == 3
    first.execute("COMMIT")
    second.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [1, 4, 2]


@EXTREMES
def test_fact_16_after_a_stream_commit_plain_rows_get_no_relation_of_their_own(scenario: Scenario) -> None:
    """The plain transactions come by the same connection, too small to be streamed."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(immediate=False)
    session = scenario.session("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1001, 1500) i")
    scenario.read()
    session.execute("COMMIT")
    scenario.run("INSERT INTO t VALUES (1, 'plain')", "INSERT INTO t VALUES (2, 'plain')")
    scenario.read()
    kinds = scenario.streamed.kinds()
    assert kinds.endswith("cBICBIC") and "R" not in kinds[kinds.index("c") :]
    scenario.agree()
    assert scenario.changes()[-2:] == [("insert", 1, "plain"), ("insert", 2, "plain")]


@EXTREMES
def test_fact_16_a_plain_relation_that_arrived_later_than_a_streams_outlives_its_commit(
    scenario: Scenario,
) -> None:
    """The stream touches ``t`` before a subtransaction's lock is rolled back; then the table changes beside it."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)", "CREATE TABLE u (id bigint, v text)")
    scenario.open(immediate=False)
    session = scenario.session(
        "SAVEPOINT s", "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 500) i"
    )
    scenario.read()
    assert scenario.streamed.kinds().count("R") == 1
    session.execute("ROLLBACK TO s")
    scenario.run("ALTER TABLE t ADD COLUMN c int", "INSERT INTO t VALUES (1, 'plain', 1)")
    scenario.read()
    session.execute("INSERT INTO u SELECT i, repeat('x', 100) FROM generate_series(1, 500) i")
    scenario.read()
    session.execute("COMMIT")
    scenario.run("INSERT INTO t VALUES (2, 'plain', 2)")
    scenario.agree()
    assert list(scenario.changes("public.t")) == [("insert", 1, "plain", 1), ("insert", 2, "plain", 2)]


@EXTREMES
def test_fact_16_an_aborted_streams_schema_never_holds_for_plain_rows(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(immediate=False)
    scenario.run("INSERT INTO t VALUES (1, 'plain')")
    session = scenario.session("ALTER TABLE t ADD COLUMN c int")
    session.execute("INSERT INTO t SELECT i, repeat('x', 100), i FROM generate_series(1001, 1500) i")
    scenario.read()
    assert "S" in scenario.streamed.kinds()
    session.execute("ROLLBACK")
    scenario.run("INSERT INTO t VALUES (2, 'plain')")
    scenario.agree()
    assert scenario.changes() == [("insert", 1, "plain"), ("insert", 2, "plain")]


@EXTREMES
def test_fact_16_a_reconnect_sends_every_relation_again(scenario: Scenario) -> None:
    scenario.tables("t")
    scenario.run("INSERT INTO t VALUES (1, 'x')")
    scenario.read()
    scenario.streamed.crash()
    scenario.streamed.wire.clear()
    scenario.session("INSERT INTO t VALUES (2, 'x')").execute("COMMIT")
    scenario.agree()
    assert scenario.streamed.kinds().count("R") == 1 and scenario.ids() == [1, 2]
