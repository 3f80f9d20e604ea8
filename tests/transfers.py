"""Transfers between two tables whose balances always have the same sum, and readers that check it.

Clients move money, and whole rows, from one table to the other: in transactions with savepoints, some of which are
rolled back, and some transactions are rolled back as a whole. So the sum over both tables is the same after each
commit, and any read that mixes two moments shows another one.

``python -m tests.transfers --manifest 9500 --as-of 500`` is the long run: a server, a run into Delta tables and a
mirror, both processes that are killed (SIGKILL) again and again, and readers. It prints counts, and ends with
status 1 at the first wrong sum, or where ``verify`` finds a difference at the end. ``--s3``: the tables stand in moto's
S3. The suite has a short one (tests/e2e/test_mirror.py).

The soak has the log shortened after seconds (tests/e2e/hurried), and its files merged and removed. Readers ask
for the oldest moment that the log says it has, too. Each minute has a line with how many files the root has:
``PYTHONPATH=tests/e2e/hurried python -m tests.transfers --minutes 120 --log-retention 1 --life-s 600 --every 10s
--read-pause-s 2 --manifest 100 --as-of 30``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pyarrow.compute as pc
from deltalake import DeltaTable

N_ROWS = 2_000
FIRST_BALANCE = 1_000
TOTAL = 2 * N_ROWS * FIRST_BALANCE
SCHEMA = f"""
    create table a (id int primary key, balance bigint not null, note text);
    create table b (id int primary key, balance bigint not null, note text);
    insert into a select i, {FIRST_BALANCE}, repeat('n', 100) from generate_series(1, {N_ROWS}) i;
    insert into b select i, {FIRST_BALANCE}, repeat('n', 100) from generate_series(1, {N_ROWS}) i;
    create publication p for table a, b;
