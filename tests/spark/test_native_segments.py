"""Segments in Spark's own Parquet reader: the rows that pyarrow gives of them, and an error where a file is damaged."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.support import (
    COMMIT_US,
    FLOAT4,
    FLOAT8,
    INT4,
    INT8,
    TEXT,
    LocalSegments,
    Transaction,
    batch_of,
    expected_rows,
    memory_frame,
    put_memory,
    read_memory,
    record_batch,
    relation,
)
from tests.unit.parquet.files import NAMES, batches, every_type
from xidstream.pipeline.errors import ComponentLost, SegmentCorrupt, SinkFailed, StorageFault
from xidstream.pipeline.exchange import Sealed, SegmentPart
from xidstream.pipeline.parquet import CommitStamp, fill
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.native_segments import MOST_FRAMES
from xidstream.pipeline.spark.spark_schemas import simple_types, spark_schema

pytestmark = pytest.mark.spark

ITEMS = relation("public.items", ("id", INT8), ("name", TEXT))
COMMIT = CommitStamp(Lsn(100), COMMIT_US)


def items(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"item {i}"} for i in ids]


def part_of(segments: LocalSegments, table: RelationVersion, *sizes: int) -> SegmentPart:
    return SegmentPart(segments.write("100/0.parquet", table, batches(table, *sizes)), COMMIT)


def batch_with(spark: Any, segments: LocalSegments, *parts: SegmentPart, native: bool = True) -> SinkBatch:
    n_rows = sum(part.n_rows for part in parts)
    unit = Sealed(record_batch([], TRANSACTIONS_SCHEMA), (), parts, (), n_rows, 0)
    storage = segments.storage if native else None
    batch = batch_of([unit], segments)
    return SinkBatch(batch, lambda: spark, memory_frame, segments, read_memory, put_memory, storage)


def is_native(frame: Any) -> bool:
    plan = frame._jdf.queryExecution().toString()
    assert ("FileScan parquet" in plan) != ("MapInArrow" in plan)
    return "FileScan parquet" in plan


def rows_of(frame: Any, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(frame.orderBy("_commit_lsn", "_seq")._collect_as_arrow()).cast(schema)


NAMED = relation("public.odd", *[(name, 1009 if i % 2 else TEXT) for i, name in enumerate(NAMES)])
WIDE = relation("public.wide", *[(f"c{i}", (INT8, TEXT, 1114, 1007)[i % 4]) for i in range(250)])


@pytest.mark.parametrize("table", [every_type(), NAMED, WIDE], ids=["types", "names", "wide"])
@pytest.mark.parametrize("filled", [False, True])
def test_rows_are_those_that_pyarrow_reads(
    spark: Any, segments: LocalSegments, table: RelationVersion, filled: bool
) -> None:
    part = part_of(segments, table, 90, 10)
    if filled:
        path = segments.storage.local_path(part.segment.key)
        fill(str(path), part.segment.file, COMMIT, name="s")
    native, by_pyarrow = (
        batch_with(spark, segments, part, native=native).dataframe(table.name) for native in (True, False)
    )
    assert is_native(native) and not is_native(by_pyarrow)
    schema = contract_schema(table)
    assert (
        simple_types(native.schema) == simple_types(spark_schema(schema)) == simple_types(by_pyarrow.schema)
    )
    found = rows_of(native, schema)
    assert found.num_rows == 100 and found.equals(rows_of(by_pyarrow, schema))
    assert found.equals(pa.Table.from_batches(segments(part), schema))


def test_a_folder_whose_name_is_a_pattern_or_a_partition_is_a_folder(spark: Any, tmp_path: Path) -> None:
    segments = LocalSegments(str(tmp_path / "a[1] id=7" / "{b,c}*?%20é;,"))
    frame = batch_with(spark, segments, part_of(segments, ITEMS, 20)).dataframe("public.items")
    assert is_native(frame) and frame.count() == 20
    assert simple_types(frame.schema) == simple_types(spark_schema(contract_schema(ITEMS)))


def test_transactions_layouts_and_memory_are_one_frame(make_batch: Any) -> None:
    wider = relation("public.items", ("id", INT8), ("name", TEXT), ("n", INT4), relid=2)
    other = [{"id": 5, "name": "five", "n": 5}, {"id": 6, "name": "six", "n": None}]
    transactions = [
        Transaction(100, [(ITEMS, items(1, 2))], spilled=True),
        Transaction(110, [(ITEMS, items(3, 4))]),
        Transaction(120, [(wider, other), (ITEMS, items(7))], spilled=True),
    ]
    frame = make_batch(*transactions).dataframe("public.items")
    found = [(r._commit_lsn, r._seq, r._change_type, r.id, r.name, r.n) for r in frame.collect()]
    wanted = expected_rows(transactions, "public.items")
    assert sorted(found) == [(lsn, s, c, r["id"], r["name"], r.get("n")) for lsn, s, c, r in wanted]
    times = {r._commit_lsn: r._commit_timestamp.timestamp() for r in frame.collect()}
    assert times == {lsn: (COMMIT_US + lsn) / 1e6 for lsn in (100, 110, 120)}


@pytest.mark.parametrize("oid", [FLOAT4, FLOAT8])
def test_a_filter_finds_nan_as_the_greatest_number(make_batch: Any, oid: int) -> None:
    """Arrow leaves NaN out of a row group's maximum, so a reader that believes the maximum skips it."""
    measured = relation("public.measured", ("id", INT8), ("f", oid))
    found = [1.0, 2.0, math.nan, 0.5]
    rows = [{"id": i, "f": value} for i, value in enumerate(found)]
    frame = make_batch(Transaction(100, [(measured, rows)], spilled=True)).dataframe("public.measured")
    assert is_native(frame)
    for condition, ids in {
        "f > 5": [2],
        "f >= 2": [1, 2],
        "f = double('NaN')": [2],
        "not (f <= 5)": [2],
        "f = 0.5": [3],
    }.items():
        assert sorted(r.id for r in frame.filter(condition).collect()) == ids, condition


