"""Files of an attempt: bounded, reported, filtered by the watermark; and the grouping of parts into tasks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xidstream.pipeline.log_tables import parquet_files
from xidstream.pipeline.log_tables.batch_parts import PARTITION_BYTES, group_by_bytes
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WriteOutput

SCHEMA = pa.schema([("x", pa.int64()), ("_commit_lsn", pa.int64())])


def batch(start: int, n: int) -> pa.RecordBatch:
    values = pa.array(range(start, start + n), pa.int64())
    return pa.RecordBatch.from_arrays([values, values], schema=SCHEMA)


def test_files_and_row_groups_are_bounded_and_keep_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(parquet_files, "FILE_BYTES", 2000)
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", SCHEMA, "_commit_lsn")
    for i in range(50):
        files.write(batch(1 + i * 30, 30))
    reports = files.close()
    assert len(reports) > 2
    read = []
    for report in reports:
        path = tmp_path / report.path
        assert path.stat().st_size == report.size
        meta = pq.read_metadata(path)
        assert all(meta.row_group(i).num_rows <= 130 for i in range(meta.num_row_groups))
        values = pq.read_table(path)["x"].to_pylist()
        assert (len(values), values[0], values[-1]) == (
            report.n_rows,
            report.min_commit_lsn,
            report.max_commit_lsn,
        )
        read += values
    assert read == list(range(1, 1501))


def test_numbers_that_count_take_next_to_nothing_in_a_file(tmp_path: Path) -> None:
    schema = pa.schema([("_commit_lsn", pa.int64()), ("_seq", pa.int64())])
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", schema, "_commit_lsn")
    numbers = pa.array(range(1 << 40, (1 << 40) + 50_000), pa.int64())
    files.write(pa.RecordBatch.from_arrays([numbers, numbers], schema=schema))
    (report,) = files.close()
    group = pq.read_metadata(tmp_path / report.path).row_group(0)
    assert "DELTA_BINARY_PACKED" in group.column(1).encodings
    assert group.column(1).total_compressed_size < 5_000 < group.column(0).total_compressed_size
    assert pq.read_table(tmp_path / report.path)["_seq"].combine_chunks() == numbers


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", SCHEMA, "_commit_lsn")
    files.write(batch(1, 0))
    assert files.close() == []
    assert list(tmp_path.iterdir()) == []


def test_rows_at_or_below_the_watermark_are_dropped(tmp_path: Path) -> None:
    target = WriteOutput(Location.parse(str(tmp_path)), "job", 5)
    assert target.above(batch(3, 5)).column(0).to_pylist() == [6, 7]
    assert target.above(batch(6, 2)).num_rows == 2
    assert target.above(batch(1, 5)).num_rows == 0
    assert target.above(batch(1, 0)).num_rows == 0


def test_small_parts_share_a_task_and_large_ones_do_not() -> None:
    assert group_by_bytes([], 2) == []
    assert group_by_bytes([1] * 4, 1) == [(0, 1, 2, 3)]
    assert group_by_bytes([1] * 4, 2) == [(0, 1), (2, 3)]
    assert group_by_bytes([PARTITION_BYTES * 3, 1, 1], 1) == [(0,), (1, 2)]
    assert group_by_bytes([0, 0], 4) == [(0, 1)]