"""


class Clients:
    """Threads that make transfers until ``stop``. ``connect`` gives a connection in autocommit."""

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], n: int = 4, seed: int = 1, pause_s: float = 0.01
    ) -> None:
        self._connect = connect
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.n_commits = [0] * n
        dice = [random.Random(seed * 100 + i) for i in range(n)]
        self._threads = [threading.Thread(target=self._run, args=(dice[i], i), daemon=True) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures

    def _run(self, dice: random.Random, number: int) -> None:
        try:
            with self._connect() as session:
                while not self._stop.wait(self._pause_s):
                    self._transaction(session, dice, number)
        except BaseException as error:
            self._failures.append(error)

    def _transaction(self, session: psycopg.Connection[Any], dice: random.Random, number: int) -> None:
        session.execute(b"begin")
        for _ in range(dice.randint(1, 3)):
            undone = dice.random() < 0.3
            if undone:
                session.execute(b"savepoint s")
                self._move(session, dice, number, half=dice.random() < 0.5)
                session.execute(b"rollback to savepoint s")
            self._move(session, dice, number)
        is_kept = dice.random() < 0.85
        session.execute(b"commit" if is_kept else b"rollback")
        self.n_commits[number] += is_kept

    def _move(
        self, session: psycopg.Connection[Any], dice: random.Random, number: int, *, half: bool = False
    ) -> None:
        """``half``: only one side of it, which is then rolled back. Clients have rows of their own."""
        one, other = dice.sample(["a", "b"], 2)
        ids = [4 * dice.randrange(N_ROWS // 4) + number + 1 for _ in range(2)]
        if dice.random() < 0.2:
            # A row moves with its balance, in place of one that is added to.
            moved = session.execute(
                f"delete from {one} where id = %s returning balance", (ids[0],)
            ).fetchone()  # type: ignore[arg-type]
            if moved is not None and not half:
                session.execute(
                    f"insert into {other} values (%s, %s, 'moved') "  # type: ignore[arg-type]
                    f"on conflict (id) do update set balance = {other}.balance + excluded.balance",
                    (ids[0], moved[0]),
                )
            return
        amount = dice.randint(1, 50)
        statement = (
            "insert into {} values (%s, %s, 'new') on conflict (id) do update set balance = {}.balance + %s"
        )
        session.execute(statement.format(one, one), (ids[0], -amount, -amount))  # type: ignore[arg-type]
        if not half:
            session.execute(statement.format(other, other), (ids[1], amount, amount))  # type: ignore[arg-type]


Place: TypeAlias = "Path | str"
"""A folder, or the URI of a store whose credentials are in the environment."""


def is_table(place: str) -> bool:
    return bool(DeltaTable.is_deltatable(place))


def manifest_sum(root: Place) -> tuple[int, int] | None:
    """The newest moment that the manifest names, as any engine reads it: its LSN and the sum of all balances. None
    where there is none yet."""
    current = f"{root}/current"
    if not is_table(f"{current}/_manifest"):
        return None
    lines = DeltaTable(f"{current}/_manifest").to_pyarrow_table().to_pylist()
    if not lines:
        return None
    last = max(line["lsn"] for line in lines)
    total = 0
    named = [line for line in lines if line["lsn"] == last]
    assert sorted(line["table"] for line in named) == ["public.a", "public.b"], named
    for line in named:
        table = DeltaTable(f"{current}/{line['directory']}", version=line["version"])
        total += pc.sum(table.to_pyarrow_table(columns=["balance"])["balance"]).as_py()
    return last, total


def as_of_sum(root: Place, spark: Any, lsn: int | None = None) -> tuple[int, int]:
    """The moment ``lsn`` of the log, as ``ChangeLog`` reads it. None: the newest one that can be read."""
    from xidstream import ChangeLog

    state = ChangeLog(str(root)).as_of(spark, lsn=lsn)
    totals = [state[f"public.{table}"].agg({"balance": "sum"}).collect()[0][0] for table in ("a", "b")]
    return int(state.lsn), sum(totals)


def oldest_lsn(root: Place) -> int:
    """From where on the log says that it has all states of both tables."""
    from xidstream import ChangeLog

    log = ChangeLog(str(root))
    return max(int(lsn) for lsn in map(log.oldest_lsn, ("public.a", "public.b")) if lsn is not None)


def sum_unless_cut(root: Place, spark: Any, *, oldest: bool) -> tuple[int, int] | None:
    """Of the oldest or the newest moment that the log has. None where it was cut further before this had read it: where
    it is shortened after seconds, that may be said of the newest one, too."""
    from xidstream import ChangeLog
    from xidstream.pipeline.errors import PreconditionMissing

    lsn = oldest_lsn(root) if oldest else int(ChangeLog(str(root)).readable_lsn)
    try:
        return as_of_sum(root, spark, lsn)
    except PreconditionMissing:
        assert lsn < oldest_lsn(root), f"{lsn} is refused, and the log says that it has all from there on"
        return None


class Killed:
    """``python -m xidstream ARGUMENTS`` as a process, killed (SIGKILL) at random moments and started again.

    The processes that it started are left to end by themselves, as they have to where a run is lost. ``longest_s``: of
    a life, once the process has said ``begun``, for three lives in four. The fourth ends whatever it does then, mostly
    while it starts.
    """

    def __init__(self, arguments: Sequence[str], log: Path, seed: int, begun: str, longest_s: float) -> None:
        self._command = [sys.executable, "-m", "xidstream", *arguments]
        self._log = log
        self._begun = begun
        self._longest_s = longest_s
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self.n_kills = 0
        self.failure: str | None = None
        """Why a process ended that nobody had killed."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._log.open("ab") as log:
                n_bytes = log.tell()
                process = subprocess.Popen(self._command, stdout=log, stderr=log)
            is_last = self._lives(n_bytes)
            if process.poll() is not None:
                said = self._log.read_text()[-2000:]
                self.failure = f"{self._command[3]} ended with status {process.returncode}: {said}"
                return
            if is_last:
                process.terminate()
                process.wait()
                return
            process.kill()
            process.wait()
            self.n_kills += 1

    def _lives(self, n_bytes: int) -> bool:
        """Wait for the end of one life, whose words stand after ``n_bytes``. Returns whether it is the last one.

        A start takes as long as the machine's load makes it take. If lives were counted from there, the readers would
        see nothing new on a busy machine.
        """
        if self._dice.random() < 1 / 4:
            return self._stop.wait(self._dice.uniform(5, 40))
        deadline_s = time.monotonic() + 300
        while self._begun.encode() not in self._log.read_bytes()[n_bytes:] and time.monotonic() < deadline_s:
            if self._stop.wait(0.5):
                return True
        return self._stop.wait(self._dice.uniform(self._longest_s / 8, self._longest_s))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def killed_mirror(root: Place, folder: Path, options: argparse.Namespace) -> Killed:
    """By default it refreshes every second, so most kills strike a refresh. Five minutes are longer than any reader
    here takes."""
    place = ["--sink", f"delta:{root}", "--every", options.every, "--vacuum", "--mirror-retention", "5min"]
    return Killed(
        ["mirror", *place], folder / "mirror.log", options.seed, "base tables", longest_s=2 * options.life_s
    )


