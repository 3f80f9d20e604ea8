"""Server, reader, buffers, sequencer and a RayDP session together; the source tables are the judge."""

from __future__ import annotations

import decimal
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql.streaming import StreamingQueryListener

import xidstream
from tests.e2e.conftest import Pipeline
from tests.postgres_fixtures import Database
from xidstream import ChangeStream
from xidstream.pipeline.errors import PreconditionMissing, SinkFailed

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).parents[2]
OLDEST = pytest.param(16, marks=pytest.mark.slow)
"""The server's part of these tests runs on both versions in tests/postgres each time."""
BOTH = pytest.mark.parametrize("postgres_server", [OLDEST, 18], indirect=True)
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)

ROWS = """
insert into t select i, 'note ' || i, i / 100.0 from generate_series({}::bigint, {}::bigint) i
"""


class Heard(StreamingQueryListener):
    """Notes what it is told, and raises each time."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.others: list[Any] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self.others.append(("started", event.name))
        raise ValueError("no")

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self.batches.append(event.progress)
        raise ValueError("no")

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self.others.append(("terminated", event.errorClassOnException))
        raise ValueError("no")


def set_up(database: Database) -> None:
    database.execute("create table t (id bigint primary key, note text, amount numeric(12,2))")
    database.execute("create table u (id bigint primary key, v int)")
    database.execute("create publication p for table t, u")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("postgres_server", "proto_version", "streaming"),
    [
        (16, 2, "on"),
        pytest.param(16, 4, "parallel", marks=pytest.mark.slow),
        (18, 1, "off"),
        pytest.param(18, 3, "on", marks=pytest.mark.slow),
        (18, 4, "on"),
    ],
    indirect=["postgres_server"],
)
def test_committed_rows_arrive_in_commit_order_at_each_protocol(
    pipeline: Pipeline, proto_version: int, streaming: str
) -> None:
    database, settings = pipeline.database, {"proto_version": proto_version, "streaming": streaming}
    set_up(database)
    pipeline.create_slot(**settings)
    with database.connect() as first, database.connect() as second:
        first.execute(b"begin")
        first.execute(ROWS.format(1, 5000).encode())
        second.execute(b"begin")
        second.execute(ROWS.format(10001, 15000).encode())
        first.execute(ROWS.format(5001, 8000).encode())
        database.execute("insert into u values (1, 1)")
        second.execute(b"commit")
        first.execute(b"savepoint s")
        first.execute(ROWS.format(20001, 24000).encode())
        first.execute(b"rollback to savepoint s")
        first.execute(ROWS.format(30001, 30005).encode())
        first.execute(b"commit")
        first.execute(b"begin")
        first.execute(ROWS.format(40001, 45000).encode())
        first.execute(b"rollback")
    database.execute("update t set amount = 0.5 where id = 1")
    database.execute("delete from t where id = 2")
    pipeline.run_available(**settings)

    assert [t["rows"] for t in pipeline.transactions] == [1, 5000, 8005, 1, 1]
    lsns = [t["commit_lsn"] for t in pipeline.transactions]
    assert lsns == sorted(set(lsns))
    assert [t["streamed"] for t in pipeline.transactions] == [
        False,
        streaming != "off",
        streaming != "off",
        False,
        False,
    ]
    rows = pipeline.rows("public.t")
    for transaction in pipeline.transactions[1:3]:
        seqs = [r["_seq"] for r in rows if r["_commit_lsn"] == transaction["commit_lsn"]]
        assert seqs == list(range(transaction["rows"]))
    assert [r["id"] for r in rows][:13005] == [*range(10001, 15001), *range(1, 8001), *range(30001, 30006)]
    assert rows[5000]["amount"] == decimal.Decimal("0.01") and rows[5000]["note"] == "note 1"
    assert [(r["_change_type"], r["id"]) for r in rows[-2:]] == [("update_postimage", 1), ("delete", 2)]
    stats = database.execute(
        "select stream_txns from pg_stat_replication_slots where slot_name = %s", pipeline.config().slot
    )
    assert (stats[0][0] > 0) == (streaming != "off")


@pytest.mark.slow
@NEWEST
def test_rows_of_an_open_transaction_are_decoded_before_commit_and_released_after(pipeline: Pipeline) -> None:
    set_up(pipeline.database)
    query, heard = pipeline.start(buffer_memory_bytes="1MB", block_bytes=256 << 10), Heard()
    query.addListener(heard)
    with pipeline.database.connect() as open_:
        pipeline.wait_until_reading()
        open_.execute(b"begin")
        open_.execute(ROWS.format(1, 100_000).encode())
        pipeline.wait_until(lambda: (query.lastProgress["openRows"] or 0) > 90_000)
        assert pipeline.segments(), "a buffer over its memory spills before COMMIT"
        pipeline.wait_until(lambda: query.status["message"] == "Waiting for data to arrive")
        pipeline.database.execute("insert into u values (1, 1)")
        pipeline.wait_until(lambda: len(pipeline.transactions) == 1)
        assert pipeline.transactions[0]["tables"] == ["public.u"]
        open_.execute(b"commit")
        pipeline.wait_until(lambda: len(pipeline.transactions) == 2)
    pipeline.wait_until(lambda: not pipeline.segments())
    query.stop()
    assert query.exception() is None and query.awaitTermination(0)
    rows = pipeline.rows("public.t")
    assert [r["id"] for r in rows] == list(range(1, 100_001))
    assert [r["_seq"] for r in rows] == list(range(100_000))

    recent = query.recentProgress
    assert sum(progress["numInputRows"] for progress in recent) == 100_001
    assert query.lastProgress["sources"][0]["endOffset"] == query.lastProgress["lastCommitLsn"]
    assert query.status == {"message": "Stopped", "isDataAvailable": False, "isTriggerActive": False}
    assert [progress.batchId for progress in heard.batches] == [progress["batchId"] for progress in recent]
    assert heard.others == [("terminated", None)]


@pytest.mark.slow
@NEWEST
def test_a_rolled_back_streamed_transaction_releases_nothing_and_leaves_no_segment(
    pipeline: Pipeline,
) -> None:
    set_up(pipeline.database)
    query = pipeline.start(buffer_memory_bytes="1MB", block_bytes=256 << 10)
    pipeline.wait_until_reading()
    with pipeline.database.connect() as doomed:
        doomed.execute(b"begin")
        doomed.execute(ROWS.format(1, 100_000).encode())
        pipeline.wait_until(lambda: bool(pipeline.segments()))
        doomed.execute(b"rollback")
    pipeline.database.execute("insert into u values (1, 1)")
    pipeline.wait_until(lambda: len(pipeline.transactions) == 1)
    pipeline.wait_until(lambda: not pipeline.segments())
    query.stop()
    assert "public.t" not in pipeline.tables


@pytest.mark.slow
@NEWEST
def test_rows_behind_a_wholly_rolled_back_block_are_not_lost(pipeline: Pipeline) -> None:
    """An empty record batch ended the stream for RayDP's reader: the five last rows were missing."""
    set_up(pipeline.database)
    pipeline.create_slot()
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(1, 5000).encode())
        session.execute(b"savepoint s")
        session.execute(ROWS.format(50_001, 70_000).encode())
        session.execute(b"rollback to savepoint s")
        session.execute(ROWS.format(90_001, 90_005).encode())
        session.execute(b"commit")
    pipeline.run_available(block_bytes=64 << 10)
    assert pipeline.transactions[0]["rows"] == 5005
    assert [r["id"] for r in pipeline.rows("public.t")] == [*range(1, 5001), *range(90_001, 90_006)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("postgres_server", "streamed"),
    [pytest.param(16, False, marks=pytest.mark.slow), (18, True)],
    indirect=["postgres_server"],
)
def test_prepared_transaction_is_released_at_commit_prepared_even_by_another_run(
    pipeline: Pipeline, streamed: bool
) -> None:
    database, n = pipeline.database, 5000 if streamed else 3
    set_up(database)
    pipeline.create_slot(two_phase=True)
    with database.connect() as session:
        for gid, first in (("../../etc/'\"; drop|é", 1), ("rolled back", 100_001)):
            session.execute(b"begin")
            session.execute(ROWS.format(first, first + n - 1).encode())
            session.execute(psycopg.sql.SQL("prepare transaction {}").format(psycopg.sql.Literal(gid)))
        session.execute(b"insert into u values (1, 1)")
    pipeline.run_available(two_phase=True)
    assert [t["tables"] for t in pipeline.transactions] == [["public.u"]]
    assert len(pipeline.segments()) == 2, "their content is durable before PREPARE is confirmed"
    database.execute("rollback prepared 'rolled back'")
    database.execute("commit prepared '../../etc/''\"; drop|é'")
    pipeline.run_available(two_phase=True)
    assert [t["gid"] for t in pipeline.transactions] == [None, "../../etc/'\"; drop|é"]
    assert pipeline.transactions[1]["streamed"] == streamed
    assert [r["id"] for r in pipeline.rows("public.t")] == list(range(1, n + 1))
    assert pipeline.segments() == []


