"""Snapshot: rows a second from a table into Parquet on this machine's disk, by 1, 2 and 4 readers, each a process.

The reference is one ``COPY t TO STDOUT (FORMAT binary)`` by psql to nowhere. CPU seconds are told apart: the readers'
and the server's. The same table is also read and thrown away in four formats, which says what each costs the server:
text, a cast to text, ``concat(…)`` and the columns themselves, the last three in binary. The readers throw
nothing away: they decode, write and sync.
"""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg

from benchmarks.results import median, ratio
from benchmarks.source import Source, server
from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.pipeline.initial_copy.range_reading import RangeOutput, RangeReader
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.postgres.copy_loop import RowLoop
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource, RangeTask, plan_ranges

READERS = (1, 2, 4)
ACCOUNTS = "aid int not null, bid int, abalance int, filler char(84)"
"""As pgbench makes them."""
WIDE = """id bigint, k int, small smallint, amount numeric(12,2), free numeric, at timestamptz, made timestamp,
    day date, score float8, ratio float4, flag bool, key uuid, note text, name varchar(40), body text, doc jsonb,
    raw bytea, tags text[], ids int[], nothing text"""
_ACCOUNTS_ROWS = "select i, i / 100000 + 1, 0, '' from generate_series(1, {}) i"
_WIDE_ROWS = """select i, i % 1000, i % 100, i / 100.0, i / 7.0, timestamptz '2024-01-01' + i * interval '1 second',
    timestamp '2024-01-01' + i * interval '1 second', date '2024-01-01' + i % 1000, i * 0.5, i / 3.0, i % 2 = 0,
    md5(i::text)::uuid, 'note number ' || i, case when i % 3 = 0 then 'name ' || i end, repeat('body text ', 20),
    jsonb_build_object('id', i, 'v', 'x'), decode(md5(i::text), 'hex'), array['a', 'b' || i], array[i, i + 1], null
    from generate_series(1, {}) i"""
TABLES = {"accounts": (ACCOUNTS, _ACCOUNTS_ROWS, 1), "wide": (WIDE, _WIDE_ROWS, 4)}
"""Name to columns, rows, and by what the number of rows is divided."""
_BOUNDS = SnapshotBounds(Lsn(0x100), Lsn(0x200), 700, 710, (), 1_700_000_000_000_000)


def run(rows: int, repeats: int) -> dict[str, Any]:
    measured: dict[str, Any] = {"rows": rows, "repeats": repeats}
    with server() as running:
        source = Source(running, "snapshot")
        for name, (columns, values, divisor) in TABLES.items():
            n_rows = rows // divisor
            source.execute(f"create table {name} ({columns})")
            source.execute(f"insert into {name} {values.format(n_rows)}")
            source.execute(f"vacuum analyze {name}")
            measured[name] = _table(source, name, n_rows, repeats)
        source.close()
    return measured


def _table(source: Source, name: str, rows: int, repeats: int) -> dict[str, Any]:
    relation, leaf = _described(source, name)
    binary_s: list[float] = []
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in READERS}
    for _ in range(repeats):
        binary_s.append(_psql(source, f"copy {name} to stdout (format binary)"))
        for n in READERS:
            runs[n].append(_read(source, relation, leaf, n, rows))
    formats = {how: _thrown_away(source, statement) for how, statement in _formats(relation).items()}
    return {
        "rows": rows,
        "table_bytes": leaf.n_bytes,
        "copy_binary_rows_per_s": rows / median(binary_s),
        "copy_binary_s": binary_s,
        "readers": {
            str(n): {
                "rows_per_s": rows / median([one["s"] for one in each]),
                "ratio_to_copy_binary": ratio(binary_s, [one["s"] for one in each]),
                **{
                    f"{part}_cpu_s_per_million_rows": median([one[part] for one in each]) / rows * 1e6
                    for part in ("readers", "server")
                },
                "growth_mb": max(one["growth_mb"] for one in each),
                "parquet_bytes": each[0]["parquet_bytes"],
                "runs": each,
            }
            for n, each in runs.items()
        },
        "formats": {
            how: {part: s / rows * 1e6 for part, s in seconds.items()} for how, seconds in formats.items()
        },
    }


def _described(source: Source, name: str) -> tuple[RelationVersion, Leaf]:
    columns = source.execute(
        "select attname, atttypid::int8, atttypmod from pg_attribute where attrelid = %s::regclass and attnum > 0 "
        "order by attnum",
        name,
    )
    ((relid, n_pages, n_bytes),) = source.execute(
        "select c::oid::int8, pg_relation_size(c) / 8192, pg_table_size(c) from (values (%s::regclass)) t(c)",
        name,
    )
    made = tuple(Column(column, oid, modifier, False) for column, oid, modifier in columns)
    relation = RelationVersion(relid, "public", name, ReplicaIdentity.DEFAULT, made)
    return relation, Leaf(relid, "public", name, n_pages, n_bytes)


