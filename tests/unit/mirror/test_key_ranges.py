"""Lowest and highest keys: from a Parquet file's footer into the Delta log, and back, never narrower."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from tests.unit.mirror.bases import delta_statistics
from xidstream.pipeline.mirror.key_ranges import OWN, RangedKey
from xidstream.pipeline.mirror.plan import KeyRange

EPOCH = datetime.datetime(1970, 1, 1)
PATH = f"{OWN}1/part.parquet"


def written(folder: Path, schema: pa.Schema, *rows: dict[str, Any]) -> str:
    path = folder / PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, row_group_size=2)
    return str(path)


@pytest.mark.parametrize(
    ("type_", "values", "low", "high"),
    [
        (pa.int64(), [5, -3, 9], -3, 9),
        (pa.int16(), [5, -3, 9], -3, 9),
        (pa.string(), ["b", "ä", "a"], "a", "ä"),
        (
            pa.date32(),
            [datetime.date(1969, 12, 31), datetime.date(2020, 1, 1), datetime.date(1970, 1, 1)],
            -1,
            18262,
        ),
    ],
)
def test_ranges_come_back_from_the_delta_log_as_the_footer_has_them(
    tmp_path: Path, type_: pa.DataType, values: list[Any], low: Any, high: Any
) -> None:
    schema = pa.schema([("id", type_), ("v", pa.string())])
    key = RangedKey.of(["id"], {"id": type_, "v": pa.string()})
    table = DeltaTable.create(str(tmp_path / "t"), schema=schema, configuration=key.properties)
    path = written(tmp_path / "t", schema, *[{"id": value, "v": "x"} for value in values])
    facts = key.facts_of(path)
    assert (facts.n_rows, facts.range) == (3, KeyRange((low,), (high,)))
    action = AddAction(PATH, os.path.getsize(path), {}, 0, True, delta_statistics(key, facts))
    table.create_write_transaction([action], "append", table.schema())
    table.update_incremental()
    assert key.ranges_in(pa.table(table.get_add_actions(flatten=True))) == [facts.range]
    found = table.to_pyarrow_table(filters=[("v", "=", "x"), ("id", ">=", min(values))])
    assert found.num_rows == 3, "an engine that skips by the statistics loses no row"


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_timestamps_range_is_rounded_outwards_to_milliseconds(tmp_path: Path, zone: str | None) -> None:
    type_ = pa.timestamp("us", zone)
    schema = pa.schema([("at", type_)])
    key = RangedKey.of(["at"], {"at": type_})
    table = DeltaTable.create(str(tmp_path / "t"), schema=schema, configuration=key.properties)
    times = [EPOCH + datetime.timedelta(microseconds=us) for us in (-1_500, 1_234_567)]
    path = written(tmp_path / "t", schema, *[{"at": time} for time in times])
    facts = key.facts_of(path)
    assert facts.range == KeyRange((-1_500,), (1_234_567,))
    action = AddAction(PATH, os.path.getsize(path), {}, 0, True, delta_statistics(key, facts))
    table.create_write_transaction([action], "append", table.schema())
    table.update_incremental()
    assert key.ranges_in(pa.table(table.get_add_actions(flatten=True))) == [KeyRange((-2_000,), (1_235_000,))]


def test_a_key_that_its_column_cannot_hold_leaves_the_file_without_a_range(tmp_path: Path) -> None:
    schema = pa.schema([("day", pa.date32())])
    key = RangedKey.of(["day"], {"day": pa.date32()})
    facts = key.facts_of(written(tmp_path, schema, {"day": datetime.date(2020, 1, 1)}, {"day": None}))
    assert facts.range is None
    assert json.loads(delta_statistics(key, facts)) == {"numRecords": 2}


def test_a_date_beyond_the_year_9999_leaves_the_file_without_a_range(tmp_path: Path) -> None:
    path = tmp_path / PATH
    path.parent.mkdir()
    pq.write_table(pa.table({"day": pa.array([0, 3_000_000], pa.int32()).cast(pa.date32())}), path)
    assert RangedKey.of(["day"], {"day": pa.date32()}).facts_of(str(path)).range is None


def test_columns_whose_names_or_types_have_no_statistics_are_left_out_of_the_ranges() -> None:
    types = {
        "id": pa.int64(),
        "ä": pa.int64(),
        "a b": pa.int64(),
        "n": pa.decimal128(10, 2),
        "f": pa.float64(),
    }
    assert RangedKey.of(list(types), types).columns == ("id",)
    assert RangedKey.of(None, types).columns == ()
    assert RangedKey.of(["n"], types).properties == {"delta.dataSkippingStatsColumns": ""}


@pytest.mark.parametrize(
    ("before", "value", "now"),
    [
        (pa.string(), "abc", pa.date32()),
        (pa.string(), "abc", pa.timestamp("us")),
        (pa.int64(), 1 << 40, pa.date32()),
    ],
)
def test_a_key_that_had_another_type_before_has_no_ranges(
    tmp_path: Path, before: pa.DataType, value: Any, now: pa.DataType
) -> None:
    """The mirror of the whole slot failed at each refresh after a new snapshot."""
    schema = pa.schema([("id", before)])
    key = RangedKey.of(["id"], {"id": before})
    table = DeltaTable.create(str(tmp_path / "t"), schema=schema, configuration=key.properties)
    path = written(tmp_path / "t", schema, {"id": value})
    action = AddAction(PATH, os.path.getsize(path), {}, 0, True, delta_statistics(key, key.facts_of(path)))
    table.create_write_transaction([action], "append", table.schema())
    table.update_incremental()
    files = pa.table(table.get_add_actions(flatten=True))
    assert RangedKey.of(["id"], {"id": now}).ranges_in(files) == [None]


def test_what_another_tool_says_of_its_files_is_no_range(tmp_path: Path) -> None:
    """deltalake's compaction cuts the highest timestamp to milliseconds: the row that has it lies beyond."""
    type_ = pa.timestamp("us", "UTC")
    schema = pa.schema([("at", type_)])
    key = RangedKey.of(["at"], {"at": type_})
    table = DeltaTable.create(str(tmp_path), schema=schema, configuration=key.properties)
    for name in ("a", "b"):
        path = tmp_path / f"{OWN}{name}/part.parquet"
        path.parent.mkdir()
        pq.write_table(pa.table({"at": pa.array([123_456], type_)}, schema=schema), path)
        stats = delta_statistics(key, key.facts_of(str(path)))
        action = AddAction(f"{OWN}{name}/part.parquet", path.stat().st_size, {}, 0, True, stats)
        table.create_write_transaction([action], "append", table.schema())
        table.update_incremental()
    assert None not in key.ranges_in(pa.table(table.get_add_actions(flatten=True)))
    assert table.optimize.compact()["numFilesAdded"] == 1
    assert key.ranges_in(pa.table(table.get_add_actions(flatten=True))) == [None]
