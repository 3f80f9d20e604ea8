"""Scenarios *streams* and *aborts*, and the facts of order, acknowledging and restarting that go with them."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.differential.local_pipeline import LocalPipeline, Options, Sink
from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import EXTREMES, Scenario
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.postgres.admin import create_slot
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.skips import Skip, read_skips, write_skip
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres

INSERT = "INSERT INTO {} SELECT i, repeat('x', 100) FROM generate_series({}, {}) i"


def lsn_of(data: bytes) -> int:
    return int.from_bytes(data[1:9], "big")


# -- streams -------------------------------------------------------------------------------------------


def test_015_big_transactions_interleave_and_the_second_commits_first(scenario: Scenario) -> None:
    """By memory pressure, as PostgreSQL's own test: no debugging setting."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(immediate=False)
    first = scenario.session(INSERT.format("t", 1, 400))
    second = scenario.session(INSERT.format("t", 1001, 1400))
    scenario.read()
    assert scenario.transactions == []
    first.execute(INSERT.format("t", 401, 800))
    second.execute(INSERT.format("t", 1401, 1800))
    second.execute("COMMIT")
    scenario.read()
    assert scenario.ids() == list(range(1001, 1801)) and scenario.transactions[0].streamed
    first.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [*range(1001, 1801), *range(1, 801)]
    assert [t.n_rows for t in scenario.transactions] == [800, 800]


def test_a_stream_that_filters_to_nothing_moves_the_position_and_leaves_no_rows(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint)", "CREATE TABLE unpublished (id bigint, v text)")
    scenario.open(publication="FOR TABLE t WHERE (id < 0)", immediate=False)
    before = scenario.streamed.confirmed_flush()
    scenario.session(INSERT.format("unpublished", 1, 800), "INSERT INTO t VALUES (5)").execute("COMMIT")
    end = scenario.flush()
    scenario.agree()
    assert scenario.transactions == [] and scenario.streamed.confirmed_flush() >= end > before


def test_32_open_streams_committed_in_reverse_are_released_in_commit_order(scenario: Scenario) -> None:
    scenario.tables("t")
    sessions = [scenario.session(f"INSERT INTO t VALUES ({i}, 'first')") for i in range(32)]
    scenario.read()
    for i, session in enumerate(sessions):
        session.execute(f"INSERT INTO t VALUES ({i + 100}, 'second')")
    scenario.read()
    assert scenario.transactions == []
    for session in reversed(sessions):
        session.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [n for i in reversed(range(32)) for n in (i, i + 100)]
    lsns = [t.commit_lsn for t in scenario.transactions]
    assert lsns == sorted(set(lsns)) and len(lsns) == 32
    assert [t.xid for t in scenario.transactions] != sorted(t.xid for t in scenario.transactions)


def test_small_commits_flow_beside_an_open_stream(scenario: Scenario) -> None:
    scenario.tables("t")
    giant = scenario.session("INSERT INTO t SELECT i, 'giant' FROM generate_series(1, 50) i")
    for i in range(1000, 1005):
        scenario.run(f"INSERT INTO t VALUES ({i}, 'small')")
        scenario.read()
        assert scenario.ids()[-1] == i
        giant.execute(f"INSERT INTO t VALUES ({i - 500}, 'giant')")
    giant.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [*range(1000, 1005), *range(1, 51), *range(500, 505)]


# -- aborts --------------------------------------------------------------------------------------------


def test_rollback_of_a_streamed_transaction_releases_nothing_and_deletes_its_spill(
    scenario: Scenario,
) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    scenario.open(buffer_memory_bytes=10_000)
    session = scenario.session(INSERT.format("t", 1, 300))
    scenario.read()
    scenario.streamed.pipeline.read_some(1)
    session.execute(INSERT.format("t", 301, 600))
    scenario.read()
    assert scenario.left_in_storage() != [], "the test means to spill"
    session.execute("ROLLBACK")
    scenario.read()
    assert scenario.left_in_storage() == [] and scenario.transactions == []
    assert scenario.streamed.pipeline.buffers.n_open == 0
    scenario.run("INSERT INTO t VALUES (1, 'after')")
    scenario.agree()
    assert scenario.ids() == [1]


