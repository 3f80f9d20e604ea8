"""``python -m benchmarks.aged_run``: what a run costs on a change log that is an hour, a day, a month and a year old.

Each age has a log as a run with default settings leaves it at one transaction a second, each of which changes one of
1,000 rows: the rows and ``_transactions`` in files as merges leave them, the commits of the last hour in the logs of
both tables, and the files that merges have replaced in the last day as what the checkpoints remember. A
base table is there.
The run's own writers make all of it; the files that were replaced have never been there. The history has LSNs below
those of the server, so it is before what is measured.

On it ``xidstream run`` is started, and gets a transaction a second. ``start_s`` is from the command to the slot in use.
Of each transaction's batch ``commit_ms`` is how long the sink had it, and ``lag_ms`` is from COMMIT on: the median, and
the 99th percentile. ``cpu_ms`` is the CPU time of the sink's process for a transaction. ``refresh_ms``: a refresh
of the base table that has a transaction or two to bring, by a mirror of its own. ``as_of_ms``: the newest state of the
table, counted in Spark. ``pss_mb`` is of the run's processes, by what they are. ``files`` and ``mb`` are what is in the
tables' folders, but the rows of the change log. Then 200 commits of one row to both tables are made in an S3 store of
moto's that has the same tables, by the sink's writers with their upkeep, and the requests are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.mirror import local_session
from benchmarks.old_log import file_sizes, transactions
from benchmarks.results import median, percentile
from benchmarks.slot_run import SlotRun
from benchmarks.source import Source, server
from tests.s3_server import counted_s3
from xidstream.actors.mirror import Mirror
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.slots import application_ids
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION

AGES: Final = {"1 hour": 3_600, "1 day": 86_400, "30 days": 2_592_000, "1 year": 31_536_000}
_TABLE: Final = "public.t"
_COLUMNS: Final = ((_TABLE, "_commit_lsn"), (locations.TRANSACTIONS, "commit_lsn"))
"""The two tables of the log, and the column with their LSNs."""
_LOGS: Final = tuple(name for name, _ in _COLUMNS)
_ROWS: Final = 1_000
_WAL: Final = 2
"""Bytes of WAL from one commit of the history to the next, so that a year of them ends below the server's position."""
_SWITCHES: Final = 8
_HOUR: Final = 3_600
_REPLACED: Final = 86_400 * 9 // 8
"""Files of a table that merges replace in a day: each of a commit, and an eighth of them once more."""
_PIECE: Final = 100_000
_ASKED_EVERY: Final = 15
"""Transactions between two looks at the account, which has the last twenty batches."""


# -- the history ------------------------------------------------------------------------------------------


def _told(first: int, n: int, begin: int) -> pa.RecordBatch:
    """Lines of ``_transactions``, whose LSNs are after ``begin``."""
    told = transactions(first, n, _WAL)
    columns = dict(zip(told.schema.names, told.columns, strict=True))
    for name in ("commit_lsn", "end_lsn"):
        columns[name] = pc.add(columns[name], begin)
    columns["tables"] = pa.ListArray.from_arrays(columns["tables"].offsets, pa.repeat(_TABLE, n))
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=told.schema)


