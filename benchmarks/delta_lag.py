"""The lag from COMMIT to the Delta commit over the size of the transaction, plain and with rolled-back savepoints.

The clock is that of ``benchmarks.lag``: it starts when COMMIT returns to the writer, and stops when the sink has
committed ``_transactions``. The writer keeps to the walsender's pace. Beside each lag stand what the transaction took
in the storage, and what the stream took in Spark's processes above what they take when nothing comes.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from benchmarks import lag, ours
from benchmarks.processes import Watch
from benchmarks.results import median
from benchmarks.source import Source, server

SAVEPOINTS = 1_000
"""Rolled back in the transaction, each with one inside of it, which a tenth roll back by itself before."""
_ROLLED_BACK_ROWS = 20


def run(sizes: tuple[int, ...], repeats: int, *, once_from: int = 5_000_000) -> dict[str, Any]:
    measured: dict[str, Any] = {"plain": {}, "savepoints": {}}
    with server() as publisher, ours.spark_session() as spark:
        source = Source(publisher, "deltalag")
        measure(spark, source, 20_000, 0, "warm")
        for size in sizes:
            for variant, n_savepoints in (("plain", 0), ("savepoints", SAVEPOINTS)):
                n = 1 if size >= once_from else repeats
                runs = [measure(spark, source, size, n_savepoints, f"{variant}_{i}") for i in range(n)]
                measured[variant][str(size)] = {
                    name: {"median": median([r[name] for r in runs]), "all": [r[name] for r in runs]}
                    for name in runs[0]
                }
                print(size, variant, measured[variant][str(size)], flush=True)
        source.close()
    return measured


def measure(
    spark: Any, source: Source, size: int, n_savepoints: int, suffix: str, lake: str = "delta"
) -> dict[str, float]:
    """One transaction's lag, in a stream of its own."""
    (slot,) = source.slots(1, f"{size}_{suffix}")
    with ours.stream(spark, source, slot, lake=lake) as running:
        idle_s = _idle_cpu_s_per_s()
        watch, started_s = Watch(), time.monotonic()
        delta_s = _one(source, running, size, n_savepoints)
        spark_s = watch.end().cpu_s.get("spark", 0.0) - idle_s * (time.monotonic() - started_s)
        spilled = sum(a.spilled_bytes for a in running.arrivals)
    source.execute("select pg_drop_replication_slot(%s)", slot)
    source.execute("truncate t")
    source.execute("checkpoint")
    return {
        "lag_s": delta_s,
        "spark_cpu_s_per_million_rows": spark_s / size * 1e6,
        "stored_bytes_per_row": spilled / size,
    }


def _idle_cpu_s_per_s(seconds: float = 3.0) -> float:
    watch = Watch()
    time.sleep(seconds)
    return watch.end().cpu_s.get("spark", 0.0) / seconds


def _one(source: Source, running: ours.Stream, size: int, n_savepoints: int) -> float:
    """Seconds from COMMIT's return to the sink's."""
    pieces = max(1, min(size // 100, max(n_savepoints, size // lag.CHUNK_ROWS)))
    with psycopg.connect(source.dsn, autocommit=True) as writer:
        writer.execute(b"begin")
        written = rolled_back = 0
        for piece in range(pieces):
            due = size * (piece + 1) // pieces
            source.insert(due - written, writer)
            written = due
            while rolled_back < n_savepoints * (piece + 1) // pieces:
                _roll_back(source, writer, rolled_back)
                rolled_back += 1
            while running.received_rows < written - lag.AHEAD_ROWS:
                time.sleep(0.01)
        lag.settle(running)
        writer.execute(b"commit")
        committed_s = time.monotonic()
    running.wait(lambda: running.n_rows >= size)
    return running.arrivals[-1].done_s - committed_s


def _roll_back(source: Source, writer: psycopg.Connection[Any], number: int) -> None:
    """A savepoint in a savepoint: the outer one goes, each tenth time the inner one first."""
    writer.execute(b"savepoint outside")
    source.insert(_ROLLED_BACK_ROWS, writer)
    writer.execute(b"savepoint inside")
    source.insert(_ROLLED_BACK_ROWS, writer)
    if number % 10 == 0:
        writer.execute(b"rollback to savepoint inside")
        source.insert(_ROLLED_BACK_ROWS, writer)
    writer.execute(b"rollback to savepoint outside")
    writer.execute(b"release savepoint outside")
