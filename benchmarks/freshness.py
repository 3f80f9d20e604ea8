"""How far behind a COMMIT the default read is: ``python -m benchmarks.freshness``, with and without the event triggers.

A server, ``xidstream run`` with a snapshot of the table, and a client that commits one row now and then. After each
COMMIT the log is asked until it has the transaction (``in_log``), and until ``as_of`` without an LSN would have it, too
(``readable``): that waits for a look at the catalog, which proves that nobody has changed the table meanwhile. Two
databases take turns, one of them with ``xidstream source prepare``. Seconds from the client's COMMIT.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.results import percentile
from benchmarks.source import PUBLICATION, Source, server
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.ddl_trigger import prepare

_ANSWER_S = 120.0
_POLL_S = 0.02


def measure(source: Source, root: Path, commits: int, dice: random.Random) -> dict[str, list[float]]:
    options = ["--dsn", source.dsn, "--slot", source.name, "--publication", PUBLICATION, "--create-slot"]
    options += ["--storage", f"{root}-storage", "--sink", f"delta:{root}"]
    with open(f"{root}.log", "wb") as output:
        pipeline = subprocess.Popen(
            [sys.executable, "-m", "actors", "run", *options], stdout=output, stderr=output
        )
    found: dict[str, list[float]] = {"in_log": [], "readable": []}
    try:
        _commit(source)
        _await(lambda: (root / "_snapshots").exists() and (root / "_transactions").exists())
        log = LogFrames(str(root))
        _await(lambda: _reached(log, _commit(source)))
        for _ in range(commits):
            time.sleep(dice.uniform(0.2, 3.0))
            lsn = _commit(source)
            began_s = time.monotonic()
            _await(lambda lsn=lsn: log.last_commit_lsn >= lsn)  # type: ignore[misc]
            found["in_log"].append(time.monotonic() - began_s)
            _await(lambda lsn=lsn: log.readable_lsn >= lsn)  # type: ignore[misc]
            found["readable"].append(time.monotonic() - began_s)
    finally:
        pipeline.terminate()
        pipeline.wait()
    return found


def _reached(log: LogFrames, lsn: Lsn) -> bool:
    time.sleep(3.0)
    return log.readable_lsn >= lsn


def _commit(source: Source) -> Lsn:
    """One row. Returns where its commit record begins: nothing else is written meanwhile."""
    with psycopg.connect(source.socket_dsn) as session:
        session.execute("update t set k = k + 1 where id = 1")
        (text,) = session.execute("select pg_current_wal_insert_lsn()::text").fetchone() or ("",)
        session.commit()
    return Lsn.parse(text)


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _ANSWER_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError("the log did not come on")
        time.sleep(_POLL_S)


def run(commits: int, rounds: int, folder: Path) -> dict[str, Any]:
    dice = random.Random(1)
    found: dict[str, dict[str, list[float]]] = {}
    with server() as running:
        for i in range(2 * rounds):
            is_prepared = bool(i % 2)
            source = Source(running, f"freshness_{i}")
            source.insert(1_000)
            if is_prepared:
                prepare(source.connection)
            measured = measure(source, folder / f"log_{i}", commits, dice)
            kept = found.setdefault("prepared" if is_prepared else "plain", {})
            for name, times in measured.items():
                kept.setdefault(name, []).extend(times)
            source.close()
    return {way: {name: _summary(times) for name, times in kept.items()} for way, kept in found.items()}


def _summary(times: list[float]) -> dict[str, float]:
    return {
        "median_s": round(statistics.median(times), 2),
        "p90_s": round(percentile(times, 90), 2),
        "max_s": round(max(times), 2),
        "commits": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=40, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-freshness-") as folder:
        print(json.dumps(run(options.commits, options.rounds, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
