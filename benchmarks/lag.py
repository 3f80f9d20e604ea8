"""Lag after COMMIT, over the size of the transaction. It is the reason for streaming.

The transaction is written at a pace that the walsender can follow: in chunks, and each chunk waits until the buffers
have decoded all but the last ones. The clock starts when COMMIT returns to the writer. It stops when the batch is in
the handler, when a Spark count over it is done, and, in other runs, when the Delta tables are committed.
``streaming=off`` shows the lag of every tool that waits for COMMIT.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from benchmarks import ours
from benchmarks.results import median
from benchmarks.source import Source, server

CHUNK_ROWS = 50_000
AHEAD_ROWS = 200_000
"""How many rows the writer may be ahead of the decoded ones."""


def run(
    sizes: tuple[int, ...], repeats: int, *, off_up_to: int, once_from: int = 5_000_000
) -> dict[str, Any]:
    measured: dict[str, Any] = {"on": {}, "off": {}}
    with server() as publisher, ours.spark_session() as spark:
        source = Source(publisher, "lag")
        (slot,) = source.slots(1)
        with ours.stream(spark, source, slot, ours.count) as running:
            _one(source, running, 20_000, streamed=True)
        source.execute("select pg_drop_replication_slot(%s)", slot)
        for size in sizes:
            for streaming in ("on", "off"):
                if streaming == "off" and size > off_up_to:
                    continue
                n = 1 if size >= once_from else repeats
                lags = [_lag(spark, source, size, streaming, str(i)) for i in range(n)]
                measured[streaming][str(size)] = {
                    name: {
                        "median_s": median([lag[name] for lag in lags]),
                        "all_s": [lag[name] for lag in lags],
                    }
                    for name in lags[0]
                }
        source.close()
    return measured


def _lag(spark: Any, source: Source, size: int, streaming: str, suffix: str) -> dict[str, float]:
    first, second = source.slots(2, f"{streaming}_{size}_{suffix}")
    streamed = streaming == "on"
    with ours.stream(spark, source, first, ours.count, streaming=streaming) as running:
        handler_s, count_s = _one(source, running, size, streamed=streamed)
    source.execute("select pg_drop_replication_slot(%s)", first)
    source.execute("select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", second)
    with ours.stream(spark, source, second, lake="delta", streaming=streaming) as running:
        _, delta_s = _one(source, running, size, streamed=streamed)
    source.execute("select pg_drop_replication_slot(%s)", second)
    source.execute("truncate t")
    source.execute("checkpoint")
    return {"handler": handler_s, "count": count_s, "delta": delta_s}


def _one(source: Source, running: ours.Stream, size: int, *, streamed: bool) -> tuple[float, float]:
    """The seconds from COMMIT's return to the batch in the handler, and to the end of the handler."""
    before = running.n_rows
    with psycopg.connect(source.dsn, autocommit=True) as writer:
        writer.execute(b"begin")
        written = 0
        while written < size:
            chunk = min(CHUNK_ROWS, size - written)
            source.insert(chunk, writer)
            written += chunk
            while streamed and running.received_rows < written - AHEAD_ROWS:
                time.sleep(0.01)
        if streamed and size >= CHUNK_ROWS:
            settle(running)
        writer.execute(b"commit")
        committed_s = time.monotonic()
    running.wait(lambda: running.n_rows - before >= size)
    last = running.arrivals[-1]
    return last.at_s - committed_s, last.done_s - committed_s


def settle(running: ours.Stream) -> None:
    """Wait until no more rows arrive: a writer at the walsender's pace leaves no rows to decode before COMMIT."""
    seen, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 0.5:
        if running.received_rows != seen:
            seen, since_s = running.received_rows, time.monotonic()
        time.sleep(0.05)
