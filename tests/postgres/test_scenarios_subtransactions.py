"""Scenario *subtransactions*: what ROLLBACK TO takes away of a stream, and what it leaves."""

from __future__ import annotations

import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import EXTREMES, Scenario

pytestmark = pytest.mark.postgres


def rows(first: int, last: int, v: str = "x") -> str:
    return f"INSERT INTO t SELECT i, '{v}' FROM generate_series({first}, {last}) i"


def dense(scenario: Scenario) -> bool:
    return all([r["_seq"] for r in t.rows()] == list(range(t.n_rows)) for t in scenario.transactions)


def test_016_many_savepoints_keep_all_rows(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(rows(1, 3))
    for n in range(1, 31):
        session.execute(f"SAVEPOINT s{n}")
        session.execute(rows(10 * n, 10 * n + 2).encode())
        if n % 10 == 0:
            scenario.read()
    session.execute("UPDATE t SET v = 'updated' WHERE id % 3 = 0")
    session.execute("COMMIT")
    scenario.agree()
    inserted = [1, 2, 3, *(10 * n + i for n in range(1, 31) for i in range(3))]
    assert [r["id"] for r in scenario.sink.rows() if r["_change_type"] == "insert"] == inserted
    assert dense(scenario)


def test_018_nested_rollback_to_s2_then_s1_keeps_what_came_before_s1(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(rows(1, 5), "SAVEPOINT s1", rows(11, 15), "SAVEPOINT s2", rows(21, 25))
    scenario.read()
    session.execute("ROLLBACK TO s2")
    session.execute(rows(31, 35).encode())
    scenario.read()
    session.execute("ROLLBACK TO s1")
    session.execute(rows(41, 45).encode())
    scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [*range(1, 6), *range(41, 46)] and dense(scenario)


def test_release_s2_then_rollback_to_s1_drops_the_released_too(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(
        "SAVEPOINT s1", rows(1, 5), "SAVEPOINT s2", rows(11, 15), "RELEASE s2", rows(21, 25)
    )
    scenario.read()
    session.execute("ROLLBACK TO s1")
    session.execute(rows(31, 35).encode())
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == list(range(31, 36)) and dense(scenario)


def test_500_kept_500_rolled_back_5_kept_are_505_rows(scenario: Scenario) -> None:
    """Under memory pressure, spilled, with the rolled-back rows in the middle of segments."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(immediate=False, buffer_memory_bytes=30_000, block_bytes=20_000)
    wide = "x" * 80
    session = scenario.session(rows(1, 500, wide), "SAVEPOINT a", rows(1001, 1250, wide), "SAVEPOINT b")
    session.execute(rows(1251, 1500, wide).encode())
    scenario.read()
    session.execute("ROLLBACK TO a")
    session.execute(rows(2001, 2005, wide).encode())
    session.execute("COMMIT")
    scenario.read()
    assert scenario.streamed.pipeline.buffers.n_spills > 1
    scenario.agree()
    assert scenario.ids() == [*range(1, 501), *range(2001, 2006)] and dense(scenario)
    assert scenario.transactions[0].n_rows == 505


EXCEPTION_BLOCKS = """DO $$ BEGIN FOR i IN 1..{} LOOP BEGIN
    INSERT INTO t VALUES (i, 'x');
    IF i % 2 = 0 THEN RAISE division_by_zero; END IF;
  EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END $$"""


def test_10000_exception_blocks_are_exact_in_bounded_memory(scenario: Scenario) -> None:
    """Under memory pressure: the server forgets most of what is rolled back before it streams it."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(immediate=False, buffer_memory_bytes=60_000)
    scenario.run(EXCEPTION_BLOCKS.format(10_000))
    scenario.read()
    buffers = scenario.streamed.pipeline.buffers
    assert buffers.n_spills > 0 and buffers.highest_bytes <= 60_000
    scenario.agree(twin=False)  # which the server needs seconds for
    assert scenario.ids() == list(range(1, 10_000, 2)) and dense(scenario)
    assert scenario.streamed.kinds().count("A") > 0


def test_exception_blocks_that_are_all_streamed_before_they_are_rolled_back(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(buffer_memory_bytes=5_000, block_bytes=4_000)
    scenario.run(EXCEPTION_BLOCKS.format(600))
    scenario.read()
    assert scenario.streamed.pipeline.buffers.n_spills > 1
    scenario.agree()
    assert scenario.ids() == list(range(1, 600, 2)) and dense(scenario)
    assert scenario.streamed.kinds().count("A") == 300


@EXTREMES
def test_fact_13_children_abort_before_their_parent_and_an_unknown_subxid_is_nothing(
    scenario: Scenario,
) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)", "CREATE TABLE unpublished (id int)")
    scenario.open(publication="FOR TABLE t")
    session = scenario.session(
        rows(1, 2), "SAVEPOINT parent", rows(11, 12), "SAVEPOINT child", rows(21, 22), "RELEASE child"
    )
    scenario.read()
    session.execute("ROLLBACK TO parent")
    scenario.read()
    xids = [(b[:4], b[4:8]) for b in scenario.streamed.bodies("A")]
    child, parent = (sub for _, sub in xids)
    assert child > parent and len({top for top, _ in xids}) == 1
    # One whose rows nobody publishes: its A names a subxid that was never on the wire.
    session.execute("SAVEPOINT silent")
    session.execute("INSERT INTO unpublished SELECT i FROM generate_series(1, 5) i")
    scenario.read()
    session.execute("ROLLBACK TO silent")
    session.execute(rows(31, 32).encode())
    session.execute("COMMIT")
    scenario.agree()
    seen = {b[:4] for b in scenario.streamed.bodies("I")}
    assert any(b[4:8] not in seen for b in scenario.streamed.bodies("A"))
    assert scenario.ids() == [1, 2, 31, 32]


@EXTREMES
def test_fact_13_changes_after_rollback_to_carry_a_new_subxid(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("SAVEPOINT s", rows(1, 1))
    scenario.read()
    for n in (2, 3):
        session.execute("ROLLBACK TO s")
        session.execute(rows(n, n).encode())
        scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    subxids = [b[:4] for b in scenario.streamed.bodies("I")]
    assert len(set(subxids)) == 3 and scenario.ids() == [3]


def test_subtransaction_of_a_transaction_whose_top_level_has_no_row(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("SAVEPOINT s", rows(1, 3))
    scenario.read()
    session.execute("RELEASE s")
    session.execute("COMMIT")
    session = scenario.session("SAVEPOINT s", rows(11, 13))
    scenario.read()
    session.execute("ROLLBACK TO s")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [1, 2, 3] and len(scenario.transactions) == 1
