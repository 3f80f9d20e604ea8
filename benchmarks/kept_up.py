"""``python -m benchmarks.kept_up journal|watch``: what a part costs in a run whose sink keeps up.

Runs with the part and without it, in turn, of real actors on a local Ray and an embedded server, without a JVM: this
process takes the batches. In each, ``pgbench`` first commits ``--rate`` small transactions a second for ``--seconds``,
of which latencies are taken. Then transactions of 1,000 rows come as fast as they can. The CPU seconds are those of
all our processes, Ray's among them, and the server's apart.

``journal``: with ``journal_max_bytes`` as it is, or 0. ``watch``: with the thread that looks for stalls and sets the
metrics, and the socket that answers ``status``, or without both. Nobody asks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray

from benchmarks.journal import TINY, at_a_rate, pgbench
from benchmarks.load import SETTINGS, Run
from benchmarks.processes import Watch, server_cpu_s
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.supervision.run_accounts import RunAccounts
from xidstream.actors.supervision.run_watch import RunWatch

_THOUSAND = "insert into tiny (at) select clock_timestamp() from generate_series(1, 1000);\n"
_CLIENTS, _N_EACH = 4, 250


def kept_up(run: Run, folder: Path, seconds: float, rate: int) -> dict[str, Any]:
    """Latencies at ``rate``, and then the rows a second of transactions that come as fast as they can."""
    driver, server = run.pipeline.driver, run.database.server
    usage, server_before_s = Watch(), server_cpu_s(server.pid)
    subprocess.run(pgbench(run, folder, TINY, *at_a_rate(seconds, rate)), check=True, capture_output=True)
    n = run.database.execute("select count(*) from tiny")[0][0]
    run.wait(lambda: len(driver.transactions) == n)
    latencies = sorted(run.latencies_ms)
    n_fast = _CLIENTS * _N_EACH
    started = time.monotonic()
    options = ("-c", str(_CLIENTS), "-t", str(_N_EACH))
    subprocess.run(pgbench(run, folder, _THOUSAND, *options), check=True, capture_output=True)
    while len(driver.transactions) < n + n_fast:
        run.wait(lambda: True)
        time.sleep(0.01)
    drained_s = time.monotonic() - started
    cpu_s, server_s = usage.end().cpu_s, server_cpu_s(server.pid) - server_before_s
    run.end("kept up", n + n_fast * 1000, n + n_fast)
    return {
        "transactions": n,
        "median_ms": round(statistics.median(latencies), 1),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)], 1),
        "drained_rows_per_s": round(n_fast * 1000 / drained_s),
        "cpu_s": round(sum(cpu_s.values()), 1),
        "server_cpu_s": round(server_s, 1),
    }


def without(part: str, stack: ExitStack) -> None:
    """Leave the part out of the runs that begin while ``stack`` is open."""
    if part == "journal":
        stack.enter_context(patch.dict(SETTINGS, journal_max_bytes=0))
    else:
        stack.enter_context(patch.object(RunWatch, "start", lambda self: None))
        stack.enter_context(patch.object(RunAccounts, "serve", lambda self: None))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_up", description=__doc__)
    parser.add_argument("part", choices=["journal", "watch"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    # As a server has it, not as little as the cases need which make every transaction a streamed one.
    del SETTINGS["logical_decoding_work_mem"]
    connect_ray()
    with tempfile.TemporaryDirectory(prefix="xs-kept-up-") as name:
        folder = Path(name)
        settings = {"max_connections": "50", "max_wal_size": "8GB"}
        with EmbeddedPostgres(folder / "data", settings=settings) as server:
            for i in range(2 * arguments.turns):
                with ExitStack() as stack:
                    if i % 2 == 0:
                        without(arguments.part, stack)
                    run = Run(server, f"kept_{i}", folder)
                    found = kept_up(run, folder, arguments.seconds, arguments.rate)
                print(json.dumps({arguments.part: bool(i % 2), **found}), flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
