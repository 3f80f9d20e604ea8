"""``python -m benchmarks.load``: the memory of reader, buffers and sequencer under three loads, and their settings.

It uses the real actors on a local Ray and an embedded server, and no JVM. This process takes the batches and drops the
rows, so that only the pipeline's own memory is measured. Figures are peaks, sampled every 50 ms, of each process's
private memory (without the object store and the files that it shares with others), above its memory when the run was
ready. ``settings`` shows what the memory settings allow. The exit status is 1 if rows are missing or a process grew
beyond twice its setting.

- ``open``: 100 streamed transactions open at once, committed in another order than they began;
- ``giant``: one transaction of more than ten times a buffer's memory;
- ``tiny``: 100,000 transactions of one row, 2,000 a second, while a giant is written and stays open; their time from
  COMMIT to the sink.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import psycopg
import ray

from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.runtime.ray_cluster import connect_ray

MIB = 1 << 20
SETTINGS = {
    "reader_memory_bytes": 16 * MIB,
    "buffer_memory_bytes": 16 * MIB,
    "backlog_bytes": 32 * MIB,
    "block_bytes": MIB,
    "buffers_max": 4,
    "logical_decoding_work_mem": "64kB",
}
TABLE = """create table big (
  id bigint primary key, customer int, note text, amount numeric(12,2), placed timestamptz, paid bool, weight float8)"""
FILL = """insert into big select i, mod(i, 1000), 'order number ' || i, mod(i, 100000) / 100.0, now(),
  mod(i, 2) = 0, i / 7.0