@pytest.mark.slow
@BOTH
def test_ddl_in_a_streamed_transaction_gives_each_row_its_own_schema(pipeline: Pipeline) -> None:
    database = pipeline.database
    set_up(database)
    pipeline.create_slot()
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(1, 3000).encode())
        session.execute(b"alter table t add column extra int default 7")
        session.execute(b"insert into t select i, 'x', 1, i from generate_series(3001, 6000) i")
        session.execute(b"savepoint s")
        session.execute(b"alter table t drop column note")
        session.execute(b"insert into t select i, 1, i from generate_series(6001, 9000) i")
        session.execute(b"rollback to savepoint s")
        session.execute(b"insert into t values (9001, 'kept', 1, 2)")
        session.execute(b"commit")
    database.execute("insert into t values (9002, 'after', 1, 3)")
    pipeline.run_available()
    rows = pipeline.rows("public.t")
    assert [r["id"] for r in rows] == [*range(1, 6001), 9001, 9002]
    assert [r["_seq"] for r in rows[:6001]] == list(range(6001))
    assert (rows[0]["note"], rows[0]["extra"]) == ("note 1", None)
    assert (rows[3000]["note"], rows[3000]["extra"]) == ("x", 3001)
    assert [(r["note"], r["extra"]) for r in rows[-2:]] == [("kept", 2), ("after", 3)]