def _rows(first: int, n: int, schema: pa.Schema, told: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that the transactions in ``told`` changed: one each."""
    i = np.arange(first, first + n, dtype=np.int64)
    known = {
        "id": pa.array(1 + i % _ROWS),
        "k": pa.array(i % 1_000),
        "score": pa.array(i * 0.5),
        "_change_type": pa.repeat("update_postimage", n),
        "_xid": told["xid"],
        "_commit_lsn": told["commit_lsn"],
        "_commit_timestamp": told["commit_timestamp"],
        "_seq": pa.repeat(pa.scalar(0, pa.int64()), n),
    }
    columns = [known[f.name].cast(f.type) if f.name in known else pa.nulls(n, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _age(root: Location, name: str, lsn_column: str, n_transactions: int, begin: int) -> None:
    """Give the table ``name`` the history of so many transactions."""
    location = root.child(name)
    writer = DeltaTableWriter.open(location, name)
    assert writer is not None
    schema = pa.schema([column.field for column in writer.columns])
    files: list[WrittenFile] = []
    first = 1
    for n_rows in file_sizes(n_transactions):
        parquet = ParquetFiles(location, f"data-{len(files):032x}", schema, lsn_column, writer.ranged)
        for start in range(first, first + n_rows, _PIECE):
            told = _told(start, min(_PIECE, first + n_rows - start), begin)
            parquet.write(
                told if name == locations.TRANSACTIONS else _rows(start, told.num_rows, schema, told)
            )
        files += parquet.close()
        first += n_rows
    (slot,) = application_ids(root.child(locations.TRANSACTIONS))
    at = writer.watermark(slot)
    # The files of the last day that merges have replaced. They were never there, so nobody has to remove them.
    gone = [
        WrittenFile(f"data-{n:032x}/part-{n}.parquet", 1, 1, begin + n, begin + n)
        for n in range(min(_REPLACED, n_transactions))
    ]
    writer.commit([*files, *gone], {slot: at + 1}, lsn_column, merges=False)
    writer.commit([], {slot: at + 2}, lsn_column, removed=[file.path for file in gone], merges=False)
    for n in range(min(_HOUR, n_transactions)):
        writer.commit([], {slot: at + 3 + n}, lsn_column)


def _size(root: Path) -> dict[str, int]:
    """Files and megabytes of the change log's rows and transactions, and of all else."""
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for path in root.rglob("*"):
        if path.is_file():
            of_log = path.suffix == ".parquet" and "_delta_log" not in path.parts
            sizes[of_log and path.relative_to(root).parts[0] in _LOGS].append(path.stat().st_size)
    rows, rest = sizes[True], sizes[False]
    return {
        "log_files": len(rows),
        "log_mb": round(sum(rows) / 1e6),
        "files": len(rest),
        "mb": round(sum(rest) / 1e6),
    }


# -- the store --------------------------------------------------------------------------------------------

_S3_COMMITS: Final = 200
_DAY_S: Final = 86_400
_NEVER_READ_BYTES: Final = 4 << 20
"""Merges read no larger files, and commits read none."""
_USD: Final = {"PUT": 5e-6, "POST": 5e-6, "LIST": 5e-6, "GET": 0.4e-6, "HEAD": 0.4e-6, "DELETE": 0.0}
"""What S3 asks for a request, by its list of prices (Standard, us-east-1, November 2026)."""


def _requests(root: Path) -> dict[str, Any]:
    """What commits of one row to both tables ask of an S3 store that has them, with their checkpoints, merges and
    upkeep: by kind for a day at a commit a second."""
    with counted_s3() as s3:
        store = boto3.client("s3", endpoint_url=s3.options["AWS_ENDPOINT_URL"], region_name="us-east-1")
        bucket = s3.uri.removeprefix("s3://")
        for path in (path for name in _LOGS for path in (root / name).rglob("*") if path.is_file()):
            if path.stat().st_size > _NEVER_READ_BYTES and "_delta_log" not in path.parts:
                continue
            store.upload_file(str(path), bucket, f"tables/{path.relative_to(root)}")
        tables = Location.parse(f"{s3.uri}/tables", s3.options)
        keeping = Upkeep(DEFAULT_RETENTION)
        writers = [
            (name, column, DeltaTableWriter.open(tables.child(name), name)) for name, column in _COLUMNS
        ]
        (slot,) = application_ids(tables.child(locations.TRANSACTIONS))
        for _, _, writer in writers:
            assert writer is not None
            writer.upkeep = keeping
        for n in range(_S3_COMMITS + _S3_COMMITS // 2):
            if n == _S3_COMMITS // 2:
                s3.asked()
            for name, column, writer in writers:
                assert writer is not None
                lsn = writer.watermark(slot) + 1
                told = transactions(lsn, 1, 1)
                schema = pa.schema([each.field for each in writer.columns])
                row = told if name == locations.TRANSACTIONS else _rows(lsn, 1, schema, told)
                files = ParquetFiles(tables.child(name), f"data-{lsn:032x}", schema, column, writer.ranged)
                files.write(row)
                writer.commit(files.close(), {slot: lsn}, column)
        keeping.close()
        asked = Counter(_kind(request.what) for request in s3.asked())
    by_day = {kind: round(n * _DAY_S / _S3_COMMITS) for kind, n in sorted(asked.items())}
    usd = sum(_USD[kind] * n for kind, n in by_day.items())
    return {"requests_a_day": by_day, "usd_a_day": round(usd, 2)}


def _kind(what: str) -> str:
    """A GET of a bucket is a listing."""
    method, path = what.split(" ")
    return "LIST" if method == "GET" and path.strip("/").count("/") == 0 else method


# -- one age ----------------------------------------------------------------------------------------------


def measure(source: Source, folder: Path, spark: Any, n_transactions: int, seconds: int) -> dict[str, Any]:
    (slot,) = source.slots(1)
    source.insert(_ROWS)
    with SlotRun(source, slot, folder) as run:
        source.execute("update t set k = 0 where id = 1")
        run.await_(lambda: (run.root / locations.TRANSACTIONS).exists() and run.n_transactions() > 0)
        run.await_(lambda: _is_copied(run.root, spark))
    begin = int(source.end_lsn())
    for _ in range(_SWITCHES):
        source.execute("select pg_logical_emit_message(true, 'aged', 'a')")
        source.execute("select pg_switch_wal()")
    started_s = time.monotonic()
    for name, lsn_column in _COLUMNS:
        _age(Location.parse(str(run.root)), name, lsn_column, n_transactions, begin)
    found: dict[str, Any] = {"made_s": round(time.monotonic() - started_s)}
    with SlotRun(source, slot, folder) as run:
        found["start_s"] = round(run.start_s, 1)
        _trickle(source, 5)
        run.await_(lambda: LogFrames(str(run.root)).readable_lsn > begin + n_transactions * _WAL)
        mirror = Mirror(str(run.root))
        found["first_base_s"] = round(_timed(lambda: mirror.refresh(spark)), 1)
        n_before, cpu_before_s = run.n_transactions(), run.sink_cpu_s()
        batches: dict[int, dict[str, Any]] = {}
        for done in range(0, seconds, _ASKED_EVERY):
            _trickle(source, min(_ASKED_EVERY, seconds - done))
            batches.update((each["number"], each) for each in run.account()["sink"]["batches"])
        cpu_s, n_told = run.sink_cpu_s() - cpu_before_s, run.n_transactions()
        found["load"] = os.getloadavg()[0]
        found["cpu_ms"] = round(1000 * cpu_s / (n_told - n_before), 1)
        for name, key, scale in (("commit_ms", "seconds", 1000), ("lag_ms", "lag_ms", 1)):
            values = [scale * batch[key] for batch in batches.values() if batch[key] is not None]
            found[name] = [round(median(values)), round(percentile(values, 99))]
        found["pss_mb"] = run.pss_mb()
        refreshes, states = [], []
        for _ in range(5):
            _trickle(source, 2)
            refreshes.append(1000 * _timed(lambda: mirror.refresh(spark)))
            states.append(1000 * _timed(lambda: LogFrames(str(run.root)).as_of(spark).table(_TABLE).count()))
        found["refresh_ms"], found["as_of_ms"] = round(median(refreshes)), round(median(states))
    return {**found, **_size(run.root), **_requests(run.root)}


def _is_copied(root: Path, spark: Any) -> bool:
    try:
        LogFrames(str(root)).as_of(spark).table(_TABLE)
    except XidstreamError:
        return False
    return True


def _trickle(source: Source, seconds: int) -> None:
    for n in range(seconds):
        source.execute("update t set k = k + 1 where id = %s", 1 + n % _ROWS)
        time.sleep(1)


def _timed(act: Any) -> float:
    started_s = time.monotonic()
    act()
    return time.monotonic() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aged_run", description=__doc__)
    parser.add_argument("--ages", nargs="+", default=list(AGES), choices=list(AGES))
    parser.add_argument(
        "--seconds", type=int, default=120, help="how long each run gets a transaction a second"
    )
    arguments = parser.parse_args()
    with server() as publisher, tempfile.TemporaryDirectory(prefix="xs-bench-") as name:
        spark = local_session(Path(name) / "spark")
        for n, age in enumerate(arguments.ages):
            folder = Path(name) / str(n)
            folder.mkdir()
            source = Source(publisher, f"aged{n}")
            print(age, json.dumps(measure(source, folder, spark, AGES[age], arguments.seconds)), flush=True)
            source.close()
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