from generate_series({}::bigint, {}::bigint) i"""


class Peaks:
    """The peak of the private memory of processes that come and go, above a base for each kind of process."""

    def __init__(self, pipeline: RayPipeline) -> None:
        self._pipeline = pipeline
        self.growth: dict[str, int] = {}
        self._base: dict[str, int] = {}
        self._stop = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.growth

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._look()

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                # Ray writes what a worker does into its title: ``ray::XidBuffer.add_blocks``.
                title = (process.cmdline() or [""])[0].partition(".")[0]
                if title not in ("ray::SlotReader", "ray::XidBuffer", "ray::CommitSequencer"):
                    continue
                info = process.memory_info()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # it ended while we looked
            private = info.rss - info.shared
            kind = title.removeprefix("ray::")
            # The base is that of a process that was ready. A buffer that starts later has this title before it has
            # loaded its libraries.
            base = self._base.setdefault(kind, private)
            self.growth[kind] = max(self.growth.get(kind, 0), private - base)


class Run:
    def __init__(self, server: EmbeddedPostgres, name: str, folder: Path) -> None:
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {name}".encode())
        self.connection = psycopg.connect(server.conninfo(name), autocommit=True)
        self.database = Database(server, name, self.connection)
        self.database.execute(TABLE)
        self.database.execute(
            "create table tiny (id bigint generated always as identity primary key, at timestamptz)"
        )
        self.database.execute("create publication p for table big, tiny")
        self.pipeline = RayPipeline(self.database, folder / name)
        self.pipeline.driver.keep_rows = False
        self.latencies_ms: list[float] = []
        take = self.pipeline.driver._take

        def timed(batch: Any) -> None:
            take(batch)
            now_s = time.time()
            for unit in batch.units:
                stamps = unit.transactions.column("commit_timestamp").cast("int64").to_pylist()
                self.latencies_ms += [(now_s - us / 1e6) * 1000 for us in stamps]

        self.pipeline.driver._take = timed  # type: ignore[method-assign]
        self.pipeline.start(**SETTINGS)
        self.peaks = Peaks(self.pipeline)
        self.started = time.monotonic()

    def wait(self, condition: Callable[[], Any], timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.pipeline.error is not None:
                raise self.pipeline.error
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.1)

    def end(self, what: str, n_rows: int, n_transactions: int) -> bool:
        seconds = time.monotonic() - self.started
        driver = self.pipeline.driver
        complete = driver.n_rows == n_rows and len(driver.transactions) == n_transactions
        growth = self.peaks.end()
        self.pipeline.stop()
        self.connection.close()
        within = (
            growth.get("SlotReader", 0) <= 2 * SETTINGS["reader_memory_bytes"]  # type: ignore[operator]
            and growth.get("XidBuffer", 0) <= 2 * SETTINGS["buffer_memory_bytes"]  # type: ignore[operator]
        )
        print(
            f"{what}: {driver.n_rows:,} rows, {len(driver.transactions):,} transactions in {seconds:.1f} s; "
            f"{'complete' if complete else f'NOT COMPLETE, of {n_rows:,}'}; grew at most: "
            + ", ".join(f"{kind} {n / MIB:.0f} MiB" for kind, n in sorted(growth.items()))
            + ("" if within else " NOT WITHIN TWICE THE SETTINGS")
            + "".join(f"; notice: {notice}" for notice in self.pipeline.notices),
            flush=True,
        )
        return complete and within


def many_open(run: Run, n: int, rows_each: int) -> bool:
    sessions = [run.database.connect() for _ in range(n)]
    for session in sessions:
        session.execute(b"begin")
    for part in range(4):
        for number, session in enumerate(sessions):
            first = number * 1_000_000 + part * rows_each // 4
            session.execute(FILL.format(first + 1, first + rows_each // 4).encode())
    run.wait(lambda: run.pipeline.open_rows() > n * rows_each * 0.9)
    account = run.pipeline.supervisor.account() if run.pipeline.supervisor else None
    assert account is not None and account.reader is not None
    held = sum(each.n_bytes_in_memory for each in account.open)
    print(
        f"  {account.reader.n_open} open, {run.pipeline.open_rows():,} rows decoded, {held / MIB:.0f} MiB of them in "
        f"memory of {account.reader.n_buffers} buffers, {len(run.pipeline.segments())} segments"
    )
    random.Random(1).shuffle(sessions)
    for session in sessions:
        session.execute(b"commit")
        session.close()
    run.wait(lambda: len(run.pipeline.driver.transactions) == n)
    return run.end(f"{n} open transactions of {rows_each:,} rows", n * rows_each, n)


def one_giant(run: Run, n_rows: int) -> bool:
    with run.database.connect() as session:
        session.execute(b"begin")
        for first in range(1, n_rows, 250_000):
            session.execute(FILL.format(first, first + 249_999).encode())
        run.wait(lambda: run.pipeline.open_rows() > n_rows * 0.98)
        spilled = sum(p.stat().st_size for p in run.pipeline.segments())
        session.execute(b"commit")
    run.wait(lambda: run.pipeline.driver.transactions)
    limit = int(str(SETTINGS["buffer_memory_bytes"]))
    print(
        f"  {spilled / MIB:.0f} MiB in segments before COMMIT, {spilled / limit:.1f} times a buffer's memory"
    )
    return run.end(f"one transaction of {n_rows:,} rows", n_rows, 1) and spilled > 10 * limit


def tiny_beside_giant(run: Run, n_tiny: int, n_rows: int, rate: int, folder: Path) -> bool:
    script = folder / "tiny.sql"
    script.write_text("insert into tiny (at) values (clock_timestamp());\n")
    server = run.database.server
    with run.database.connect() as giant:
        giant.execute(b"begin")
        done = threading.Event()

        def fill() -> None:
            for first in range(1, n_rows, 20_000):
                giant.execute(FILL.format(first, first + 19_999).encode())
            done.set()

        threading.Thread(target=fill, daemon=True).start()
        where = ["-h", str(server.socket_dir), "-p", str(server.port), "-U", "postgres", run.database.name]
        load = ["-n", "-f", str(script), "-c", "4", "-t", str(n_tiny // 4), "-R", str(rate)]
        command = [str(server.bin("pgbench")), *load, *where]
        started = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        wrote_s = time.monotonic() - started
        run.wait(lambda: len(run.pipeline.driver.transactions) == n_tiny)
        caught_up_s = time.monotonic() - started
        assert done.wait(600)
        run.wait(lambda: run.pipeline.open_rows() > n_rows * 0.95)
        latencies = sorted(run.latencies_ms)
        print(
            f"  {n_tiny:,} tiny ones written in {wrote_s:.1f} s, all in the sink after {caught_up_s:.1f} s, beside an "
            f"open one of {n_rows:,} rows; COMMIT to sink: median {statistics.median(latencies):.0f} ms, 99 % "
            f"{latencies[int(len(latencies) * 0.99)]:.0f} ms, max {latencies[-1]:.0f} ms"
        )
        giant.execute(b"commit")
    run.wait(lambda: len(run.pipeline.driver.transactions) == n_tiny + 1)
    return run.end("tiny beside a giant", n_tiny + n_rows, n_tiny + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--cases", default="open,giant,tiny")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scales the numbers of rows and transactions"
    )
    parser.add_argument("--rate", type=int, default=2000, help="tiny transactions a second")
    arguments = parser.parse_args()
    connect_ray()
    ok = True
    with tempfile.TemporaryDirectory(prefix="xs-load-") as name:
        folder = Path(name)
        settings = {
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "150",
            "max_wal_size": "4GB",
        }
        with EmbeddedPostgres(folder / "data", settings=settings) as server:
            print(f"settings: {SETTINGS}", flush=True)
            for case in arguments.cases.split(","):
                run = Run(server, f"load_{case}", folder)
                if case == "open":
                    ok &= many_open(run, 100, int(20_000 * arguments.scale))
                elif case == "giant":
                    ok &= one_giant(run, int(3_500_000 * arguments.scale))
                else:
                    ok &= tiny_beside_giant(
                        run,
                        int(100_000 * arguments.scale),
                        int(1_000_000 * arguments.scale),
                        arguments.rate,
                        folder,
                    )
    ray.shutdown()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