@pytest.mark.slow
@BOTH
def test_messages_and_truncates_arrive_in_their_place(pipeline: Pipeline) -> None:
    database = pipeline.database
    set_up(database)
    database.execute("insert into t values (1, 'x', 1)")
    pipeline.create_slot()
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(b"insert into t values (2, 'y', 1)")
        session.execute(b"select pg_logical_emit_message(true, 'kept', 'transactional')")
        session.execute(b"truncate t, u")
        session.execute(b"insert into u values (1, 1)")
        session.execute(b"commit")
        session.execute(b"begin")
        session.execute(b"select pg_logical_emit_message(false, 'survives', 'not transactional')")
        session.execute(b"select pg_logical_emit_message(true, 'dropped', 'transactional')")
        session.execute(b"rollback")
    pipeline.run_available()
    (transaction,) = pipeline.transactions
    assert transaction["rows"] == 4 and transaction["tables"] == ["public.t", "public.u"]
    t, u = pipeline.rows("public.t"), pipeline.rows("public.u")
    assert [(r["_seq"], r["_change_type"]) for r in t + u if r["_change_type"] == "truncate"] == [
        (1, "truncate"),
        (2, "truncate"),
    ]
    assert [(r["_seq"], r["id"]) for r in t + u if r["_change_type"] == "insert"] == [(0, 2), (3, 1)]
    messages = {m["prefix"]: m for m in pipeline.messages}
    assert set(messages) == {"kept", "survives"}
    assert messages["kept"]["commit_lsn"] == transaction["commit_lsn"]
    assert messages["survives"]["commit_lsn"] is None
    assert bytes(messages["survives"]["content"]) == b"not transactional"


