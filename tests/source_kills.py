"""A stream of ``format("xidstream")`` over a log that a run writes, killed again and again:
``python -m tests.source_kills --kills 20``.

The source's transactions are those of ``tests.transfers``: the sum over two tables never changes. Others are large
enough to be streamed while they are open. An ``xidstream run`` writes them to Delta. ``examples/copy_two_tables.py``
copies both tables from there by Structured Streaming, in a process that is killed (SIGKILL, with its JVM) while it has
a batch in hand, and started again from its checkpoint.

After each kill the state of the last batch that Spark had committed is made of what was copied: with the source's sum,
or a transaction was torn between the tables. At the end the source's rows are what the copy makes, and each change was
copied once. It needs Spark 4 (``make test-spark4`` makes ``.venv-spark4``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable

from tests.postgres_fixtures import Database
from tests.transfers import SCHEMA, TOTAL, Clients
from tests.waiting import meanwhile, wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.pg import Lsn

REPOSITORY = Path(__file__).parents[1]
TABLES = ("public.a", "public.b")
_LARGE = b"insert into a select i, 0, repeat('l', 200) from generate_series(1000000, 1001000) i on conflict do nothing"
_LARGE_AWAY = b"delete from a where id >= 1000000"
_ANSWER_S = 240.0


def set_up(database: Database) -> None:
    """What ``kill_it`` needs: the tables, a publication, a slot, and then all rows in one commit."""
    statements = [each.strip() for each in SCHEMA.split(";") if each.strip()]
    inserts = [each for each in statements if each.startswith("insert")]
    for statement in statements:
        if statement not in inserts:
            database.execute(statement)
    database.execute("select pg_create_logical_replication_slot('copied', 'pgoutput')")
    database.execute("; ".join(inserts))  # one implicit transaction


class Copying:
    """The example, as a process group."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.target, self.checkpoint = folder / "target", folder / "checkpoint"
        example = REPOSITORY / "examples" / "copy_two_tables.py"
        self._command = [sys.executable, str(example), str(root), ",".join(TABLES)]
        self._command += [str(self.target), str(self.checkpoint)]

    def start(self) -> subprocess.Popen[str]:
        short = "--conf spark.ui.enabled=false --driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell"
        return subprocess.Popen(
            self._command,
            env={
                **os.environ,
                "PYSPARK_SUBMIT_ARGS": short,
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": str(REPOSITORY),  # Spark's Python finds the source in no editable install
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run_to_end(self) -> None:
        child = self.start()
        said, _ = child.communicate(timeout=_ANSWER_S)
        assert child.returncode == 0, said

    def kill_in_a_batch(self, dice: random.Random) -> bool:
        """Start it, and kill it a moment after one of its first batches has begun. Whether it was in a batch then."""
        wanted = self._last("commits") + dice.randint(1, 3)
        child = self.start()
        try:
            wait_until(lambda: self._last("offsets") >= wanted or child.poll() is not None, _ANSWER_S)
            time.sleep(dice.uniform(0.0, 0.6))
            begun = self._last("offsets")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
        assert child.returncode in (0, -signal.SIGKILL), said
        return begun > self._last("commits")

    def _last(self, log: str) -> int:
        """The number of the last batch that began (``offsets``), or was done (``commits``)."""
        numbers = [int(each.name) for each in (self.checkpoint / log).glob("[0-9]*")]
        return max(numbers, default=-1)

    def committed_lsn(self) -> int:
        """Up to which the last batch went that Spark has committed; 0 for none."""
        last = self._last("commits")
        if last < 0:
            return 0
        *_, offset = (self.checkpoint / "offsets" / str(last)).read_text("utf-8").splitlines()
        return int(json.loads(offset)["lsn"])

    def changes(self, table: str) -> list[dict[str, Any]]:
        """In order, as copied."""
        uri = str(self.target / table)
        if not DeltaTable.is_deltatable(uri):
            return []
        columns = ["id", "balance", "_change_type", "_commit_lsn", "_seq"]
        rows = DeltaTable(uri).to_pyarrow_table(columns=columns).to_pylist()
        return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"]))

    def state(self, table: str, lsn: int | None = None) -> dict[int, int]:
        """Account → balance, after the changes up to ``lsn``."""
        found: dict[int, int] = {}
        for row in self.changes(table):
            if lsn is not None and row["_commit_lsn"] > lsn:
                break
            if row["_change_type"] == "delete":
                del found[row["id"]]
            elif row["_change_type"] != "update_preimage":
                found[row["id"]] = row["balance"]
        return found


def kill_it(database: Database, folder: Path, n_kills: int, seed: int) -> str:
    """In a database that ``set_up`` has prepared. Returns what happened, in words. Raises AssertionError."""
    root = folder / "delta"
    copying = Copying(root, folder)
    with _running(database, root), _written(database, seed):
        wait_until(lambda: (root / "public.b").exists(), _ANSWER_S)
        n_states = _kill(copying, n_kills, random.Random(seed))
    with _running(database, root):
        last = database.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint")[0][0]
        database.execute("insert into a values (2000000, 0, 'last')")
        wait_until(lambda: LogFrames(str(root)).last_commit_lsn >= last, _ANSWER_S)
    copying.run_to_end()
    n_changes = 0
    for table in TABLES:
        copied = [(row["_commit_lsn"], row["_seq"]) for row in copying.changes(table)]
        log = DeltaTable(str(root / table)).to_pyarrow_table(columns=["_commit_lsn", "_seq"]).to_pylist()
        assert copied == sorted((row["_commit_lsn"], row["_seq"]) for row in log), f"{table}, seed {seed}"
        assert len(set(copied)) == len(copied), f"{table}: copied twice, seed {seed}"
        rows = dict(database.execute(f"select id, balance from {table}"))
        assert copying.state(table) == rows, f"{table}, seed {seed}"
        n_changes += len(copied)
    return f"{n_kills} kills within a batch, {n_states} states behind them, {n_changes} changes, each once"


def _kill(copying: Copying, n_kills: int, dice: random.Random) -> int:
    """Until so many kills have come within a batch. Returns how many states were looked at."""
    n_within = n_states = 0
    for _ in range(3 * n_kills):
        n_within += copying.kill_in_a_batch(dice)
        if lsn := copying.committed_lsn():
            total = sum(sum(copying.state(table, lsn).values()) for table in TABLES)
            assert total == TOTAL, f"a transaction is torn at {Lsn(lsn)}: the sum is {total}"
            n_states += 1
        if n_within == n_kills:
            return n_states
    raise AssertionError(f"only {n_within} of {3 * n_kills} kills came within a batch")


@contextmanager
def _running(database: Database, root: Path) -> Iterator[None]:
    """With a run that writes the log."""
    command = [sys.executable, "-m", "actors", "run", "--dsn", database.dsn(), "--slot", "copied"]
    command += ["--publication", "p", "--storage", f"{root}-segments", "--sink", f"delta:{root}"]
    command += ["--logical-decoding-work-mem", "64kB", "--snapshot", "never"]
    with open(f"{root}.log", "a", encoding="utf-8") as log:
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=REPOSITORY)
    try:
        yield
    finally:
        run.send_signal(signal.SIGTERM)
        status = run.wait(_ANSWER_S)
    assert status == 0, Path(f"{root}.log").read_text("utf-8")


@contextmanager
def _written(database: Database, seed: int) -> Iterator[None]:
    """With clients, and large transactions."""
    clients = Clients(database.connect, seed=seed, pause_s=0.05)
    try:
        with database.connect() as session:

            def write() -> None:
                session.execute(_LARGE)
                session.execute(_LARGE_AWAY)

            with meanwhile(write, 1.0):
                yield
    finally:
        clients.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp") as name:
        folder = Path(name)
        with EmbeddedPostgres(folder / "data", settings={"wal_level": "logical"}, tcp=True) as server:
            connection = psycopg.connect(server.conninfo("postgres"), autocommit=True)
            database = Database(server, "postgres", connection)
            set_up(database)
            print(kill_it(database, folder, arguments.kills, arguments.seed))


if __name__ == "__main__":
    main()