def killed_run(root: Place, folder: Path, dsn: str, options: argparse.Namespace) -> Killed:
    source = [
        "--dsn",
        dsn,
        "--slot",
        "transfers",
        "--publication",
        "p",
        "--create-slot",
        "--snapshot",
        "initial",
    ]
    place = ["--storage", str(folder / "storage"), "--sink", f"delta:{root}"]
    kept = ["--log-retention", options.log_retention] if options.log_retention else []
    return Killed(
        ["run", *source, *place, *kept],
        folder / "run.log",
        options.seed + 1,
        "reading slot",
        longest_s=options.life_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", type=int, default=9_500, help="reads by the manifest")
    parser.add_argument("--as-of", type=int, default=500, help="reads by ChangeLog.as_of in Spark")
    parser.add_argument("--pause-s", type=float, default=0.1, help="of a client, between two transactions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="go on reading for as long, at least")
    parser.add_argument(
        "--log-retention", default="", help="of the run, e.g. 5min; empty: the log is kept whole"
    )
    parser.add_argument("--every", default="1s", help="how often the mirror refreshes")
    parser.add_argument(
        "--life-s", type=float, default=120, help="the longest life of a run; a mirror has twice that"
    )
    parser.add_argument("--read-pause-s", type=float, default=0, help="of the readers, between two reads")
    parser.add_argument(
        "--s3", action="store_true", help="the tables stand in an S3 of moto's, in a process of its own"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="xs-transfers-") as folder,
        s3_root() if options.s3 else nullcontext(Path(folder) / "delta") as root,
    ):
        failed = _long_run(root, Path(folder), options)
    raise SystemExit(1 if failed else 0)


@contextmanager
def s3_root() -> Iterator[str]:
    """Below a bucket of a server that ends with this; the environment says where it is, also to child processes."""
    from tests.unit.delta.test_small_files import serve_s3

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    settings = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
    os.environ.update(settings)
    process = context.Process(target=serve_s3, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    port, bucket = ours.recv()
    os.environ.update({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"})
    try:
        yield f"s3://{bucket}/delta"
    finally:
        ours.close()
        process.terminate()
        process.join()


def _long_run(root: Place, folder: Path, options: argparse.Namespace) -> bool:
    from benchmarks.source import Source, server
    from xidstream import spark_session

    with server() as running:
        source = Source(running, "transfers")
        for statement in filter(str.strip, SCHEMA.split(";")):
            source.execute(statement)
        spark = spark_session("transfers")
        run = killed_run(root, folder, source.dsn, options)
        clients = Clients(
            lambda: psycopg.connect(source.dsn, autocommit=True), seed=options.seed, pause_s=options.pause_s
        )
        mirror = None
        try:
            while has_no_snapshots(root) or not is_known(root):
                assert run.failure is None, run.failure
                time.sleep(1)
            mirror = killed_mirror(root, folder, options)
            failed = _read(root, spark, options, clients, mirror, run)
        finally:
            clients.stop()
            for each in (mirror, run):
                if each is not None:
                    each.stop()
        try:
            return failed or not _is_right(root, folder, spark, source.dsn)
        finally:
            source.close()


def _is_right(root: Place, folder: Path, spark: Any, dsn: str) -> bool:
    """Whether the log is what the source holds, and a refresh brings the base tables to it."""
    from xidstream import ChangeLog, ChangeStream
    from xidstream.actors.mirror import Mirror

    settings = {"dsn": dsn, "slot": "transfers", "publication": "p", "storage": str(folder / "storage")}
    with _told("what the last kill left in the slot"):
        ChangeStream(settings).toDelta(str(root)).trigger(availableNow=True).start(spark).awaitTermination()
    # A verification takes snapshots of the source, and waits for the log to reach them: somebody has to write it.
    run = ChangeStream(settings).toDelta(str(root)).start(spark)
    try:
        with _told("verify"):
            found = ChangeLog(str(root)).verify(spark, dsn, "p", staging=str(folder))
    finally:
        run.stop()
    print(found, flush=True)
    with _told("the last refresh"):
        Mirror(str(root)).refresh(spark)
    last = manifest_sum(root)
    print(f"base tables at the end: {last}", flush=True)
    with psycopg.connect(dsn) as session:
        held = {t: sorted(session.execute(f"select id, balance, note from {t}")) for t in ("a", "b")}  # type: ignore[arg-type]
    there = {
        t: sorted(
            (row["id"], row["balance"], row["note"])
            for row in DeltaTable(f"{root}/current/public.{t}").to_pyarrow_table().to_pylist()
        )
        for t in held
    }
    return bool(found.is_equal) and last is not None and last[1] == TOTAL and there == held


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say how long the block took: the end of a long run is where it stood still, if it did."""
    began_s = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began_s:.1f} s", flush=True)


def has_no_snapshots(root: Place) -> bool:
    """Whether the log has no snapshot of both tables yet, so that a mirror has nothing to do."""
    folder = f"{root}/_snapshots"
    return not is_table(folder) or DeltaTable(folder).to_pyarrow_table().num_rows < 2


def is_known(root: Place) -> bool:
    """Whether the newest moment that can be read is behind both snapshots."""
    from xidstream import ChangeLog

    lines = DeltaTable(f"{root}/_snapshots").to_pyarrow_table(columns=["valid_from"])
    return int(ChangeLog(str(root)).readable_lsn) >= pc.max(lines["valid_from"]).as_py()


def _read(
    root: Place, spark: Any, options: argparse.Namespace, clients: Clients, mirror: Killed, run: Killed
) -> bool:
    kinds: dict[str, Callable[[], tuple[int, int] | None]] = {
        "manifest": lambda: manifest_sum(root),
        "as_of": lambda: sum_unless_cut(root, spark, oldest=False),
        "oldest": lambda: sum_unless_cut(root, spark, oldest=True),
    }
    wanted = {
        "manifest": options.manifest,
        "as_of": options.as_of,
        "oldest": options.as_of if options.log_retention else 0,
    }
    n = dict.fromkeys(kinds, 0)
    wrong: list[tuple[str, int, int]] = []
    moments: set[tuple[str, int]] = set()
    begun_s = said_s = time.monotonic()
    while not wrong and (
        any(n[kind] < wanted[kind] for kind in kinds) or time.monotonic() < begun_s + 60 * options.minutes
    ):
        assert run.failure is None and mirror.failure is None, run.failure or mirror.failure
        kind = min(filter(wanted.get, kinds), key=lambda kind: n[kind] / wanted[kind])
        found = kinds[kind]()
        if found is None:
            time.sleep(0.5)
            continue
        n[kind] += 1
        moments.add((kind, found[0]))
        if found[1] != TOTAL:
            wrong.append((kind, *found))
        if time.monotonic() > said_s + 60:
            said_s = time.monotonic()
            print(
                f"{(said_s - begun_s) / 60:.0f} min: {n} reads, {len(moments)} moments, {sum(clients.n_commits)} "
                f"commits, {mirror.n_kills} and {run.n_kills} kills, {_size(root)}",
                flush=True,
            )
        time.sleep(options.read_pause_s)
    print(
        f"reads: {n}; different moments: {len(moments)}; commits of clients: {sum(clients.n_commits)}; kills of the "
        f"mirror: {mirror.n_kills}, of the run: {run.n_kills}; wrong sums: {wrong}"
    )
    return bool(wrong)


def _size(root: Place) -> str:
    if not isinstance(root, Path):
        return "on a store"
    n_files = n_bytes = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                n_bytes += os.stat(os.path.join(folder, name)).st_size
                n_files += 1
    return f"{n_files} files, {n_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
