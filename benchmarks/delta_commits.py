"""``python -m benchmarks.delta_commits``: what a commit of ten rows to a Delta table takes, as the table's log grows.

Two tables in turn, a thousand commits each: one that the sink's writer writes, and one that it writes without what it
does for this, looking for expired files of the log after every commit and merging no small files. A row is a mark,
and has the median of the thousand commits before it, in milliseconds, with the write of the Parquet file; the longest
one in a hundred; the files of the table; and how long deltalake takes to open the table and read it.
"""

from __future__ import annotations

import argparse
import json
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
from xidstream.pipeline.delta import delta_table, small_files
from xidstream.pipeline.delta.columns import DeltaColumn
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.locations import Location
from xidstream.pipeline.delta.parquet_files import ParquetFiles

_COLUMNS = [
    DeltaColumn("id", pa.int64(), "id"),
    DeltaColumn("note", pa.string(), "note"),
    DeltaColumn("_commit_lsn", pa.int64(), "_commit_lsn"),
]
_SCHEMA = pa.schema([column.field for column in _COLUMNS])
_ROWS = 10


def _commit(writer: DeltaTableWriter, location: Location, lsn: int) -> float:
    started_s = time.monotonic()
    rows = [list(range(_ROWS)), [f"note {lsn}"] * _ROWS, [lsn] * _ROWS]
    arrays = [pa.array(values, field.type) for values, field in zip(rows, _SCHEMA, strict=True)]
    files = ParquetFiles(location, f"data-{lsn:08d}", _SCHEMA, "_commit_lsn")
    files.write(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
    writer.commit(files.close(), {"slot": lsn})
    return time.monotonic() - started_s


def _mark(location: Location, seconds: list[float]) -> dict[str, Any]:
    started_s = time.monotonic()
    table = DeltaTable(location.uri)
    n_rows = table.to_pyarrow_table().num_rows
    return {
        "median_ms": round(statistics.median(seconds) * 1000, 1),
        "p99_ms": round(percentile(seconds, 99) * 1000, 1),
        "files": len(table.file_uris()),
        "rows": n_rows,
        "read_s": round(time.monotonic() - started_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_commits", description=__doc__)
    parser.add_argument("--marks", type=int, default=6, help="thousands of commits to each table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
        locations = {name: Location.parse(str(Path(folder) / name)) for name in ("ours", "plain")}
        writers = {
            name: DeltaTableWriter.open_or_create(location, name, _COLUMNS)
            for name, location in locations.items()
        }
        for thousand in range(arguments.marks):
            for name, writer in writers.items():
                with ExitStack() as stack:
                    if name == "plain":
                        stack.enter_context(patch.object(small_files, "SIZE_CLASSES", ()))
                        stack.enter_context(patch.object(delta_table, "_KEEP_EXPIRED_LOGS", None))
                    lsns = range(thousand * 1000 + 1, thousand * 1000 + 1001)
                    seconds = [_commit(writer, locations[name], lsn) for lsn in lsns]
                print(name, (thousand + 1) * 1000, json.dumps(_mark(locations[name], seconds)), flush=True)


if __name__ == "__main__":
    main()
