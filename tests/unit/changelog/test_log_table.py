"""The files of a log's table: which are chosen by their commit LSNs, and how they are read where Spark cannot."""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from xidstream.pipeline.changelog.log_table import DeltaLogTable, reading
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.spark.parquet_frames import StoredFiles


def append(path: Path, **columns: list[object]) -> None:
    write_deltalake(str(path), pa.table(columns), mode="append", schema_mode="merge")


def test_files_whose_commits_are_out_of_range_are_left_out(tmp_path: Path) -> None:
    for lsn in (100, 200, 300):
        append(tmp_path, _commit_lsn=[lsn, lsn + 50], id=[1, 2])
    table = DeltaLogTable(Location.parse(str(tmp_path)))

    def chosen(first: int, last: int) -> list[int]:
        return sorted(file.min_lsn for file in table.files(first, last))

    assert chosen(0, 1000) == [100, 200, 300]
    assert chosen(151, 199) == []
    assert chosen(150, 200) == [100, 200]
    assert chosen(251, 299) == []
    assert len(table.files(column="nothing")) == 3, "without statistics any row may be in a file"


def test_a_file_from_before_a_column_was_added_is_read_with_nulls(tmp_path: Path) -> None:
    append(tmp_path, _commit_lsn=[100], id=[1])
    append(tmp_path, _commit_lsn=[200], id=[2], day=[datetime.date(1500, 3, 1)])
    table = DeltaLogTable(Location.parse(str(tmp_path)))
    paths = tuple(file.path for file in sorted(table.files(), key=lambda file: file.min_lsn))
    read = pickle.loads(pickle.dumps(StoredFiles(paths, table.schema, table.location)))
    numbers = pa.RecordBatch.from_arrays([pa.array([0, 1])], ["id"])
    rows = pa.Table.from_batches(read([numbers])).to_pylist()
    assert rows == [
        {"_commit_lsn": 100, "id": 1, "day": None},
        {"_commit_lsn": 200, "id": 2, "day": datetime.date(1500, 3, 1)},
    ]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    message = r"Delta table public\.t cannot be read: PermissionError"
    with pytest.raises(StorageFault, match=message), reading("Delta table public.t"):
        raise PermissionError("refused")


def test_a_program_that_ends_right_after_a_read_is_not_aborted(tmp_path: Path) -> None:
    for lsn in range(8):
        append(tmp_path, _commit_lsn=[lsn] * 1000, id=list(range(1000)))
    program = (
        "import sys\n"
        "from xidstream.pipeline.changelog.log_table import DeltaLogTable\n"
        "from xidstream.pipeline.log_tables.locations import Location\n"
        "table = DeltaLogTable(Location.parse(sys.argv[1]))\n"
        "assert table.read(['id']).num_rows == 8000\n"
        "assert table.count(3) == 1000\n"
    )
    for _ in range(12):  # it was one in four
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
