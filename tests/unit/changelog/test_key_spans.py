"""What a range of keys lets a reader leave out: never a row that is in it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql import types as t

from tests.unit.mirror.bases import delta_statistics
from xidstream.pipeline.changelog.key_spans import KeySpans
from xidstream.pipeline.changelog.log_table import DeltaLogTable
from xidstream.pipeline.changelog.shape import ColumnShape, TableShape
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.log_tables.file_rows import groups_with
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.key_ranges import OWN, RangedKey

SHAPE = TableShape(
    "public.t",
    {
        "id": ColumnShape(t.LongType(), ("id",)),
        "at": ColumnShape(t.TimestampType(), ("at",)),
        "x": ColumnShape(t.DoubleType(), ("x",)),
        "grown": ColumnShape(t.LongType(), ("grown~2", "grown")),
        "other": ColumnShape(t.LongType(), ("other",)),
    },
    ("id", "at"),
)
UTC = datetime.timezone.utc
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "x": pa.float64(),
        "other": pa.int32(),
        "grown": pa.int32(),
        "grown~2": pa.int64(),
    }
)


def spans(keys: dict[str, tuple[Any, Any]]) -> KeySpans:
    found = KeySpans.of(SHAPE, keys, SHAPE.columns)
    assert found is not None
    return found


@pytest.fixture
def footer(tmp_path: Path) -> pq.FileMetaData:
    """Four row groups: ids 0 to 9, 10 to 19, 20 to 29 and null, null alone."""
    ids = [*range(29), None, *[None] * 10]
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), tmp_path / "f.parquet", row_group_size=10)
    return pq.read_metadata(tmp_path / "f.parquet")


@pytest.mark.parametrize(
    ("bounds", "groups", "with_null"),
    [
        ((12, 13), [1, 2], [1, 2, 3]),  # Arrow leaves out none that has a null beside values
        ((None, 9), [0, 2], [0, 2, 3]),
        ((19, None), [1, 2], [1, 2, 3]),
        ((100, None), [2], [2, 3]),
    ],
)
def test_row_groups_without_a_key_of_the_range_are_left_out(
    footer: pq.FileMetaData, bounds: tuple[Any, Any], groups: list[int], with_null: list[int]
) -> None:
    for or_null, expected in ((False, groups), (True, with_null)):
        wanted = spans({"id": bounds}).wanted(SCHEMA, or_null=or_null)
        assert wanted is not None
        assert groups_with(wanted, footer, SCHEMA) == expected


def test_columns_whose_statistics_say_nothing_leave_nothing_out() -> None:
    # Floats have NaN; "grown" is in two columns; "other" has another type in the table.
    for name in ("x", "grown", "other"):
        assert spans({name: (1, 2)}).wanted(SCHEMA) is None
    assert KeySpans.of(SHAPE, {"id": (None, None)}, SHAPE.columns) is None
    assert spans({"id": (1.0, None)}).spans == spans({"id": (1, None)}).spans


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id": ("a", None)}, "no int64"),
        ({"id": (1 << 70, None)}, "no int64"),
        ({"id": (1.5, None)}, "no int64"),
        ({"id": (None, -1.5)}, "no int64"),
        ({"id": (datetime.datetime(2026, 1, 1), None)}, "no int64"),
        ({"id": 3}, "not a pair"),
        ({"id": (1, 2, 3)}, "not a pair"),
        ({"at": (datetime.datetime(2026, 1, 1), None)}, "a time zone"),
        ({"z": (1, 2)}, "keys names 'z'"),
    ],
)
def test_what_is_no_range_of_a_key_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KeySpans.of(SHAPE, keys, SHAPE.columns)


def test_files_of_a_base_table_are_left_out_by_what_its_mirror_wrote_of_them(tmp_path: Path) -> None:
    key = RangedKey.of(("id", "at"), {"id": pa.int64(), "at": pa.timestamp("us", "UTC")})
    schema = pa.schema([SCHEMA.field("id"), SCHEMA.field("at")])
    start = datetime.datetime(2026, 1, 1, microsecond=999, tzinfo=UTC)  # the log has milliseconds
    table = DeltaTable.create(str(tmp_path), schema, configuration=key.properties)
    actions = []
    for i, folder in enumerate([f"{OWN}a", f"{OWN}b", "part-of-another-tool"]):
        path = tmp_path / folder / "f.parquet"
        path.parent.mkdir()
        ids = range(i * 10, i * 10 + 10)
        at = [start + datetime.timedelta(days=n) for n in ids]
        pq.write_table(pa.table({"id": list(ids), "at": at}, schema), path)
        stats = delta_statistics(key, key.facts_of(path))
        actions.append(AddAction(f"{folder}/f.parquet", path.stat().st_size, {}, 0, True, stats))
    table.create_write_transaction(actions, "append", table.schema())
    opened = DeltaLogTable(Location.parse(str(tmp_path)))

    def left(keys: dict[str, tuple[Any, Any]]) -> list[str]:
        base = spans(keys).in_base(opened.schema)
        assert base is not None
        return sorted(file.path.partition("/")[0] for file in base.files_of_base(opened))

    other = "part-of-another-tool"
    assert left({"id": (3, 4)}) == [other, f"{OWN}a"]
    assert left({"id": (9, 10)}) == [other, f"{OWN}a", f"{OWN}b"]
    assert left({"id": (30, None)}) == [other]
    last = start + datetime.timedelta(days=9)
    assert left({"at": (last, last)}) == [other, f"{OWN}a"]
    assert left({"at": (last, None), "id": (None, 12)}) == [other, f"{OWN}a", f"{OWN}b"]
    assert spans({"other": (1, 2)}).in_base(opened.schema) is None


def test_a_date_that_python_has_not_in_a_file_of_another_tool_hides_no_file(tmp_path: Path) -> None:
    """deltalake's ``optimize`` writes such a range; a mirror writes none."""
    shape = TableShape("public.t", {"day": ColumnShape(t.DateType(), ("day",))}, ("day",))
    table = DeltaTable.create(str(tmp_path), pa.schema({"day": pa.date32()}))
    actions = []
    for path, greatest in ((f"{OWN}a/f.parquet", "2026-01-31"), ("part-a.parquet", "+10000-01-11")):
        stats = {"numRecords": 1, "minValues": {"day": "2026-01-01"}, "maxValues": {"day": greatest}}
        actions.append(AddAction(path, 1, {}, 0, True, json.dumps(stats)))
    table.create_write_transaction(actions, "append", table.schema())
    opened = DeltaLogTable(Location.parse(str(tmp_path)))
    for day, paths in ((15, ["part-a.parquet", f"{OWN}a/f.parquet"]), (32, ["part-a.parquet"])):
        asked = datetime.date(2025, 12, 31) + datetime.timedelta(days=day)
        found = KeySpans.of(shape, {"day": (asked, None)}, shape.key)
        assert found is not None
        assert sorted(file.path for file in found.files_of_base(opened)) == paths
