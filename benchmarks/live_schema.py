"""A whole schema beside a run: ``python -m benchmarks.live_schema --tables 1000 --rows 100 --large 3``.

A server with many small tables and some of a million rows, ``xidstream run`` with their snapshots, and a mirror in this
process. It tells, one line of JSON for each:

- ``snapshots``: seconds from the start of the run to the last snapshot.
- ``first``: the first base tables. ``behind_1_table`` and so on: a refresh behind a transaction of so many tables, once
  the log has it (``log_s`` from COMMIT). ``behind_half``: a transaction over half of them, and then three more.
- ``as_of``: states of all tables, and the rows of some, counted by Spark.
- ``fifty_come_and_go``: tables are made and filled while as many are dropped; seconds until the base tables
  have the new ones.

Of each refresh: its seconds, the CPU seconds of this process, and the megabytes that it had at most. ``run_mb`` is what
all processes of the run have, by themselves. At the end each base table's rows are counted against the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg
from deltalake import DeltaTable

from benchmarks.mirror import local_session
from benchmarks.source import Source, server
from benchmarks.whole_schema import costs
from xidstream.actors.mirror import Mirror
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.pg import Lsn

_PUBLICATION: Final = "whole"
_LARGE_ROWS: Final = 1_000_000
_COUNTED: Final = 20
_DEADLINE_S: Final = 1_800.0


class Schema:
    """The tables of the server, and transactions over some of them."""

    def __init__(self, source: Source, n_tables: int, n_rows: int, n_large: int) -> None:
        self._source = source
        source.execute("drop publication bench; drop table t")
        self.names: list[str] = []
        self.make(n_tables - n_large, n_rows)
        for _ in range(n_large):
            self.make(1, _LARGE_ROWS)
        source.execute(f"create publication {_PUBLICATION} for all tables")

    def make(self, n: int, n_rows: int, prefix: str = "t") -> None:
        with psycopg.connect(self._source.socket_dsn) as session:
            for _ in range(n):
                name = f"{prefix}{len(self.names):05d}"
                self.names.append(name)
                statements = (
                    f"create table {name} (id bigint primary key, k int, note text);"
                    f"insert into {name} select i, i % 10, 'note ' || i from generate_series(1, {n_rows}) i"
                )
                session.execute(statements.encode())

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._source.execute(f"drop table {name}")
            self.names.remove(name)

    def change(self, names: Sequence[str]) -> Lsn:
        """A row of each, in one transaction. Returns where its commit record begins: nobody else writes."""
        with psycopg.connect(self._source.socket_dsn) as session:
            for name in names:
                session.execute(f"update {name} set k = k + 1 where id = 1".encode())
            (text,) = session.execute("select pg_current_wal_insert_lsn()::text").fetchone() or ("",)
            session.commit()
        return Lsn.parse(text)

    def sums(self) -> dict[str, tuple[int, int]]:
        """Table → its rows, and the sum of ``k``."""
        return {
            f"public.{name}": self._source.execute(f"select count(*), sum(k) from {name}")[0]  # type: ignore[misc]
            for name in self.names
        }


def run(n_tables: int, n_rows: int, n_large: int, folder: Path) -> None:
    with server() as running:
        source = Source(running, "live_schema")
        schema = Schema(source, n_tables, n_rows, n_large)
        root = folder / "log"
        spark = local_session(folder)
        spark.range(1).count()
        options = ["--dsn", source.dsn, "--slot", source.name, "--publication", _PUBLICATION, "--create-slot"]
        options += ["--storage", str(folder / "storage"), "--sink", f"delta:{root}", "--snapshot", "initial"]
        told("begun", load=os.getloadavg()[0])
        began_s = time.monotonic()
        with open(folder / "run.log", "wb") as output:
            command = [sys.executable, "-m", "actors", "run", *options]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _await(lambda: _n_snapshots(root) >= n_tables, process, folder, 1.0)
            told("snapshots", s=round(time.monotonic() - began_s, 1), run_mb=_run_mb(process))
            measure(schema, root, spark, process, folder)
        finally:
            process.terminate()
            process.wait()
            spark.stop()
            source.close()


def measure(schema: Schema, root: Path, spark: Any, process: subprocess.Popen[bytes], folder: Path) -> None:
    log, mirror = LogFrames(str(root)), Mirror(str(root))

    def followed(case: str, names: Sequence[str]) -> None:
        began_s, lsn = time.monotonic(), schema.change(names)
        _await(lambda: log.readable_lsn >= lsn, process, folder)
        log_s = round(time.monotonic() - began_s, 2)
        told(case, log_s=log_s, **costs(lambda: mirror.refresh(spark)), run_mb=_run_mb(process))

    lsn = schema.change(schema.names[:1])
    _await(lambda: log.readable_lsn >= lsn, process, folder)
    told("first", **costs(lambda: mirror.refresh(spark)), run_mb=_run_mb(process), load=os.getloadavg()[0])
    for n in (1, 10, 10, 10):
        followed(f"behind_{n}_tables", schema.names[:n])
    half = len(schema.names) // 2
    for _ in range(4):
        followed("behind_half", schema.names[:half])
    began_s = time.monotonic()
    state = log.as_of(spark)
    frames = {name: state[f"public.{name}"] for name in schema.names}
    planned_s = round(time.monotonic() - began_s, 1)
    began_s = time.monotonic()
    counted = [frames[name].count() for name in schema.names[:_COUNTED]]
    told(
        "as_of", frames=len(frames), s=planned_s, counts=len(counted), s_of_counts=time.monotonic() - began_s
    )
    began_s = time.monotonic()
    gone = schema.names[half : half + 50]
    schema.make(50, 100, "new")
    schema.drop(gone)
    lsn = schema.change(schema.names[-50:])
    _await(lambda: log.readable_lsn >= lsn, process, folder)
    refreshes = 0
    wanted = {f"public.{name}" for name in schema.names}
    while not wanted <= (there := _named(root)) or any(f"public.{name}" in there for name in gone):
        schema.change(schema.names[:1])  # a refresh comes with the next commit
        time.sleep(1)
        mirror.refresh(spark)
        refreshes += 1
        _await(lambda: True, process, folder)
        if time.monotonic() > began_s + _DEADLINE_S:
            raise RuntimeError("the new tables have no base")
    told(
        "fifty_come_and_go",
        s=round(time.monotonic() - began_s, 1),
        refreshes=refreshes,
        run_mb=_run_mb(process),
    )
    lsn = schema.change(schema.names[:1])
    _await(lambda: log.readable_lsn >= lsn, process, folder)
    mirror.refresh(spark)
    told("end", equal=_sums(root) == schema.sums(), tables=len(schema.names), load=os.getloadavg()[0])


def told(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def _n_snapshots(root: Path) -> int:
    with suppress(Exception):  # it is made meanwhile
        return int(DeltaTable(f"{root}/_snapshots").to_pyarrow_table(columns=["valid_from"]).num_rows)
    return 0


def _newest(root: Path) -> dict[str, Any]:
    lines = DeltaTable(f"{root}/current/_manifest").to_pyarrow_table().to_pylist()
    last = max(line["lsn"] for line in lines)
    return {line["table"]: line for line in lines if line["lsn"] == last}


def _named(root: Path) -> set[str]:
    return set(_newest(root))


def _sums(root: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name, line in _newest(root).items():
        table = DeltaTable(f"{root}/current/{line['directory']}", version=line["version"])
        values = table.to_pyarrow_table(columns=["k"])["k"].to_pylist()
        found[name] = (len(values), sum(values))
    return found


def _run_mb(process: subprocess.Popen[bytes]) -> int:
    total = 0
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.Error):
            total += each.memory_full_info().uss
    return total >> 20


def _await(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path, poll_s: float = 0.05
) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended: {(folder / 'run.log').read_text()[-2000:]}")
        if time.monotonic() > deadline_s:
            raise RuntimeError("the log did not come on")
        time.sleep(poll_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=100, help="of each small table")
    parser.add_argument("--large", type=int, default=3, help=f"tables of {_LARGE_ROWS:,} rows, among them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-live-", ignore_cleanup_errors=True) as folder:
        run(options.tables, options.rows, options.large, Path(folder))


if __name__ == "__main__":
    main()
