"""``python -m benchmarks.journal``: the sink is away for minutes, the server's WAL does not wait, and then all arrives.

Real actors on a local Ray and an embedded server, without a JVM: this process takes the batches. For ``--minutes`` it
takes none, while ``pgbench`` commits ``--rate`` transactions a second, and one of ``--large`` rows commits among them.
Then it takes what comes, and the load goes on for a while. Sampled twice a second: how far the slot's confirmed
position is behind the end of the WAL, and each process's private memory. At the end all transactions are there, once,
in the order of their commits.

Catching up is told against the live rate: the transactions that were taken in a second while the sink caught up,
beside ``--rate``. What a journal costs while the sink keeps up: ``benchmarks.kept_up``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import ray

from benchmarks.load import FILL, MIB, SETTINGS, Run
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.runtime.ray_cluster import connect_ray

_AFTERWARDS_S = 20.0
TINY = "insert into tiny (at) values (clock_timestamp());\n"
_POSITIONS = """
select pg_current_wal_flush_lsn() - '0/0', coalesce(sent_lsn, confirmed_flush_lsn) - '0/0', confirmed_flush_lsn - '0/0'
from pg_replication_slots left join pg_stat_replication on pid = active_pid where slot_name = %s"""


class Position:
    """How far the slot's confirmed position is behind, in bytes of WAL.

    ``behind_bytes``: after the end of the WAL; ``behind_sent_bytes``: after what the server has decoded and sent.
    """

    def __init__(self, run: Run) -> None:
        self._connection = psycopg.connect(run.database.dsn(), autocommit=True)
        self._slot = run.pipeline.slot
        self.behind_bytes: list[int] = []
        self.behind_sent_bytes: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.first_wal = self.last_wal = 0
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._connection.close()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            row = self._connection.execute(_POSITIONS, (self._slot,)).fetchone()
            assert row is not None
            flushed, sent, confirmed = (int(value) for value in row)
            self.behind_bytes.append(flushed - confirmed)
            self.behind_sent_bytes.append(max(0, sent - confirmed))
            self.first_wal = self.first_wal or flushed
            self.last_wal = flushed


def away(run: Run, folder: Path, seconds: float, rate: int, large: int) -> dict[str, Any]:
    driver = run.pipeline.driver
    driver.hold.set()
    position = Position(run)
    total_s = seconds + _AFTERWARDS_S
    load = subprocess.Popen(
        pgbench(run, folder, TINY, *at_a_rate(total_s, rate)), stdout=subprocess.PIPE, text=True
    )
    started = time.monotonic()
    time.sleep(seconds / 3)
    with run.database.connect() as session:
        session.execute(FILL.format(1, large).encode())
    large_s = time.monotonic() - started
    time.sleep(max(0.0, seconds * 2 / 3 - (time.monotonic() - started)))
    at_two_thirds = dict(run.peaks.growth)
    time.sleep(max(0.0, seconds - (time.monotonic() - started)))
    at_end = dict(run.peaks.growth)
    position.end()
    held = run.pipeline.supervisor
    assert held is not None
    journal = held.status().account.journal
    n_before = len(driver.transactions)
    driver.hold.clear()
    released = time.monotonic()
    output, _ = load.communicate()
    n_tiny = int(
        next(line for line in output.splitlines() if "actually processed" in line).split(":")[1].split("/")[0]
    )
    n_away = 0
    while len(driver.transactions) < n_tiny + 1:
        account = held.status().account
        n_files = 0 if account.journal is None else account.journal.n_files
        sequencer = account.sequencer
        if not n_away and sequencer is not None and not n_files and sequencer.n_waiting < 50:
            n_away, caught_up_s = len(driver.transactions) - n_before, time.monotonic() - released
        run.wait(lambda: True)
        time.sleep(0.05)
    if not n_away:
        n_away, caught_up_s = len(driver.transactions) - n_before, time.monotonic() - released
    commits = [row["commit_lsn"] for row in driver.transactions]
    behind = sorted(position.behind_bytes)
    wal_bytes = position.last_wal - position.first_wal
    ok = run.end("sink away", n_tiny + large, n_tiny + 1)
    return {
        "seconds_away": seconds,
        "transactions": n_tiny + 1,
        "large_committed_after_s": round(large_s, 1),
        "wal_mb_per_s": round(wal_bytes / seconds / 1e6, 2),
        "wal_mb": round(wal_bytes / 1e6),
        "behind_mb_median": round(statistics.median(behind) / 1e6, 2),
        "behind_mb_p99": round(behind[int(len(behind) * 0.99)] / 1e6, 2),
        "behind_mb_max": round(behind[-1] / 1e6, 2),
        "behind_sent_mb_max": round(max(position.behind_sent_bytes) / 1e6, 2),
        "seconds_over_64_mb": sum(n > 64e6 for n in behind) / 2,
        "journal_mb": None if journal is None else round(journal.n_bytes / 1e6, 1),
        "journal_files": None if journal is None else journal.n_files,
        "caught_up_s": round(caught_up_s, 1),
        "catch_up_per_live": round(n_away / caught_up_s / rate, 2),
        "in_order": all(a < b for a, b in itertools.pairwise(commits)),
        "complete_within_memory_settings": ok,
        "grew_mib": {
            "two thirds of the time away": _mib(at_two_thirds),
            "away": _mib(at_end),
            "with catching up": _mib(run.peaks.growth),
        },
    }


def _mib(growth: dict[str, int]) -> dict[str, int]:
    return {kind: round(n / MIB) for kind, n in growth.items()}


def pgbench(run: Run, folder: Path, statement: str, *options: str) -> list[str]:
    script = folder / "pgbench.sql"
    script.write_text(statement)
    server = run.database.server
    where = ["-h", str(server.socket_dir), "-p", str(server.port), "-U", "postgres", run.database.name]
    return [str(server.bin("pgbench")), "-n", "-f", str(script), *options, *where]


def at_a_rate(seconds: float, rate: int) -> tuple[str, ...]:
    return "-c", "8", "-T", str(int(seconds)), "-R", str(rate)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--large", type=int, default=1_000_000)
    arguments = parser.parse_args()
    # As a server has it, not as little as that case needs which makes every transaction a streamed one.
    del SETTINGS["logical_decoding_work_mem"]
    connect_ray()
    with tempfile.TemporaryDirectory(prefix="xs-journal-") as name:
        folder = Path(name)
        settings = {"max_connections": "50", "max_wal_size": "8GB"}
        with EmbeddedPostgres(folder / "data", settings=settings) as server:
            run = Run(server, "away", folder)
            found = away(run, folder, arguments.minutes * 60, arguments.rate, arguments.large)
            print(json.dumps(found, indent=1))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
