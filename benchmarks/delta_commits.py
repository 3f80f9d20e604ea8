"""``python -m benchmarks.delta_commits``: what a commit of ten rows to a Delta table takes, as the table's log grows.

Two tables in turn, a thousand commits each. *Kept* is written as the sink does it, with its upkeep beside: the log has
an hour, and commits merge small files. *Plain* is written without what the sink does for this: it looks for expired
files of the log after every commit and merges nothing. A commit counts for a second: commits more than an hour of them
old get a time that is two hours ago, so that the upkeep finds them expired. Removed files keep their real time.

A row is a mark. It has the median of the thousand commits before it, in milliseconds, with the write of the Parquet
file; the longest one in a hundred; the files of the table and of its log; and how long deltalake takes to open the
table and read it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.results import percentile
from xidstream.pipeline.delta import delta_table, upkeep
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.log_tables import small_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION

_COLUMNS = [
    TableColumn("id", pa.int64(), "id"),
    TableColumn("note", pa.string(), "note"),
    TableColumn("_commit_lsn", pa.int64(), "_commit_lsn"),
]
_SCHEMA = pa.schema([column.field for column in _COLUMNS])
_ROWS = 10
_HOUR = 3_600
AGED_EVERY = 100
"""Commits from one call of ``age`` to the next."""
_NEVER = 10**9


def _commit(writer: DeltaTableWriter, location: Location, lsn: int) -> float:
    started_s = time.monotonic()
    rows = [list(range(_ROWS)), [f"note {lsn}"] * _ROWS, [lsn] * _ROWS]
    arrays = [pa.array(values, field.type) for values, field in zip(rows, _SCHEMA, strict=True)]
    files = ParquetFiles(location, f"data-{lsn:08d}", _SCHEMA, "_commit_lsn")
    files.write(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
    writer.commit(files.close(), {"slot": lsn})
    return time.monotonic() - started_s


def age(location: Location, version: int) -> None:
    """Make the commits that are more than ``_HOUR`` older than ``version`` two hours old."""
    old_s = time.time() - 2 * _HOUR
    for commit in (Path(location.uri) / "_delta_log").iterdir():
        if commit.name[:20].isdigit() and int(commit.name[:20]) < version - _HOUR:
            os.utime(commit, (old_s, old_s))


def log_every_time() -> None:
    """Let the upkeep look at a log's expired files whenever it is asked, in this process."""
    upkeep.PACES[upkeep.UpkeepStep.LOG] = upkeep.PACES[upkeep.UpkeepStep.LOG]._replace(seconds=0)


def _mark(location: Location, seconds: list[float]) -> dict[str, Any]:
    started_s = time.monotonic()
    table = DeltaTable(location.uri)
    n_rows = table.to_pyarrow_table().num_rows
    return {
        "median_ms": round(statistics.median(seconds) * 1000, 1),
        "p99_ms": round(percentile(seconds, 99) * 1000, 1),
        "files": len(table.file_uris()),
        "log": sum(1 for _ in (Path(location.uri) / "_delta_log").iterdir()),
        "rows": n_rows,
        "read_s": round(time.monotonic() - started_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_commits", description=__doc__)
    parser.add_argument("--marks", type=int, default=6, help="thousands of commits to the kept table")
    parser.add_argument("--plain-marks", type=int, default=6, help="and to the plain one, at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
        locations = {name: Location.parse(str(Path(folder) / name)) for name in ("kept", "plain")}
        about = TableMetadata("", {}, {}, DEFAULT_RETENTION)
        writers = {
            "kept": DeltaTableWriter.open_or_create(locations["kept"], "kept", _COLUMNS, about),
            "plain": DeltaTableWriter.open_or_create(locations["plain"], "plain", _COLUMNS),
        }
        keeping = writers["kept"].upkeep = Upkeep(DEFAULT_RETENTION)
        log_every_time()
        for thousand in range(arguments.marks):
            for name, writer in writers.items():
                if name == "plain" and thousand >= arguments.plain_marks:
                    continue
                with ExitStack() as stack:
                    if name == "plain":
                        stack.enter_context(patch.object(small_files, "SIZE_CLASSES", ()))
                        stack.enter_context(patch.object(delta_table, "fewest_to_come", lambda files: _NEVER))
                        stack.enter_context(patch.object(delta_table, "_COMMITS_ALONE", None))
                    seconds = []
                    for lsn in range(thousand * 1000 + 1, thousand * 1000 + 1001):
                        seconds.append(_commit(writer, locations[name], lsn))
                        if name == "kept" and lsn % AGED_EVERY == 0:
                            age(locations[name], writer.version)
                print(name, (thousand + 1) * 1000, json.dumps(_mark(locations[name], seconds)), flush=True)
        keeping.close()


if __name__ == "__main__":
    main()