def _psql(source: Source, statement: str) -> float:
    command = [str(source.server.bin("psql")), "-X", "-q", "-d", source.dsn, "-c", statement]
    started_s = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started_s


# -- readers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    dsn: str
    tasks: tuple[RangeTask, ...]
    target: RangeOutput
    conform: Conform


@dataclass(frozen=True)
class _Share:
    """What one reader did, between the start of all and its own end (CLOCK_MONOTONIC)."""

    started_s: float
    ended_s: float
    cpu_s: float
    server_cpu_s: float
    growth_bytes: int
    rows: int
    parquet_bytes: int


def _read(
    source: Source, relation: RelationVersion, leaf: Leaf, n_readers: int, rows: int
) -> dict[str, float]:
    placed = map_columns((), contract_schema(relation))
    published = PublishedSource(relation, "", None, (leaf,))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="xs-snapshot-") as folder, psycopg.connect(source.dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        exported = holder.execute("select pg_export_snapshot()").fetchone()
        assert exported is not None
        tasks = tuple(
            RangeTask(published, exported[0], pages) for pages in plan_ranges((leaf,), by_range=True)
        )
        target = RangeOutput(Location.parse(folder), "job")
        work = _Work(source.dsn, tasks, target, Conform.of(placed.columns, placed.names))
        start, shares, taken = context.Barrier(n_readers), context.Queue(), context.Value("i", 0)
        readers = [
            context.Process(target=_reader, args=(work, start, taken, shares)) for _ in range(n_readers)
        ]
        for reader in readers:
            reader.start()
        done: list[_Share] = [shares.get(timeout=900) for _ in readers]
        for reader in readers:
            reader.join()
    assert sum(share.rows for share in done) == rows
    return {
        "s": max(share.ended_s for share in done) - min(share.started_s for share in done),
        "readers": sum(share.cpu_s for share in done),
        "server": sum(share.server_cpu_s for share in done),
        "growth_mb": max(share.growth_bytes for share in done) / 2**20,
        "parquet_bytes": sum(share.parquet_bytes for share in done),
    }


def _reader(work: _Work, start: Barrier, taken: Any, shares: Any) -> None:
    skip_pandas_import()  # as the actor does, else the first rows would load it
    reader = RangeReader(work.dsn)
    task = work.tasks[0]
    nothing = RangeTask(
        PublishedSource(task.source.relation, "", "false", task.source.leaves), task.snapshot_name, task.range
    )
    reader.read(nothing, _BOUNDS, work.target, work.conform)  # connected, and the kernels are loaded
    backend = psutil.Process(reader._connection.backend_pid)  # type: ignore[union-attr]
    start.wait()
    before = resource.getrusage(resource.RUSAGE_SELF)
    server_before, started_s = _cpu_s(backend), time.monotonic()
    files = []
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(work.tasks):
            break
        files += reader.read(work.tasks[number], _BOUNDS, work.target, work.conform)
    ended_s = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_SELF)
    server_cpu_s = _cpu_s(backend) - server_before
    reader.close()
    shares.put(
        _Share(
            started_s,
            ended_s,
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            server_cpu_s,
            (after.ru_maxrss - before.ru_maxrss) << 10,
            sum(file.n_rows for file in files),
            sum(Path(work.target.table.uri, file.path).stat().st_size for file in files),
        )
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# -- formats -------------------------------------------------------------------------------------------


def _formats(relation: RelationVersion) -> dict[str, str]:
    names = [f'"{column.name}"' for column in relation.columns]
    shown = ", ".join(f"case when {name} is distinct from null then concat({name}) end" for name in names)
    cast = ", ".join(f"{name}::text" for name in names)
    return {
        "text": f"copy (select {', '.join(names)} from only {relation.table}) to stdout",
        "cast": f"copy (select {cast} from only {relation.table}) to stdout (format binary)",
        "concat": f"copy (select {shown} from only {relation.table}) to stdout (format binary)",
        "binary": f"copy (select {', '.join(names)} from only {relation.table}) to stdout (format binary)",
    }


def _thrown_away(source: Source, statement: str) -> dict[str, float]:
    """By the compiled loop: seconds in all, of the server's processor and of ours."""
    payload, lengths = np.empty(8 << 20, np.uint8), np.empty(64 << 10, np.int32)
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        backend = psutil.Process(connection.info.backend_pid)
        server_s, own_s, started_s = _cpu_s(backend), time.process_time(), time.monotonic()
        loop = RowLoop.of(connection.pgconn)
        connection.pgconn.exec_(statement.encode())
        while loop.gather(payload, lengths, 4 << 20) is not Outcome.ENDED:
            pass
        while connection.pgconn.get_result() is not None:
            pass
        return {
            "s": time.monotonic() - started_s,
            "server_cpu_s": _cpu_s(backend) - server_s,
            "client_cpu_s": time.process_time() - own_s,
        }
