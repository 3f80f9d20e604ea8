"""Files of an attempt: bounded, reported, filtered by the watermark; and the grouping of parts into tasks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from xidstream.pipeline.spark import parquet_files
from xidstream.pipeline.spark.batch_parts import PARTITION_BYTES, group_by_bytes
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.spark.parquet_files import ParquetFiles, WriteTarget

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


NESTED = pa.schema(
    [("_commit_lsn", pa.int64()), ("_seq", pa.int64()), ("l", pa.list_(pa.int32())), ("s", pa.string())]
)


def nested(start: int, n: int, values: dict[int, list[int]]) -> pa.RecordBatch:
    numbers = pa.array(range(start, start + n), pa.int64())
    lists = pa.array([values.get(i) for i in range(start, start + n)], NESTED.field("l").type)
    return pa.RecordBatch.from_arrays([numbers, numbers, lists, pa.nulls(n, pa.string())], schema=NESTED)


def test_a_file_has_no_list_or_map_without_a_value_and_no_value_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 100)
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", NESTED, "_commit_lsn")
    values = {250: [1, 2], 299: []}
    for i in range(5):
        files.write(nested(100 * i, 100, values))
    reports = files.close()
    names = [pq.read_schema(tmp_path / report.path).names for report in reports]
    assert names == [["_commit_lsn", "_seq", "s"], NESTED.names], "only lists and maps are left out"
    assert [(r.n_rows, r.min_commit_lsn, r.max_commit_lsn) for r in reports] == [
        (200, 0, 199),
        (300, 200, 499),
    ]
    read = ds.dataset([str(tmp_path / r.path) for r in reports], schema=NESTED).to_table()
    assert read["_seq"].to_pylist() == list(range(500))
    assert {i: v for i, v in enumerate(read["l"].to_pylist()) if v is not None} == values


def test_a_column_that_one_file_left_out_is_in_the_next_one_from_its_first_value_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(parquet_files, "FILE_BYTES", 1)
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", NESTED, "_commit_lsn")
    for i in range(3):
        files.write(nested(100 * i, 100, {150: [7]}))
    lacking = ["l" not in pq.read_schema(tmp_path / report.path).names for report in files.close()]
    assert lacking == [True, False, True]


def test_numbers_that_count_take_next_to_nothing_in_a_file(tmp_path: Path) -> None:
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", NESTED, "_commit_lsn")
    files.write(nested(1 << 40, 50_000, {}))
    (report,) = files.close()
    group = pq.read_metadata(tmp_path / report.path).row_group(0)
    seq = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "_seq")
    assert "DELTA_BINARY_PACKED" in seq.encodings and seq.total_compressed_size < 5_000


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    files = ParquetFiles(Location.parse(str(tmp_path)), "job-1", SCHEMA, "_commit_lsn")
    files.write(batch(1, 0))
    assert files.close() == []
    assert list(tmp_path.iterdir()) == []


def test_rows_at_or_below_the_watermark_are_dropped(tmp_path: Path) -> None:
    target = WriteTarget(Location.parse(str(tmp_path)), "job", 5)
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
