"""The lag of other tables while a table is added to the publication and its snapshot is taken.

A writer commits a few rows at a steady rate into one table. The lag of a commit runs from COMMIT's return to the end of
the Delta commit that has it. Three stretches are told apart: before, while the other table is taken (from ALTER
PUBLICATION to the end of its snapshot), and after.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
from deltalake import DeltaTable

from benchmarks import ours
from benchmarks.results import median, percentile
from benchmarks.source import PUBLICATION, Source, server

_RATE_PER_S = 10.0
_TIMEOUT_S = 900.0
_ADDED = "id bigint primary key, k int, note text, filler char(84)"
_ADDED_ROWS = "select i, i % 1000, 'note number ' || i, '' from generate_series(1, {}) i"


def run(rows: int, seconds: float) -> dict[str, Any]:
    with server() as publisher, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)
        source = Source(publisher, "snaplag")
        source.execute(f"create table added ({_ADDED})")
        source.execute(f"insert into added {_ADDED_ROWS.format(rows)}")
        source.execute("vacuum analyze added")
        measured = _measure(spark, source, rows, seconds)
        source.close()
    return measured


def _measure(spark: Any, source: Source, rows: int, seconds: float) -> dict[str, Any]:
    (slot,) = source.slots(1)
    committed: list[tuple[int, float]] = []
    stop = threading.Event()
    with ours.stream(spark, source, slot, lake="delta", snapshot="initial") as running:
        writer = threading.Thread(target=_write, args=(source, committed, stop), daemon=True)
        writer.start()
        _wait(running, 1)
        time.sleep(5)  # the first batches load what is loaded once
        marks_s = [time.monotonic()]
        time.sleep(seconds)
        marks_s.append(time.monotonic())
        source.execute(f"alter publication {PUBLICATION} add table added")
        _wait(running, 2)
        marks_s.append(time.monotonic())
        time.sleep(seconds)
        marks_s.append(time.monotonic())
        stop.set()
        writer.join()
        n_rows = len(committed)
        running.wait(lambda: running.n_rows >= n_rows)
        arrivals = list(running.arrivals)
        table = DeltaTable(str(running.delta / "public.t")).to_pyarrow_table(columns=["id", "_commit_lsn"])
        n_added = DeltaTable(str(running.delta / "public.added")).to_pyarrow_dataset().count_rows()
    if n_added != rows:
        raise RuntimeError(f"{n_added} rows of the added table arrived, {rows} were there")
    lsns = dict(zip(table["id"].to_pylist(), table["_commit_lsn"].to_pylist(), strict=True))
    lags: dict[str, list[float]] = {"before": [], "meanwhile": [], "after": []}
    for row, at_s in committed:
        done_s = next(a.done_s for a in arrivals if a.first_commit_lsn <= lsns[row] <= a.last_commit_lsn)
        for name, begins_s, ends_s in zip(lags, marks_s[:-1], marks_s[1:], strict=True):
            if begins_s <= at_s < ends_s:
                lags[name].append((done_s - at_s) * 1000)
    return {
        "rows": rows,
        "snapshot_s": marks_s[2] - marks_s[1],
        **{
            name: {
                "transactions": len(each),
                "p50_ms": median(each),
                "p99_ms": percentile(each, 99),
                "max_ms": max(each),
            }
            for name, each in lags.items()
        },
    }


def _wait(running: ours.Stream, n_finished: int) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (running.query.lastProgress["snapshots"] or {"finished": 0})["finished"] < n_finished:
        if not running.query.isActive or time.monotonic() > deadline_s:
            raise RuntimeError(f"no snapshot: {running.query.exception()}")
        time.sleep(0.05)


def _write(source: Source, committed: list[tuple[int, float]], stop: threading.Event) -> None:
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        due_s = time.monotonic()
        while not stop.wait(max(0.0, due_s - time.monotonic())):
            row = len(committed) + 1
            connection.execute("insert into t values (%s, 1, 'x', 1, now(), 0.5, true)", [row])
            committed.append((row, time.monotonic()))
            due_s = max(due_s + 1 / _RATE_PER_S, time.monotonic() - 1 / _RATE_PER_S)