def test_fact_6_an_abort_carries_its_lsn_and_time_under_parallel_alone(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session("INSERT INTO t VALUES (1, 'x')")
    scenario.read()
    session.execute("ROLLBACK")
    scenario.agree()
    (abort,) = scenario.streamed.bodies("A")
    assert len(abort) == (24 if scenario.mode == "parallel" else 8)


# -- messages and order --------------------------------------------------------------------------------


@EXTREMES
def test_fact_2_header_lsns_are_zero_or_go_backwards_and_nothing_is_confirmed_from_them(
    scenario: Scenario,
) -> None:
    scenario.tables("t")
    old = scenario.session("INSERT INTO t VALUES (1, 'old')")
    scenario.read()
    scenario.run("INSERT INTO t VALUES (2, 'new')")
    confirmed = scenario.read().confirmations[-1][0]
    old.execute("INSERT INTO t VALUES (3, 'old')")
    old.execute("COMMIT")
    scenario.agree()
    wire = scenario.twin.wire
    assert {lsn_of(d) for d in wire if d[25] == ord("R")} == {0}
    lsns = [lsn_of(d) for d in wire if lsn_of(d)]
    assert lsns != sorted(lsns), "the twin's transactions overlap, so their changes' LSNs go back"
    assert scenario.sink.confirmations[-1][0] >= confirmed


def test_facts_3_and_4_rows_carry_the_subxid_and_a_message_the_top_level_xid(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session(
        "INSERT INTO t VALUES (1, 'top')",
        "SAVEPOINT a",
        "INSERT INTO t VALUES (2, 'sub')",
        "SELECT pg_logical_emit_message(true, 'p', 'in the subtransaction')",
    )
    scenario.read()
    session.execute("COMMIT")
    scenario.agree()
    top, sub = (int.from_bytes(body[:4], "big") for body in scenario.streamed.bodies("I"))
    (message,) = scenario.streamed.bodies("M")
    assert sub != top == int.from_bytes(message[:4], "big") == scenario.transactions[0].xid
    assert {row["_xid"] for row in scenario.sink.rows()} == {top}
    assert [m.xid for m in scenario.sink.messages] == [top]


@EXTREMES
def test_fact_9_an_origin_is_told_once_a_stream_and_its_lsn_is_zero(scenario: Scenario) -> None:
    scenario.tables("t")
    name = f"o_{scenario.database.name}"
    scenario.run(f"SELECT pg_replication_origin_create('{name}')")
    try:
        session = scenario.database.connect()
        session.execute(f"SELECT pg_replication_origin_session_setup('{name}')")
        session.execute("SET synchronous_commit = on")
        session.execute("BEGIN")
        session.execute("SELECT pg_replication_origin_xact_setup('0/ABCD', now())")
        for i in range(3):
            session.execute(f"INSERT INTO t VALUES ({i}, 'x')")
            scenario.read()
        session.execute("COMMIT")
        session.execute("INSERT INTO t VALUES (10, 'plain')")
        session.close()
        scenario.agree()
        assert [t.origin for t in scenario.transactions] == [name, name]
        assert scenario.streamed.kinds().count("S") >= 3
        assert scenario.streamed.bodies("O")[0] == bytes(8) + name.encode() + b"\0"
    finally:
        scenario.streamed.crash()
        scenario.twin.crash()
        scenario.run(f"SELECT pg_replication_origin_drop('{name}')")


@EXTREMES
def test_fact_11_commit_lsns_increase_while_xids_and_timestamps_need_not(scenario: Scenario) -> None:
    scenario.tables("t")
    first = scenario.session("INSERT INTO t VALUES (1, 'x')")
    second = scenario.session("INSERT INTO t VALUES (2, 'x')")
    scenario.read()
    second.execute("COMMIT")
    scenario.run("INSERT INTO t VALUES (3, 'x')")
    first.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [2, 3, 1]
    lsns = [t.commit_lsn for t in scenario.transactions]
    assert lsns == sorted(lsns) and [t.xid for t in scenario.transactions] != sorted(
        t.xid for t in scenario.transactions
    )


@EXTREMES
def test_fact_12_rows_of_one_copy_share_an_lsn_and_keep_identities_of_their_own(scenario: Scenario) -> None:
    scenario.tables("t")
    session = scenario.session()
    with session.cursor() as cursor, cursor.copy("COPY t FROM STDIN") as copy:
        for i in range(60):
            copy.write_row((i, "x"))
    session.execute("COMMIT")
    scenario.agree()
    lsns = [lsn_of(d) for d in scenario.streamed.wire if d[25] == ord("I")]
    assert len(lsns) == 60 and len(set(lsns)) < 60
    rows = scenario.sink.rows()
    assert len({(r["_commit_lsn"], r["_seq"]) for r in rows}) == 60 and scenario.ids() == list(range(60))


# -- acknowledging and restarting ----------------------------------------------------------------------


@EXTREMES
def test_fact_23_what_is_confirmed_by_its_end_lsn_is_not_sent_again(scenario: Scenario) -> None:
    scenario.tables("t")
    scenario.run("INSERT INTO t VALUES (1, 'x')")
    scenario.read()
    scenario.streamed.stop()
    assert scenario.streamed.confirmed_flush() >= scenario.transactions[0].end_lsn
    scenario.streamed.wire.clear()
    scenario.run("INSERT INTO t VALUES (2, 'x')")
    scenario.read()
    assert len(scenario.streamed.bodies("I")) == 1
    session = scenario.session("INSERT INTO t VALUES (3, 'x')")
    session.execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [1, 2, 3]


@EXTREMES
def test_fact_23_acknowledging_the_commit_lsn_alone_has_the_transaction_sent_again(
    scenario: Scenario,
) -> None:
    scenario.tables("t")
    scenario.session("INSERT INTO t VALUES (1, 'x')").execute("COMMIT")
    scenario.flush()
    pipeline = scenario.streamed.pipeline
    connection = pipeline.slot.connection
    while b"c" not in [d[25:26] for d in scenario.streamed.wire]:
        pipeline.read_some(10)
        connection.wait_readable(0.01)
    (end,) = scenario.streamed.bodies("c")
    commit_lsn, end_lsn = struct.unpack("!QQ", end[5:21])
    connection.send_status(Lsn(end_lsn), Lsn(commit_lsn), Lsn(commit_lsn))
    assert connection.stop(10)
    pipeline.stages.close()
    scenario.streamed._pipeline = None
    assert scenario.streamed.confirmed_flush() == commit_lsn
    # Our own record refuses a slot that is ahead of it, rightly; nothing was lost here, and we know.
    for path in (scenario._folder / "s").rglob("progress/*.json"):
        path.unlink()
    scenario.agree()
    # The second time it is below the point from which the server streams.
    assert scenario.ids() == [1] and [k for k in scenario.streamed.kinds() if k in "cC"] == ["c", "C"]


@EXTREMES
def test_fact_24_an_open_transaction_holds_no_confirmation_back_and_survives_a_crash(
    scenario: Scenario,
) -> None:
    scenario.tables("t")
    opened = scenario.session("INSERT INTO t VALUES (1, 'before')")
    scenario.read()
    first_change = lsn_of(scenario.streamed.wire[-1])
    scenario.run("INSERT INTO t VALUES (2, 'beside')")
    scenario.read()
    scenario.streamed.stop()
    assert scenario.streamed.confirmed_flush() > first_change > 0
    scenario.streamed.wire.clear()
    opened.execute("INSERT INTO t VALUES (3, 'after')")
    scenario.read()
    first_block = next(d for d in scenario.streamed.wire if d[25] == ord("S"))
    assert first_block[30] == 1, "it starts again with first=1"
    scenario.streamed.crash()
    opened.execute("COMMIT")
    scenario.agree()
    assert scenario.changes() == [("insert", 2, "beside"), ("insert", 1, "before"), ("insert", 3, "after")]


@EXTREMES
def test_fact_26_an_idle_published_table_lets_the_slot_advance_beside_busy_others(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint)", "CREATE TABLE busy (id bigint, v text)")
    scenario.open(publication="FOR TABLE t")
    before = scenario.streamed.confirmed_flush()
    scenario.run(INSERT.format("busy", 1, 500))
    scenario.read()
    scenario.streamed.stop()
    assert scenario.streamed.confirmed_flush() - before > 50_000
    scenario.session("INSERT INTO t VALUES (1)").execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [1]


@EXTREMES
def test_a_transaction_that_was_given_up_is_left_out_and_written_down_and_the_others_come(
    scenario: Scenario,
) -> None:
    scenario.tables("t")
    for first in (1, 11, 21):
        scenario.session(INSERT.format("t", first, first + 2)).execute("COMMIT")
    target = scenario.flush()
    twin = scenario.twin.pipeline
    twin.read_until(target)
    second = scenario.twin.sink.transactions[1]
    layout = Layout(twin.layout.system_identifier, scenario.streamed.slot, "skip")
    storage = Storage(str(scenario.streamed.folder))
    now = datetime.datetime.now(datetime.timezone.utc)
    write_skip(storage, layout, Skip(Xid(second.xid), Lsn(second.commit_lsn), now))
    scenario.read()
    assert scenario.ids() == [1, 2, 3, 21, 22, 23]
    assert scenario.streamed.pipeline.stages.report().skipped == ((second.xid, second.commit_lsn),)
    (noted,) = read_skips(storage, layout)
    ((relid,),) = scenario.database.execute("SELECT 't'::regclass::oid::int8")
    assert noted.left_out_at is not None and noted.relids == (relid,)
    assert scenario.left_in_storage() == []


@EXTREMES
def test_fact_26_a_keepalive_does_not_overtake_what_is_not_released(scenario: Scenario) -> None:
    """The position of a keepalive after a commit is confirmed only once the commit's rows are in the sink."""
    scenario.tables("t")
    scenario.run("INSERT INTO t VALUES (1, 'x')")
    target = scenario.flush()
    pipeline = scenario.streamed.pipeline
    connection = pipeline.slot.connection
    while pipeline._received < target:
        connection.send_status(Lsn(0), Lsn(0), Lsn(0), True)
        pipeline.read_some(100)
        connection.wait_readable(0.01)
    report = pipeline.stages.report()
    assert report.sequencer.n_waiting and scenario.transactions == []
    assert report.confirmed_lsn < target
    scenario.session("INSERT INTO t VALUES (2, 'x')").execute("COMMIT")
    scenario.agree()
    assert scenario.ids() == [1, 2]


@pytest.mark.parametrize("version", [16, 18])
def test_fact_25_after_an_immediate_stop_the_server_repeats_and_the_sink_drops(
    version: int, own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    server = own_postgres(version=version, settings={"synchronous_commit": "on", "checkpoint_timeout": "1h"})
    sink, wire = Sink(), []

    def run(*statements: str) -> Lsn:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
            (row,) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
            return Lsn.parse(row[0])

    def read(target: Lsn, epoch: str) -> Lsn:
        """Returns where the slot was when it was opened."""
        with LocalPipeline(
            server.conninfo(), "s", ("p",), tmp_path, sink, Options(), epoch=epoch, peek=wire.append
        ) as pipeline:
            pipeline.read_until(target)
            pipeline.stop()
            return pipeline.slot.confirmed_flush_lsn

    run("CREATE TABLE t (id bigint PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR ALL TABLES")
    create_slot(server.conninfo(), "s")
    # The first confirmation advances restart_lsn too, and is written to disk for that; later ones are not.
    read(run("INSERT INTO t VALUES (1, 'x')"), "1")
    read(run(INSERT.format("t", 1001, 1800), "INSERT INTO t VALUES (5000, 'x')"), "2")
    assert [t.n_rows for t in sink.transactions] == [1, 800, 1]
    wire.clear()
    server.restart("immediate")
    at = read(run("INSERT INTO t VALUES (6000, 'x')"), "3")
    assert at < sink.transactions[1].end_lsn, "the slot went back"
    assert sum(d[25] == ord("I") for d in wire) > 800, "and the server repeats"
    assert [t.n_rows for t in sink.transactions] == [1, 800, 1, 1]