def test_a_filter_on_a_constant_and_on_a_column_finds_the_rows(make_batch: Any) -> None:
    batch = make_batch(
        Transaction(100, [(ITEMS, items(*range(50)))], spilled=True),
        Transaction(110, [(ITEMS, items(*range(30)))], spilled=True),
    )
    frame = batch.dataframe("public.items")
    assert frame.where("_commit_lsn = 110").count() == 30
    assert frame.where("_commit_lsn > 100 and id >= 28 and name like 'item%'").count() == 2
    assert frame.where("_xid = 100").count() == 50


def test_many_small_transactions_are_read_by_pyarrow(make_batch: Any) -> None:
    transactions = [Transaction(100 + i, [(ITEMS, items(i))], spilled=True) for i in range(MOST_FRAMES + 1)]
    frame = make_batch(*transactions).dataframe("public.items")
    assert not is_native(frame)
    assert sorted(r.id for r in frame.collect()) == list(range(MOST_FRAMES + 1))
    assert is_native(make_batch(*transactions[1:]).dataframe("public.items"))


# -- damage ------------------------------------------------------------------------------------------------


def act(batch: SinkBatch, what: str = "collect") -> None:
    ForeachSink(lambda b: getattr(b.dataframe("public.items"), what)()).write(batch)


def test_a_flipped_bit_in_any_page_is_corrupt(spark: Any, segments: LocalSegments) -> None:
    import pyarrow.parquet as pq

    part = part_of(segments, ITEMS, 60)
    path = Path(str(segments.storage.local_path(part.segment.key)))
    content = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns - 2)):
        start = column.dictionary_page_offset or column.data_page_offset
        damaged = bytearray(content)
        damaged[start + column.total_compressed_size - 1] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(SegmentCorrupt, match=r"100/0\.parquet"):
            act(batch_with(spark, segments, part))


def test_a_flipped_bit_in_the_footer_is_corrupt_before_a_row_is_read(
    spark: Any, segments: LocalSegments
) -> None:
    # Statistics of another value would have filters skip rows, and nothing else would tell.
    part = part_of(segments, ITEMS, 60)
    path = Path(str(segments.storage.local_path(part.segment.key)))
    content = path.read_bytes()
    for position in range(len(content) - 400, len(content), 50):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(SegmentCorrupt, match=r"100/0\.parquet.*checksum"):
            act(batch_with(spark, segments, part), "count")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_segment_that_is_gone_is_corrupt_whatever_the_session_ignores(
    spark: Any, segments: LocalSegments, when: str
) -> None:
    part = part_of(segments, ITEMS, 60)
    path = Path(str(segments.storage.local_path(part.segment.key)))
    batch = batch_with(spark, segments, part)
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        if when == "after":
            batch.dataframe("public.items")
        path.unlink()
        with pytest.raises(SegmentCorrupt, match=r"100/0\.parquet"):
            act(batch)
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")


def test_a_damaged_file_of_the_users_own_is_the_functions_failure(
    spark: Any, segments: LocalSegments, tmp_path: Path
) -> None:
    (tmp_path / "own.parquet").write_bytes(b"PAR1 is not all that it takes PAR1")
    batch = batch_with(spark, segments, part_of(segments, ITEMS, 60))
    with pytest.raises(SinkFailed) as caught:
        ForeachSink(lambda b: b.spark.read.parquet(str(tmp_path / "own.parquet")).collect()).write(batch)
    assert not isinstance(caught.value, (StorageFault, ComponentLost))


def test_a_record_of_other_rows_is_not_believed(spark: Any, segments: LocalSegments) -> None:
    part = part_of(segments, ITEMS, 60)
    file = dataclasses.replace(part.segment.file, checksum="crc32:00000000")
    wrong = dataclasses.replace(part, segment=dataclasses.replace(part.segment, file=file))
    with pytest.raises(SegmentCorrupt):
        act(batch_with(spark, segments, wrong), "count")
