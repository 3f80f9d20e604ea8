"""What a commit of an Iceberg table takes as the table grows: CPU, and what is left on the disk.

    python -m benchmarks.iceberg_commits [--commits 1000] [--every 100] [--catalog NAME/namespace]

One table of one writer, ten rows a commit, with the sink's own upkeep, which removes at once here. CPU is the
process's, upkeep included. The Parquet file of each commit is written beforehand, so it is the commit alone. Without
``--catalog`` it is SQLite in a temporary folder. It prints a table for docs/iceberg.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import pyarrow as pa

from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables.columns import map_columns
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import contract_schema

_SLOT: Final = "1/bench/bench"
_RELATION: Final = RelationVersion(
    16384,
    "public",
    "t",
    ReplicaIdentity.DEFAULT,
    tuple(Column(f"c{i}", 20 if i % 2 else 25, -1, i == 0) for i in range(10)),
)
_ROWS: Final = 10


def _files(table: IcebergTableWriter, n: int) -> list[WrittenFile]:
    schema = pa.schema([column.field for column in table.columns])
    found = []
    for lsn in range(1, n + 1):
        rows = [
            {"c0": f"row {i}", "_change_type": "insert", "_commit_lsn": lsn, "_seq": i} for i in range(_ROWS)
        ]
        files = ParquetFiles(table.location, f"data-{lsn:06d}", schema, "_commit_lsn")
        files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
        found += files.close()
    return found


def measure(address: IcebergAddress, n_commits: int, every: int) -> None:
    upkeep = IcebergUpkeep(delay_s=0.0)
    tables = IcebergTables(address, makes=True, upkeep=upkeep)
    columns = map_columns((), contract_schema(_RELATION), tables.rules).columns
    table = tables.open_or_create("public__t", "public.t", columns, tables.about(_RELATION))
    files = _files(table, n_commits)
    metadata = Path(table.location.uri) / "metadata"
    print(
        "| the commits up to | CPU ms a commit | wall ms, median; 99 % | files of metadata | the metadata's KB |"
    )
    print("| --- | --- | --- | --- | --- |")
    walls: list[float] = []
    cpu_s = time.process_time()
    for number, file in enumerate(files, 1):
        began_s = time.perf_counter()
        table.commit([file], {_SLOT: number}, marks={f"{_SLOT}/owner": 1, f"{_SLOT}/timeline": 1})
        walls.append((time.perf_counter() - began_s) * 1000)
        if number % every == 0:
            cpu_ms = (time.process_time() - cpu_s) * 1000 / every
            newest = max(metadata.glob("*.metadata.json"), key=os.path.getmtime)
            wall = f"{statistics.median(walls):.0f}; {sorted(walls)[int(len(walls) * 0.99)]:.0f}"
            n_kb = newest.stat().st_size / 1024
            print(
                f"| {number:,} | {cpu_ms:.0f} | {wall} | {len(list(metadata.iterdir()))} | {n_kb:.0f} |",
                flush=True,
            )
            walls, cpu_s = [], time.process_time()
    tables.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--catalog", help="as behind --sink iceberg:")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(IcebergAddress.parse(given.catalog or f"{folder}/lake/bench"), given.commits, given.every)


if __name__ == "__main__":
    main()
