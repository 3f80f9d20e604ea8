"""A run that works is asked from another process: of a transaction that is open, and of a sink that hangs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.e2e.conftest import Pipeline
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)


def status(pipeline: Pipeline, *more: str) -> subprocess.CompletedProcess[str]:
    """As a person asks who knows the slot and the server, from a terminal of their own."""
    slot = pipeline.config().slot
    return subprocess.run(
        [sys.executable, "-m", "actors", "status", "--slot", slot, "--dsn", pipeline.database.dsn(), *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def account(pipeline: Pipeline) -> dict[str, Any]:
    asked = status(pipeline, "--json")
    assert asked.returncode == 0, asked.stderr
    (line,) = asked.stdout.splitlines()
    return dict(json.loads(line))


def rolled_back(query: Any) -> list[Any]:
    """The open transactions whose rollback to a savepoint was told."""
    return [t for t in query._supervisor.account().open if t.n_rolled_back_subtransactions == 1]


@NEWEST
def test_status_names_a_large_transaction_before_it_commits_and_then_the_sink_that_it_waits_for(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    database = pipeline.database
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    entered, may_return = threading.Event(), threading.Event()

    def hang(batch: Any) -> None:
        entered.set()
        assert may_return.wait(120)
        pipeline.handle(batch)

    pipeline.handle, plain = hang, pipeline.handle  # type: ignore[method-assign]
    query = pipeline.start(buffer_memory_bytes="1MB", block_bytes="256kB")
    pipeline.handle = plain  # type: ignore[method-assign]
    pipeline.wait_until_reading()
    with caplog.at_level(logging.WARNING), database.connect() as session:
        session.autocommit = False
        session.execute("insert into t select i, repeat('x', 100) from generate_series(1, 50000) i")
        session.execute("savepoint a")
        session.execute("insert into t select i, repeat('x', 100) from generate_series(50001, 60000) i")
        session.execute("rollback to a")
        session.execute("insert into t select i, repeat('x', 100) from generate_series(70001, 75000) i")
        row = session.execute("select pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        # What does not fill logical_decoding_work_mem, 64 kB, stays with the server until the COMMIT.
        wait_until(lambda: any(t.n_rows > 54_000 for t in rolled_back(query)), 60)
        told = account(pipeline)
        (open_,) = told["open"]
        assert (open_["xid"], open_["tables"]) == (row[0], ["public.t"])
        assert 54_000 < open_["n_rows"] < 55_000
        assert open_["n_bytes"] > 64_000 * 100, "all that the server sent, rolled back or not"
        assert open_["n_bytes_spilled"] > 0 and open_["n_segments"] > 0 and open_["streamed"]
        assert open_["n_rolled_back_subtransactions"] == 1 and open_["age_s"] > 0
        assert told["run"]["state"] == "reading" and told["stalls"] == []
        assert told["slot"]["wal_held_bytes"] > 0 and told["slot"]["active_pid"] is not None
        assert {p["part"] for p in told["processes"]} >= {
            "run",
            "slot reader",
            "commit sequencer",
            "xid buffer 0",
        }
        assert all(p["memory_bytes"] > 10_000_000 for p in told["processes"])
        assert told["sink"]["n_rows"] == 0, "nothing of it is in the sink before its COMMIT"
        shown = status(pipeline)
        assert shown.returncode == 0 and f"xid {row[0]}" in shown.stdout, shown.stdout + shown.stderr
        session.commit()
        wait_until(entered.is_set, 60)
        wait_until(lambda: "stalled: the commit sequencer waits for the sink" in caplog.text, 30)
        told = account(pipeline)
        (stall,) = told["stalls"]
        assert (stall["part"], stall["waits_for"]) == ("commit sequencer", "sink")
        assert told["sink"]["in_hand"]["n_rows"] == 55_000 and told["open"] == []
        may_return.set()
        wait_until(lambda: query.lastProgress["caughtUp"] and query.lastProgress["rows"] == 55_000, 60)
        wait_until(lambda: "no longer stalled" in caplog.text, 30)
    told = account(pipeline)
    assert told["stalls"] == [] and told["sink"]["in_hand"] is None
    assert told["sink"]["batches"][-1]["n_rows"] == 55_000 and told["sink"]["latency"]["p50_ms"] > 15_000
    query.stop()
    told = account(pipeline)
    assert told["run"] is None and told["slot"]["active_pid"] is None, (
        "nothing runs: the server says what it has"
    )
