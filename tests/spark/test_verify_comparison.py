"""Two frames of a table, compared: every kind of difference is found, and what only looks different is not."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest

from xidstream.pipeline.changelog.shape import ColumnShape, TableShape
from xidstream.pipeline.verify.comparison import Compared, compare
from xidstream.pipeline.verify.result import DifferenceKind

pytestmark = pytest.mark.spark

SCHEMA = (
    "id int, name string, f double, fs array<float>, d date, at timestamp, raw binary, price decimal(20,2), "
    "words array<string>, _text map<string,string>"
)
ROW = {
    "id": 1,
    "name": "a",
    "f": 0.0,
    "fs": [0.0, None],
    "d": datetime.date(2026, 1, 1),
    "at": datetime.datetime(2026, 1, 1, 12),
    "raw": b"\x00\xff",
    "price": Decimal("1.50"),
    "words": ["x", None],
    "_text": None,
}


def frame(spark: Any, *rows: dict[str, Any], schema: str = SCHEMA) -> Any:
    from pyspark.sql.types import _parse_datatype_string

    types = _parse_datatype_string(schema)
    return spark.createDataFrame([[{**ROW, **row}[name] for name in types.names] for row in rows], types)


def compared(source: Any, log: Any, key: tuple[str, ...] | None = ("id",), **more: Any) -> Compared:
    columns = {f.name: ColumnShape(f.dataType, (f.name,)) for f in source.schema.fields if f.name != "_text"}
    shape = TableShape("public.t", columns, key)
    settings = {"rows_per_range": 100_000, "n_shown": 20, "with_values": False, **more}
    return compare(source, log, shape, source_rows=source.count(), **settings)


DIFFERENT: tuple[tuple[str, Any, Any], ...] = (
    ("name", None, ""),
    ("f", 0.0, -0.0),
    ("fs", [0.0, None], [-0.0, None]),
    ("fs", [0.0, None], [None, 0.0]),
    ("words", ["x", None], ["x"]),
    ("words", [], None),
    ("d", datetime.date(2026, 1, 1), None),
    ("raw", b"", None),
    ("price", Decimal("1.50"), Decimal("1.51")),
    ("_text", {"at": "infinity"}, None),
    ("_text", {"at": "infinity"}, {"at": "-infinity"}),
)


def test_each_value_that_differs_is_found_with_its_key_and_column(spark: Any) -> None:
    """A range for each row, so that none is found because another one differs."""
    n = len(DIFFERENT)
    source = frame(
        spark, *[{"id": i, column: ours} for i, (column, ours, _) in enumerate(DIFFERENT)], {"id": n}
    )
    log = frame(
        spark, *[{"id": i, column: theirs} for i, (column, _, theirs) in enumerate(DIFFERENT)], {"id": n}
    )
    found = compared(source, log, rows_per_range=1)
    assert found.n_ranges == n + 1 and found.differences is not None
    assert len(found.differences.ranges) == n
    named = [("at",) if column == "_text" else (column,) for column, _, _ in DIFFERENT]
    assert [(row.kind, row.key, row.columns) for row in found.differences.rows] == [
        (DifferenceKind.CHANGED, {"id": str(i)}, columns) for i, columns in enumerate(named)
    ]


def test_nulls_that_changed_their_columns_are_a_difference(spark: Any) -> None:
    schema = "id int, a string, b string, _text map<string,string>"

    def rows(*values: tuple[int, str | None, str | None]) -> Any:
        return frame(spark, *[{"id": i, "a": a, "b": b} for i, a, b in values], schema=schema)

    found = compared(rows((1, "x", None)), rows((1, None, "x")))
    assert found.differences is not None and found.differences.columns == {"a": 1, "b": 1}


def test_a_doubled_row_is_extra_with_a_key_and_without(spark: Any) -> None:
    source = frame(spark, {"id": 1}, {"id": 2})
    doubled = frame(spark, {"id": 1}, {"id": 2}, {"id": 2})
    keyed = compared(source, doubled).differences
    assert keyed is not None and [(r.kind, r.key, r.n) for r in keyed.rows] == [
        (DifferenceKind.EXTRA, {"id": "2"}, 1)
    ]
    keyless = compared(source, doubled, key=None).differences
    assert keyless is not None and (keyless.extra, keyless.missing, keyless.rows) == (1, 0, ())
    shown = compared(source, doubled, key=None, with_values=True).differences
    assert shown is not None and shown.rows[0].log is not None and shown.rows[0].log["raw"] == "\\x00ff"


@pytest.mark.parametrize("key", [("id",), ("name", "at", "raw"), ("words", "d", "f"), None])
def test_ranges_cover_all_rows_whatever_the_key_and_one_row_is_found_in_its_range(
    spark: Any, key: tuple[str, ...] | None
) -> None:
    def rows(**changed: Any) -> Any:
        many = [
            {
                "id": i,
                "name": f"n{i % 10}" if i % 7 else None,
                "f": i / 3,
                "d": datetime.date(2026, 1, 1) + datetime.timedelta(i % 5),
                "at": datetime.datetime(2026, 1, 1) + datetime.timedelta(minutes=i),
                "raw": i.to_bytes(2, "big"),
                "words": [str(i)],
                **(changed if i == 777 else {}),
            }
            for i in range(1000)
        ]
        return frame(spark, *many)

    found = compared(rows(), rows(price=Decimal("9.00")), key, rows_per_range=100)
    assert (found.source_rows, found.log_rows) == (1000, 1000)
    assert found.n_ranges > 5 and found.differences is not None
    (range_,) = found.differences.ranges
    assert range_.source_rows == range_.log_rows < 400
    changed = (0, 1, 1) if key is None else (1, 0, 0)
    assert (found.differences.changed, found.differences.missing, found.differences.extra) == changed
    if key == ("id",):
        assert int((range_.first or ("0",))[0] or 0) <= 777 < int((range_.end or ("1000",))[0] or 0)


def test_a_column_that_the_log_has_not_is_null_there(spark: Any) -> None:
    schema = SCHEMA.replace("name string, ", "")
    log = frame(spark, {"id": 1}, schema=schema)
    assert compared(frame(spark, {"id": 1, "name": None}), log).differences is None
    found = compared(frame(spark, {"id": 1, "name": "a"}), log).differences
    assert found is not None and found.columns == {"name": 1}


def test_only_so_many_rows_are_listed_and_all_are_counted(spark: Any) -> None:
    found = compared(frame(spark, *[{"id": i} for i in range(50)]), frame(spark), n_shown=3).differences
    assert found is not None and found.missing == 50
    assert [row.key for row in found.rows] == [{"id": "0"}, {"id": "1"}, {"id": "2"}]