@pytest.mark.slow
@NEWEST
def test_an_idle_publication_does_not_hold_wal_back(pipeline: Pipeline) -> None:
    database = pipeline.database
    set_up(database)
    database.execute("create table unpublished (id int)")
    query = pipeline.start(status_interval_ms=200)
    pipeline.wait_until_reading()
    database.execute("insert into unpublished select generate_series(1, 10000)")
    flushed = database.execute("select pg_current_wal_flush_lsn()::text")[0][0]
    pipeline.wait_until(
        lambda: database.execute(
            "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s",
            flushed,
            pipeline.config().slot,
        )[0][0]
    )
    query.stop()
    assert pipeline.transactions == []


@pytest.mark.slow
@NEWEST
def test_an_exception_in_the_handler_ends_the_query_with_nothing_confirmed(pipeline: Pipeline) -> None:
    set_up(pipeline.database)
    pipeline.create_slot()
    pipeline.database.execute("insert into t values (1, 'x', 1)")

    def fail(batch: Any) -> None:
        raise ValueError("no")

    heard = Heard()
    query = ChangeStream(pipeline.config()).addListener(heard).foreachBatch(fail).start(pipeline.spark)
    with pytest.raises(SinkFailed, match="ValueError") as caught:
        query.awaitTermination(60)
    assert isinstance(caught.value.__cause__, ValueError)
    assert heard.others == [("started", pipeline.config().slot), ("terminated", "SinkFailed")]
    assert heard.batches == query.recentProgress == []
    assert query.status["message"].startswith("Terminated with exception: ")
    printed = "".join(traceback.format_exception(caught.value))
    assert "ValueError: no\n" in printed and 'raise ValueError("no")' in printed and "  remedy: " in printed
    pipeline.run_available()
    assert [r["id"] for r in pipeline.rows("public.t")] == [1]


