"""A run that works is asked from another process: of a transaction that is open, and of a sink that hangs. Its metrics
are scraped as Prometheus does it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Pipeline
from tests.waiting import wait_until
from xidstream.pipeline.account import stalls

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


def metrics(told: dict[str, Any]) -> dict[str, float]:
    """What Ray's agent gives a Prometheus that asks for the metrics of this run's slot, with their own labels."""
    with urllib.request.urlopen(told["run"]["metrics"], timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels.get("slot") == told["run"]["slot"]:
            own = [sample.labels[label] for label in ("part", "waits_for") if label in sample.labels]
            found[" ".join((sample.name, *own))] = sample.value
    return found


def rolled_back(query: Any) -> list[Any]:
    """The open transactions whose rollback to a savepoint was told."""
    return [t for t in query._supervisor.account().open if t.n_rolled_back_subtransactions == 1]


@pytest.mark.slow
@NEWEST
def test_status_names_a_large_transaction_before_it_commits_and_then_the_sink_that_it_waits_for(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
        # Only now: on a busy machine the stream itself may rest for so long.
        monkeypatch.setattr(stalls, "STALLED_AFTER_S", 4.0)
        session.commit()
        wait_until(entered.is_set, 60)
        wait_until(lambda: "stalled: the commit sequencer waits for the sink" in caplog.text, 30)
        told = account(pipeline)
        (stall,) = told["stalls"]
        assert (stall["part"], stall["waits_for"]) == ("commit sequencer", "sink")
        assert told["sink"]["in_hand"]["n_rows"] == 55_000 and told["open"] == []
        stalled = "ray_xidstream_stalled commit sequencer sink"
        wait_until(lambda: metrics(told).get(stalled) == 1, 40)
        scraped = metrics(told)
        assert scraped["ray_xidstream_sink_in_hand_rows"] == 55_000 and scraped["ray_xidstream_run_up"] == 1
        assert scraped["ray_xidstream_stalled slot reader server"] == 0
        assert (
            scraped["ray_xidstream_slot_wal_held_bytes"] > 0 and scraped["ray_xidstream_server_answers"] == 1
        )
        assert scraped["ray_xidstream_reader_received_bytes_total"] > 64_000 * 100
        may_return.set()
        wait_until(lambda: query.lastProgress["caughtUp"] and query.lastProgress["rows"] == 55_000, 60)
        wait_until(lambda: "no longer stalled" in caplog.text, 30)
    told = account(pipeline)
    assert told["stalls"] == [] and told["sink"]["in_hand"] is None
    assert told["sink"]["batches"][-1]["n_rows"] == 55_000 and told["sink"]["latency"]["p50_ms"] > 4_000
    query.stop()
    told = account(pipeline)
    assert told["run"] is None and told["slot"]["active_pid"] is None, (
        "nothing runs: the server says what it has"
    )
