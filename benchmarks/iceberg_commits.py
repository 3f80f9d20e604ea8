"""What a commit of an Iceberg table takes as the table grows, beside one of a Delta table: CPU, and the disk.

    python -m benchmarks.iceberg_commits [--commits 1000] [--every 100] [--catalog NAME/namespace]

A table of each format, of one writer, with the same ten rows a commit and the sink's own upkeep. They get ``every``
commits in turn, so both have the machine as it is. CPU is the process's, upkeep included. The Parquet file of each
commit is written beforehand, so it is the commit alone. The Iceberg upkeep removes at once here. In the Delta table a
commit counts for a second: those more than an hour of them old get an old time (``benchmarks.delta_commits``). Without
``--catalog`` the Iceberg catalog is SQLite in a temporary folder. It prints a table for docs/iceberg.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from benchmarks.delta_commits import AGED_EVERY, age, log_every_time
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables.columns import map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import LogTableWriter
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION

_SLOT: Final = "1/bench/bench"
_RELATION: Final = RelationVersion(
    16384,
    "public",
    "t",
    ReplicaIdentity.DEFAULT,
    tuple(Column(f"c{i}", 20 if i % 2 else 25, -1, i == 0) for i in range(10)),
)
_ROWS: Final = 10


class _Measured(NamedTuple):
    """One of the two tables."""

    table: LogTableWriter
    folder: Path
    """With the table's metadata."""
    newest: str
    """Pattern of the file that says what the table is now."""


def _files(location: Location, schema: pa.Schema, lsns: range) -> list[WrittenFile]:
    """One file for each commit."""
    found = []
    for lsn in lsns:
        rows = [
            {"c0": f"row {i}", "_change_type": "insert", "_commit_lsn": lsn, "_seq": i} for i in range(_ROWS)
        ]
        files = ParquetFiles(location, f"data-{lsn:06d}", schema, "_commit_lsn")
        files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
        found += files.close()
    return found


def _commits(measured: _Measured, lsns: range) -> str:
    """Make the commits. Return the cells of a line."""
    table, walls = measured.table, []
    files = _files(table.location, pa.schema([column.field for column in table.columns]), lsns)
    cpu_s = time.process_time()
    for lsn, file in zip(lsns, files, strict=True):
        began_s = time.perf_counter()
        table.commit([file], {_SLOT: lsn}, marks={f"{_SLOT}/owner": 1, f"{_SLOT}/timeline": 1})
        walls.append((time.perf_counter() - began_s) * 1000)
        if isinstance(table, DeltaTableWriter) and lsn % AGED_EVERY == 0:
            age(table.location, table.version)
    cpu_ms = (time.process_time() - cpu_s) * 1000 / len(lsns)
    newest = max(measured.folder.glob(measured.newest), key=os.path.getmtime)
    wall = f"{statistics.median(walls):.0f}; {sorted(walls)[int(len(walls) * 0.99)]:.0f}"
    n_files = sum(1 for _ in measured.folder.iterdir())
    return f"{cpu_ms:.1f} | {wall} | {n_files} | {newest.stat().st_size / 1024:.0f}"


def measure(address: IcebergAddress, delta: Path, n_commits: int, every: int) -> None:
    """Make the commits, and print a line for each ``every`` of them.

    Args:
        delta: Folder of the Delta table.
    """
    upkeep = IcebergUpkeep(delay_s=0.0)
    tables = IcebergTables(address, makes=True, upkeep=upkeep)
    columns = map_columns((), contract_schema(_RELATION), tables.rules).columns
    iceberg = tables.open_or_create("public__t", "public.t", columns, tables.about(_RELATION))
    log_every_time()
    with ExitStack() as closing:
        closing.callback(tables.close)
        delta_upkeep = Upkeep(DEFAULT_RETENTION)
        closing.callback(delta_upkeep.close)
        columns = map_columns((), contract_schema(_RELATION)).columns
        about = TableMetadata("", {}, {}, DEFAULT_RETENTION)
        writer = DeltaTableWriter.open_or_create(Location.parse(str(delta)), "public.t", columns, about)
        writer.upkeep = delta_upkeep
        measured = (
            _Measured(iceberg, Path(iceberg.location.uri) / "metadata", "*.metadata.json"),
            _Measured(writer, delta / "_delta_log", "*.checkpoint.parquet"),
        )
        each = "CPU ms a commit | wall ms, median; 99 % | files of metadata | KB"
        print(f"| the commits up to | Iceberg: {each} of the metadata | Delta: {each} of the checkpoint |")
        print("| --- |" + " --- |" * 8)
        for first in range(1, n_commits + 1, every):
            lsns = range(first, first + every)
            print(f"| {lsns[-1]:,} | {' | '.join(_commits(one, lsns) for one in measured)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--catalog", help="as behind --sink iceberg:")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = IcebergAddress.parse(given.catalog or f"{folder}/lake/bench")
        measure(address, Path(folder) / "delta", given.commits, given.every)


if __name__ == "__main__":
    main()
