"""A key as people write it finds its rows, whatever the column's type, and no others."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.errors import Unsupported, UsageError
from xidstream.pipeline.log_tables.erased_keys import MOST_KEYS, RowsOfKeys, StoredColumn, parse_keys

UTC = datetime.timezone.utc


def found(pg_type: str, arrow: pa.DataType, key: str, values: list[Any]) -> list[Any]:
    keys = RowsOfKeys(parse_keys([key]), {"k": [StoredColumn("k", arrow, pg_type)]}, ["k"], "public.t")
    rows = pa.RecordBatch.from_arrays([pa.array(values, arrow)], ["k"])
    return rows.filter(keys.among(rows))["k"].to_pylist()


@pytest.mark.parametrize(
    ("pg_type", "arrow", "literal", "value", "others"),
    [
        ("integer", pa.int32(), "-7", -7, [7, None]),
        ("bigint", pa.int64(), "9223372036854775807", 2**63 - 1, [-1]),
        ("oid", pa.int64(), "4294967295", 2**32 - 1, [0]),
        ("numeric(10,2)", pa.decimal128(10, 2), "1.5", decimal.Decimal("1.50"), [decimal.Decimal("1.51")]),
        ("numeric", pa.string(), "'1.50'", "1.50", ["1.5"]),
        ("boolean", pa.bool_(), "true", True, [False, None]),
        ("text", pa.string(), "'it''s'", "it's", ["its", "it's "]),
        ("character varying(9)", pa.string(), "'é'", "é", ["e"]),
        ("character(4)", pa.string(), "'ab'", "ab  ", ["ab", "abc "]),
        (
            "uuid",
            pa.string(),
            "'0B5CE9B1-0D3F-4C5B-9F0E-6F3F8B1A2C3D'",
            "0b5ce9b1-0d3f-4c5b-9f0e-6f3f8b1a2c3d",
            ["x"],
        ),
        ("public.mood", pa.string(), "'sad'", "sad", ["glad"]),
        (
            "date",
            pa.date32(),
            "'2026-05-04'",
            datetime.date(2026, 5, 4),
            [datetime.date(2026, 5, 5), None],
        ),
        (
            "timestamp without time zone",
            pa.timestamp("us"),
            "'2026-05-04 12:00:00.5'",
            datetime.datetime(2026, 5, 4, 12, 0, 0, 500_000),
            [datetime.datetime(2026, 5, 4, 12)],
        ),
        (
            "timestamp with time zone",
            pa.timestamp("us", "UTC"),
            "'2026-05-04 12:00:00+02'",
            datetime.datetime(2026, 5, 4, 10, tzinfo=UTC),
            [datetime.datetime(2026, 5, 4, 12, tzinfo=UTC)],
        ),
        ("bytea", pa.binary(), r"'\x00ff'", b"\x00\xff", [b"00ff"]),
    ],
)
def test_a_literal_finds_its_value_alone(
    pg_type: str, arrow: pa.DataType, literal: str, value: Any, others: list[Any]
) -> None:
    assert found(pg_type, arrow, f"k = {literal}", [*others, value, *others, value]) == [value, value]


@pytest.mark.parametrize(
    ("pg_type", "arrow", "literal"),
    [
        ("integer", pa.int32(), "2147483648"),
        ("integer", pa.int32(), "1.5"),
        ("numeric(10,2)", pa.decimal128(10, 2), "1.555"),
        ("boolean", pa.bool_(), "'yes'"),
        ("uuid", pa.string(), "'x'"),
        ("date", pa.date32(), "'infinity'"),
        ("timestamp with time zone", pa.timestamp("us", "UTC"), "'2026-05-04 12:00:00'"),
        ("bytea", pa.binary(), r"'\xzz'"),
    ],
)
def test_a_literal_that_is_none_of_the_type_is_refused(
    pg_type: str, arrow: pa.DataType, literal: str
) -> None:
    with pytest.raises(UsageError, match="none of its type"):
        found(pg_type, arrow, f"k = {literal}", [None])


@pytest.mark.parametrize("arrow", [pa.float64(), pa.list_(pa.int32())])
def test_a_type_whose_equality_is_not_that_of_the_text_is_refused(arrow: pa.DataType) -> None:
    with pytest.raises(Unsupported):
        found("double precision", arrow, "k = 1", [None])


def test_a_key_of_several_columns_is_met_by_all_of_them() -> None:
    stored_columns = {
        "a": [StoredColumn("a", pa.int32(), "integer")],
        "b": [StoredColumn("b", pa.string(), "text")],
    }
    keys = parse_keys(["b = 'x' and a in (1, 2)", "a = 3 and b = 'y'", "a = 9"])
    assert keys.n_keys == 4
    rows = pa.RecordBatch.from_pydict(
        {"a": pa.array([1, 2, 3, 3, 1, 9, None], pa.int32()), "b": ["x", "x", "y", "x", "y", None, "x"]}
    )
    mask = RowsOfKeys(keys, stored_columns, ["a", "b"], "public.t").among(rows)
    assert mask.to_pylist() == [True, True, True, False, False, True, False]


def test_no_more_keys_are_taken_than_memory_is_for() -> None:
    with pytest.raises(UsageError, match="100,000"):
        parse_keys([], (f"id = {i}" for i in range(MOST_KEYS + 1)))  # type: ignore[arg-type]