@pytest.mark.slow
@NEWEST
def test_a_column_that_clashes_with_the_contract_parks_its_table_and_the_others_go_on(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    set_up(pipeline.database)
    pipeline.create_slot()
    pipeline.database.execute('alter table t add column "_SEQ" int')
    pipeline.database.execute("insert into t values (1, 'x', 1, 1)")
    pipeline.database.execute("insert into u values (1, 1)")
    pipeline.run_available()
    assert "public.t" not in pipeline.tables and len(pipeline.rows("public.u")) == 1
    assert any("table public.t is parked" in each and "_SEQ" in each for each in caplog.messages)


@NEWEST
def test_a_missing_slot_is_told_with_the_remedy(pipeline: Pipeline) -> None:
    set_up(pipeline.database)
    with pytest.raises(PreconditionMissing) as caught:
        pipeline.start(create_slot=False)
    assert "--create-slot" in caught.value.remedy


@NEWEST
def test_a_misspelt_publication_is_named_at_the_start_with_the_one_that_was_meant(pipeline: Pipeline) -> None:
    """It was a SlotLost, with the first change, and told to take a new snapshot."""
    set_up(pipeline.database)
    pipeline.database.execute("create publication orders for table t")
    with pytest.raises(PreconditionMissing, match="there is no publication 'ordes'") as caught:
        pipeline.start(publication="ordes")
    assert "did you mean orders?" in caught.value.remedy


@pytest.mark.slow
@NEWEST
def test_the_example_script_shows_a_publication(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the session that this process has already; the README's script, which is a process of its own, makes one."""
    monkeypatch.setattr(xidstream, "spark_session", lambda name: pipeline.spark, raising=False)
    set_up(pipeline.database)
    pipeline.create_slot()
    pipeline.database.execute(ROWS.format(1, 7))
    config = pipeline.config()
    script = str(REPOSITORY / "examples" / "shop.py")
    monkeypatch.setattr(sys, "argv", [script, config.dsn, config.slot, "p", config.storage])
    capfd.readouterr()
    runpy.run_path(script, run_name="__main__")
    assert "|      insert|    7|" in capfd.readouterr().out


@NEWEST
def test_delta_holds_exactly_the_committed_rows_after_two_runs(pipeline: Pipeline) -> None:
    from deltalake import DeltaTable

    database = pipeline.database
    set_up(database)

    def run() -> None:
        query = (
            ChangeStream(pipeline.config())
            .toDelta(str(pipeline.delta))
            .trigger(availableNow=True)
            .start(pipeline.spark)
        )
        assert query.awaitTermination(120)

    pipeline.create_slot()
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(1, 20_000).encode())
        session.execute(b"savepoint s")
        session.execute(ROWS.format(50_001, 60_000).encode())
        session.execute(b"rollback to savepoint s")
        session.execute(b"commit")
    run()
    database.execute("insert into t values (99999, 'later', 1)")
    database.execute("insert into u values (1, 1)")
    run()
    table = (
        DeltaTable(str(pipeline.delta / "public~2Et"))
        if (pipeline.delta / "public~2Et").exists()
        else DeltaTable(str(pipeline.delta / "public.t"))
    )
    rows = sorted(table.to_pyarrow_table().to_pylist(), key=lambda r: (r["_commit_lsn"], r["_seq"]))
    expected = database.execute("select id, note, amount from t order by id")
    assert [(r["id"], r["note"], r["amount"]) for r in rows] == expected
    transactions = (
        DeltaTable(str(pipeline.delta / "_transactions")).to_pyarrow_table().sort_by("commit_lsn").to_pylist()
    )
    assert [t["rows"] for t in transactions] == [20_000, 1, 1]
    confirmed = database.execute(
        "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = %s",
        pipeline.config().slot,
    )[0][0]
    assert confirmed >= transactions[-1]["end_lsn"]


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "buffer_memory_bytes",
    [pytest.param("64MB", id="memory", marks=pytest.mark.slow), pytest.param("1MB", id="spilled too")],
)
def test_one_transaction_over_many_tables_arrives_whole_in_each_of_them(
    pipeline: Pipeline, buffer_memory_bytes: str
) -> None:
    """Parts of many tables share an object of the buffer's, and the driver stores those of one table anew."""
    database, tables = pipeline.database, [f"many_{n}" for n in range(40)]
    for table in tables:
        database.execute(
            f"create table {table} (id int primary key, at timestamptz, plain timestamp, n numeric(8,2), a int[])"
        )
    database.execute("create publication p for all tables")
    settings = {"buffer_memory_bytes": buffer_memory_bytes, "logical_decoding_work_mem": "64kB"}
    pipeline.create_slot(**settings)
    one = "insert into {} values ({}, '2024-02-29 00:00:00.000001+00', 'infinity', 1.25, '{{1,null}}')"
    with database.connect() as session:
        for n_rows in (1, 60):
            session.execute(b"begin")
            for i in range(n_rows):
                for table in tables:
                    session.execute(one.format(table, 1_000 * n_rows + i).encode())
            session.execute(b"commit")
    pipeline.run_available(**settings)
    assert [(t["rows"], len(t["tables"])) for t in pipeline.transactions] == [(40, 40), (2_400, 40)]
    for n, table in enumerate(tables):
        rows = pipeline.rows(f"public.{table}")
        assert [(r["id"], r["_seq"]) for r in rows] == [
            (1_000, n),
            *((60_000 + i, 40 * i + n) for i in range(60)),
        ]
        for row in (rows[0], rows[-1]):
            assert (row["plain"], dict(row["_text"])) == (None, {"plain": "infinity"})
            assert (row["n"], row["a"], row["at"].microsecond) == (decimal.Decimal("1.25"), [1, None], 1)
