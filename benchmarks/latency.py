"""Latency of single small transactions at a steady rate: from COMMIT's return to the batch in the handler.

The handler notes the time and the commit LSNs of its batch. A second slot tells afterwards which row was in which
commit, so that only the arrival is in the measured path.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg

from benchmarks import ours
from benchmarks.results import median, percentile
from benchmarks.source import Source, server
from xidstream.pipeline.spark.spark_batch import SparkBatch

_WARM_S = 3.0
_WRITERS = 4


def run(rates: tuple[int, ...], seconds: float) -> dict[str, Any]:
    measured: dict[str, Any] = {"seconds": seconds}
    with server() as publisher, ours.spark_session() as spark:
        for rate in rates:
            source = Source(publisher, f"rate{rate}")
            latencies_ms = _latencies(spark, source, rate, seconds)
            source.close()
            measured[str(rate)] = {
                "transactions": len(latencies_ms),
                "per_s": len(latencies_ms) / seconds,
                "p50_ms": median(latencies_ms),
                "p90_ms": percentile(latencies_ms, 90),
                "p99_ms": percentile(latencies_ms, 99),
                "max_ms": max(latencies_ms),
            }
    return measured


def _latencies(spark: Any, source: Source, rate: int, seconds: float) -> list[float]:
    measured_slot, told_slot = source.slots(2)
    committed: dict[int, float] = {}
    with ours.stream(spark, source, measured_slot) as running:
        ends_s = time.monotonic() + _WARM_S + seconds
        writers = [
            threading.Thread(target=_write, args=(source, number, rate / _WRITERS, ends_s, committed))
            for number in range(_WRITERS)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        running.wait(lambda: running.n_rows >= len(committed))
        arrivals = list(running.arrivals)
    commit_lsns = _commit_lsns(spark, source, told_slot, len(committed))
    begins_s = ends_s - seconds
    latencies_ms = []
    for row, committed_s in committed.items():
        if committed_s < begins_s:
            continue
        lsn = commit_lsns[row]
        at_s = next(a.at_s for a in arrivals if a.first_commit_lsn <= lsn <= a.last_commit_lsn)
        latencies_ms.append((at_s - committed_s) * 1000)
    return latencies_ms


def _write(source: Source, number: int, rate: float, ends_s: float, committed: dict[int, float]) -> None:
    """Write one-row transactions at a steady rate. A late one is not made up for, so that no burst hides a delay."""
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        row = number
        due_s = time.monotonic()
        while due_s < ends_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
            row += _WRITERS
            connection.execute("insert into t values (%s, 1, 'x', 1, now(), 0.5, true)", [row])
            committed[row] = time.monotonic()
            due_s = max(due_s + 1 / rate, time.monotonic() - 1 / rate)


def _commit_lsns(spark: Any, source: Source, slot: str, n_rows: int) -> dict[int, int]:
    found: dict[int, int] = {}

    def note(batch: SparkBatch) -> None:
        frame = batch.dataframe("public.t").select("id", "_commit_lsn")
        found.update({r["id"]: r["_commit_lsn"] for r in frame.collect()})

    with ours.stream(spark, source, slot, note) as running:
        running.wait(lambda: len(found) >= n_rows)
    return found
