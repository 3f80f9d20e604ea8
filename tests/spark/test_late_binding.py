"""Files that were filled in after they were written, in Spark's own Parquet reader: values, filters, sums of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.parquet.files import COMMIT, batches, every_type, relation, released, write
from xidstream.pipeline.parquet import CommitStamp, fill
from xidstream.pipeline.parquet.row_file import encoded_crc
from xidstream.pipeline.spark.spark_schemas import spark_schema

pytestmark = pytest.mark.spark

VERIFY = "parquet.page.verify-checksum.enabled"
SIMPLE = relation(("id", 20), ("note", 25))


def read(spark: Any, path: Path, schema: pa.Schema) -> Any:
    return spark.read.schema(spark_schema(schema)).option(VERIFY, "true").parquet(str(path))


def test_a_filled_file_of_every_type_is_right_in_spark(spark: Any, tmp_path: Path) -> None:
    # Dates reach back to the year 1, which Spark refuses in files that do not say who wrote them.
    table = every_type()
    made = batches(table, 60, 3)
    wanted = released(table, made)
    path = tmp_path / "rows.parquet"
    file = write(path, table, made, row_group_bytes=20_000)
    assert len(file.page_offsets) > 1
    fill(path, file, COMMIT, name="s")
    frame = read(spark, path, wanted.schema)
    filtered = frame.where(f"_commit_lsn = {COMMIT.commit_lsn}").orderBy("_seq")
    found = pa.Table.from_batches(filtered._collect_as_arrow()).cast(wanted.schema)
    assert found.equals(wanted)


def test_the_sum_of_a_filled_page_is_verified_by_spark(spark: Any, tmp_path: Path) -> None:
    made = batches(SIMPLE, 40)
    path = tmp_path / "rows.parquet"
    file = write(path, SIMPLE, made)
    # A checksum that is short by itself is written longer than it need be: Java reads it, too.
    short = next(n for n in range(1 << 30, 1 << 31) if encoded_crc(n.to_bytes(8, "little"))[3:] == b"\x80\0")
    fill(path, file, CommitStamp(short, 5), name="s")
    frame = read(spark, path, released(SIMPLE, made).schema)
    assert [tuple(row) for row in frame.selectExpr("_commit_lsn").distinct().collect()] == [(short,)]
    content = bytearray(path.read_bytes())
    content[file.page_offsets[0][0].value] ^= 1
    path.with_name("damaged.parquet").write_bytes(bytes(content))
    with pytest.raises(Exception, match=r"(?i)crc"):
        read(spark, path.with_name("damaged.parquet"), released(SIMPLE, made).schema).collect()


def test_a_flipped_bit_in_any_column_is_found_by_spark(spark: Any, tmp_path: Path) -> None:
    made = batches(SIMPLE, 40)
    path = tmp_path / "rows.parquet"
    file = write(path, SIMPLE, made)
    fill(path, file, COMMIT, name="s")
    content = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    for i in range(group.num_columns):
        column = group.column(i)
        start = column.dictionary_page_offset or column.data_page_offset
        damaged = bytearray(content)
        damaged[start + column.total_compressed_size - 1] ^= 1
        other = tmp_path / f"damaged-{i}.parquet"
        other.write_bytes(bytes(damaged))
        with pytest.raises(Exception, match=r"(?i)crc"):
            read(spark, other, released(SIMPLE, made).schema).collect()
