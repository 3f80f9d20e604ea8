"""Scenarios *messages, truncate* and *partitions, filters*."""

from __future__ import annotations

import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import EXTREMES, Scenario

pytestmark = pytest.mark.postgres


def contents(scenario: Scenario) -> list[tuple[bool, bytes]]:
    return [(m.transactional, m.content) for m in scenario.sink.messages]


# -- messages, truncate --------------------------------------------------------------------------------


def test_020_both_kinds_of_message_then_abort_leaves_the_non_transactional_one(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(
        "INSERT INTO t VALUES (1, 'x')",
        "SELECT pg_logical_emit_message(true, 'p', 'transactional')",
        "SELECT pg_logical_emit_message(false, 'p', 'at once')",
    )
    scenario.read()
    assert contents(scenario) == [(False, b"at once")], "it is there before the transaction ends"
    session.execute("ROLLBACK")
    scenario.agree()
    assert contents(scenario) == [(False, b"at once")] and scenario.transactions == []
    (message,) = scenario.sink.messages
    assert message.commit_lsn is None and message.xid is None and message.prefix == "p" and message.lsn > 0


def test_messages_of_a_committed_stream_come_with_it_in_order(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(
        "SELECT pg_logical_emit_message(true, 'p', 'first')", "INSERT INTO t VALUES (1, 'x')"
    )
    scenario.read()
    scenario.run("SELECT pg_logical_emit_message(true, 'p', 'beside')")
    session.execute("SELECT pg_logical_emit_message(true, 'p', 'second')")
    session.execute("COMMIT")
    scenario.agree()
    assert contents(scenario) == [(True, b"beside"), (True, b"first"), (True, b"second")]
    assert [t.n_rows for t in scenario.transactions] == [0, 1]
    assert [m.commit_lsn for m in scenario.sink.messages[1:]] == [scenario.transactions[1].commit_lsn] * 2


def test_a_transaction_of_messages_alone_is_released(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("SELECT pg_logical_emit_message(true, 'p', 'alone')")
    scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    assert contents(scenario) == [(True, b"alone")] and [t.n_rows for t in scenario.transactions] == [0]


def test_fact_10_a_streamed_message_of_a_rolled_back_subtransaction_stays(scenario: Scenario) -> None:
    """It cannot be told apart on the wire; without streaming the server drops it (docs/limits.md says so)."""
    scenario.tables("t")
    session = scenario.session(
        "INSERT INTO t VALUES (1, 'x')",
        "SAVEPOINT s",
        "SELECT pg_logical_emit_message(true, 'p', 'rolled back')",
    )
    scenario.read()
    session.execute("ROLLBACK TO s")
    session.execute("SELECT pg_logical_emit_message(true, 'p', 'kept')")
    session.execute("COMMIT")
    scenario.agree(dropped=frozenset({b"rolled back"}))
    assert contents(scenario) == [(True, b"rolled back"), (True, b"kept")]
    assert [m.content for m in scenario.twin.sink.messages] == [b"kept"]


def test_truncate_cascade_in_a_stream_is_a_row_for_each_table_in_place(scenario: Scenario) -> None:
    scenario.run(
        "CREATE TABLE a (id bigint PRIMARY KEY)", "CREATE TABLE b (id bigint PRIMARY KEY REFERENCES a)"
    )
    scenario.open()
    session = scenario.session("INSERT INTO a VALUES (1), (2)", "INSERT INTO b VALUES (1)")
    scenario.read()
    session.execute("TRUNCATE a, b CASCADE")
    session.execute("INSERT INTO a VALUES (3)")
    scenario.read()
    session.execute("SAVEPOINT s")
    session.execute("TRUNCATE a CASCADE")
    scenario.read()
    session.execute("ROLLBACK TO s")
    session.execute("INSERT INTO b VALUES (3)")
    session.execute("COMMIT")
    scenario.agree()
    found = [(r["table"], r["_change_type"], r["id"]) for r in scenario.sink.rows()]
    assert found == [
        ("public.a", "insert", 1),
        ("public.a", "insert", 2),
        ("public.b", "insert", 1),
        ("public.a", "truncate", None),
        ("public.b", "truncate", None),
        ("public.a", "insert", 3),
        ("public.b", "insert", 3),
    ]
    assert [r["_seq"] for r in scenario.sink.rows()] == list(range(7))


def test_publication_without_truncate_sends_none(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY)")
    scenario.open(publication="FOR TABLE t WITH (publish = 'insert, delete')")
    scenario.session("INSERT INTO t VALUES (1)", "UPDATE t SET id = 2", "TRUNCATE t").execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [("insert", 1)]


# -- partitions, filters -------------------------------------------------------------------------------

PARTITIONS = (
    "CREATE TABLE root (id bigint, k int, v text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k)",
    "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE high (v text, junk int, k int NOT NULL, id bigint NOT NULL, PRIMARY KEY (id, k))",
    "ALTER TABLE high DROP COLUMN junk",
    "ALTER TABLE root ATTACH PARTITION high FOR VALUES FROM (100) TO (200)",
)


def test_013_rows_of_reordered_leaves_have_the_roots_layout_and_moves_are_delete_and_insert(
    scenario: Scenario,
) -> None:
    scenario.run(*PARTITIONS)
    scenario.open(publication="FOR TABLE root WITH (publish_via_partition_root)")
    session = scenario.session("INSERT INTO root VALUES (1, 1, 'low'), (2, 150, 'high')")
    scenario.read()
    session.execute("UPDATE root SET k = 160 WHERE id = 1")
    session.execute("UPDATE root SET v = 'updated' WHERE id = 2")
    scenario.read()
    session.execute("TRUNCATE root")
    session.execute("COMMIT")
    scenario.agree()
    assert {r["table"] for r in scenario.sink.rows()} == {"public.root"}
    assert len({r["relid"] for r in scenario.sink.rows()}) == 1
    assert scenario.changes() == [
        ("insert", 1, 1, "low"),
        ("insert", 2, 150, "high"),
        ("delete", 1, 1, None),
        ("insert", 1, 160, "low"),
        ("update_postimage", 2, 150, "updated"),
        ("truncate", None, None, None),
    ]


def test_013_without_root_each_leaf_has_its_own_rows_and_layout(scenario: Scenario) -> None:
    scenario.run(*PARTITIONS)
    scenario.open(publication="FOR TABLE root")
    session = scenario.session("INSERT INTO root VALUES (1, 1, 'low')")
    scenario.read()
    session.execute("UPDATE root SET k = 160")
    session.execute("COMMIT")
    scenario.agree()
    found = [(r["table"], r["_change_type"]) for r in scenario.sink.rows()]
    assert found == [("public.low", "insert"), ("public.low", "delete"), ("public.high", "insert")]
    assert scenario.changes("public.high") == [("insert", "low", 160, 1)]


@EXTREMES
def test_fact_18_the_roots_relation_comes_before_the_leafs_and_rows_name_the_root(scenario: Scenario) -> None:
    scenario.run(*PARTITIONS)
    scenario.open(publication="FOR TABLE root WITH (publish_via_partition_root)")
    scenario.session("INSERT INTO root VALUES (1, 150, 'x')").execute("COMMIT")
    scenario.agree()
    root, leaf = scenario.streamed.bodies("R")
    assert b"\0root\0" in root and b"\0high\0" in leaf
    (insert,) = scenario.streamed.bodies("I")
    assert insert[4:8] == root[4:8] != leaf[4:8]
    assert scenario.changes() == [("insert", 1, 150, "x")]


def test_028_an_update_that_crosses_a_row_filter_is_an_insert_or_a_delete(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, k int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.open(publication="FOR TABLE t WHERE (k > 10)")
    session = scenario.session("INSERT INTO t VALUES (1, 5), (2, 15), (3, 25)")
    scenario.read()
    session.execute("UPDATE t SET k = k + 10")
    scenario.read()
    session.execute("UPDATE t SET k = 0 WHERE id = 2")
    session.execute("DELETE FROM t WHERE id = 2")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", 2, 15),
        ("insert", 3, 25),
        ("insert", 1, 15),
        ("update_preimage", 2, 15),
        ("update_postimage", 2, 25),
        ("update_preimage", 3, 25),
        ("update_postimage", 3, 35),
        ("delete", 2, 25),
    ]


def test_031_a_column_list_gives_the_listed_columns_only(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, secret text, v text)")
    scenario.open(publication="FOR TABLE t (id, v)")
    session = scenario.session("INSERT INTO t VALUES (1, 'secret', 'a')", "UPDATE t SET secret = 'other'")
    scenario.read()
    session.execute("UPDATE t SET id = 2, v = 'b'")
    session.execute("DELETE FROM t")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [
        ("insert", 1, "a"),
        ("update_postimage", 1, "a"),
        ("update_preimage", 1, None),
        ("update_postimage", 2, "b"),
        ("delete", 2, None),
    ]
    assert not any(b"secret" in data or b"other" in data for data in scenario.streamed.wire)


@EXTREMES
def test_fact_18_generated_columns_are_absent_unless_published(scenario: Scenario) -> None:
    scenario.run(
        "CREATE TABLE t (id bigint PRIMARY KEY, twice bigint GENERATED ALWAYS AS (id * 2) STORED, v text)"
    )
    with_them = scenario.database.version >= 18
    scenario.run(
        "CREATE PUBLICATION p FOR TABLE t"
        + (" WITH (publish_generated_columns = stored)" if with_them else "")
    )
    scenario.open()
    scenario.session("INSERT INTO t (id, v) VALUES (1, 'x')").execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [("insert", 1, 2, "x") if with_them else ("insert", 1, "x")]
