"""``xidstream verify`` beside a run under write load: ``python -m benchmarks.verify --rows 10000000 --per-s 200``.

A server, ``xidstream run`` with a snapshot of the table, and a client that updates, inserts, deletes and moves rows, at
``--per-s`` transactions a second. Then the command, as a user starts it: ``verify_s`` is all of it, with the start of
Ray and Spark, and ``compared_s`` the table's read and comparison. ``server_cpu_s`` is what the server's processes used
meanwhile, and ``load_cpu_s_per_s`` what they used in each second of the load alone, before.

Then one value of one row of the log is changed in its file, and the command has to find it: ``found`` is what it said.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from benchmarks.source import PUBLICATION, Source, server

_XIDSTREAM = [sys.executable, "-m", "actors"]
_WAIT_S = 3600
_ALONE_S = 10


class Writer:
    """Transactions of one row, so many a second, until ``stop``. ``spared``: a key that it leaves alone."""

    def __init__(self, source: Source, rows: int, per_s: float, spared: int) -> None:
        self._source, self._rows, self._per_s, self._spared = source, rows, per_s, spared
        self._stop = threading.Event()
        self.n_commits = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        dice = random.Random(1)
        began_s = time.monotonic()
        with psycopg.connect(self._source.socket_dsn, autocommit=True) as session:
            while not self._stop.is_set():
                key = dice.randint(1, self._rows)
                if key == self._spared:
                    continue
                session.execute(_change(dice, key, self._rows + self.n_commits).encode())
                self.n_commits += 1
                self._stop.wait(max(0.0, began_s + self.n_commits / self._per_s - time.monotonic()))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _change(dice: random.Random, key: int, free: int) -> str:
    kind = dice.random()
    if kind < 0.7:
        return f"update t set k = k + 1, note = 'changed' where id = {key}"
    if kind < 0.85:
        return f"insert into t values ({free + 1_000_000}, 1, 'new', 1, now(), 0.1, true)"
    return f"delete from t where id = {key}" if kind < 0.95 else f"update t set id = -id where id = {key}"


def run(rows: int, per_s: float, folder: Path) -> dict[str, Any]:
    root, spared = folder / "delta", rows // 2
    with server() as running:
        source = Source(running, "verify")
        source.insert(rows)
        source.execute("vacuum analyze t")
        options = ["--dsn", source.dsn, "--slot", "verify", "--publication", PUBLICATION]
        options += ["--sink", f"delta:{root}"]
        log = (folder / "run.log").open("w")
        command = [*_XIDSTREAM, "run", *options, "--storage", str(folder / "storage"), "--create-slot"]
        pipeline = subprocess.Popen(command, stdout=log, stderr=log)
        writer = None
        try:
            _await_snapshot(root, pipeline)
            writer = Writer(source, rows, per_s, spared)
            time.sleep(5)
            before = _cpu_s(source)
            time.sleep(_ALONE_S)
            alone = round((_cpu_s(source) - before) / _ALONE_S, 2)
            equal = _verify(source, options)
            print(json.dumps(equal), file=sys.stderr, flush=True)
            _damage(root / "public.t", spared)
            damaged = _verify(source, options)
            measured = {"rows": rows, "per_s": per_s, "load_cpu_s_per_s": alone, "commits": writer.n_commits}
            return {**measured, "equal": equal, "damaged": damaged}
        finally:
            if writer is not None:
                writer.stop()
            pipeline.terminate()
            pipeline.wait()
            log.close()
            source.close()


def _await_snapshot(root: Path, pipeline: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not _has_snapshot(root):
        if pipeline.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the snapshot of the table did not come")
        time.sleep(0.5)


def _has_snapshot(root: Path) -> bool:
    folder = root / "_snapshots"
    return (folder / "_delta_log").exists() and DeltaTable(str(folder)).to_pyarrow_table().num_rows > 0


def _cpu_s(source: Source) -> float:
    """Of the server and all its sessions, those that ended too."""
    pid = int((source.server.data_dir / "postmaster.pid").read_text().split()[0])
    postmaster = psutil.Process(pid)
    ended = postmaster.cpu_times()
    total = float(ended.children_user + ended.children_system)
    for child in postmaster.children():
        times = child.cpu_times()
        total += float(times.user + times.system)
    return total


def _verify(source: Source, options: list[str]) -> dict[str, Any]:
    before, began_s = _cpu_s(source), time.monotonic()
    command = [*_XIDSTREAM, "verify", *options, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    verify_s = time.monotonic() - began_s
    if not ended.stdout.strip():
        raise RuntimeError(f"verify ended with {ended.returncode}: {ended.stderr[-2000:]}")
    (table,) = json.loads(ended.stdout.splitlines()[-1])["tables"]
    return {
        "status": ended.returncode,
        "verify_s": round(verify_s, 1),
        "server_cpu_s": round(_cpu_s(source) - before, 1),
        "compared_s": table.pop("elapsed_s"),
        "found": table,
    }


def _damage(table: Path, key: int) -> None:
    """Change ``note`` of one row, in the file that has it."""
    for path in DeltaTable(str(table)).file_uris():
        ids = pq.read_table(path, columns=["id"])["id"].to_pylist()
        if key in ids:
            rows = pq.read_table(path)
            place = ids.index(key)
            i = rows.schema.get_field_index("note")
            other = pa.chunked_array([pa.array(["damaged"])])
            note = rows.column(i)
            pieces = [*note.slice(0, place).chunks, *other.chunks, *note.slice(place + 1).chunks]
            pq.write_table(
                rows.set_column(i, rows.schema.field(i), pa.chunked_array(pieces)), path, store_schema=False
            )
            return
    raise LookupError(f"no file has the row {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--per-s", type=float, default=200.0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the run is ended, too
    with tempfile.TemporaryDirectory(prefix="xs-verify-", dir=options.folder) as folder:
        print(json.dumps(run(options.rows, options.per_s, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
