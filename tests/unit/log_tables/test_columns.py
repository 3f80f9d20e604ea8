"""Schema evolution: which column takes which, and the record batches that follow."""

from __future__ import annotations

import pyarrow as pa
import pytest

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.log_tables.columns import (
    DELTA,
    UNSTORED,
    ColumnRules,
    Conform,
    TableColumn,
    holds,
    map_columns,
)


def schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(*f) for f in fields])


def grown(*versions: pa.Schema, rules: ColumnRules = DELTA) -> list[tuple[str, pa.DataType]]:
    columns: tuple[TableColumn, ...] = ()
    for version in versions:
        columns = map_columns(columns, version, rules).columns
    return [(c.name, c.type) for c in columns]


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (pa.int64(), pa.int16(), True),
        (pa.int16(), pa.int64(), False),
        (pa.float64(), pa.float32(), True),
        (pa.float32(), pa.float64(), False),
        (pa.float64(), pa.int32(), True),
        (pa.float64(), pa.int64(), False),
        (pa.float32(), pa.int16(), True),
        (pa.float32(), pa.int32(), False),
        (pa.decimal128(12, 2), pa.int32(), True),
        (pa.decimal128(11, 2), pa.int32(), False),
        (pa.decimal128(20, 4), pa.decimal128(18, 2), True),
        (pa.decimal128(20, 4), pa.decimal128(19, 2), False),
        (pa.decimal128(20, 2), pa.decimal128(10, 4), False),
        (pa.string(), pa.int32(), False),
        (pa.binary(), pa.string(), False),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), False),
        (pa.timestamp("us"), pa.date32(), False),
        (pa.list_(pa.int64()), pa.list_(pa.int16()), True),
        (pa.list_(pa.string()), pa.string(), False),
    ],
)
def test_a_type_holds_another_when_no_value_is_changed(
    wide: pa.DataType, narrow: pa.DataType, expected: bool
) -> None:
    assert holds(wide, narrow) is expected


def test_every_extreme_of_a_held_type_survives_the_cast() -> None:
    cases = [
        (pa.int16(), pa.float32(), [-32768, 32767]),
        (pa.int32(), pa.float64(), [-(2**31), 2**31 - 1]),
        (pa.int64(), pa.decimal128(19, 0), [-(2**63), 2**63 - 1]),
        (pa.int32(), pa.decimal128(12, 2), [-(2**31), 2**31 - 1]),
    ]
    for narrow, wide, values in cases:
        assert holds(wide, narrow)
        array = pa.array(values, narrow)
        batch = pa.RecordBatch.from_arrays([array], names=["x"])
        out = Conform(pa.schema([pa.field("x", wide)]), (0,))(batch)
        assert [int(v) for v in out.column(0).to_pylist()] == values


def test_a_new_column_is_appended_and_a_dropped_one_stays() -> None:
    first, second = (
        schema(("a", pa.int32()), ("b", pa.string())),
        schema(("a", pa.int32()), ("c", pa.bool_())),
    )
    assert grown(first, second) == [("a", pa.int32()), ("b", pa.string()), ("c", pa.bool_())]


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (pa.int32(), pa.string(), "price__string"),
        (pa.decimal128(10, 2), pa.decimal128(20, 4), "price__decimal_20_4"),
        (pa.int32(), pa.int64(), "price__long"),
        (pa.string(), pa.timestamp("us"), "price__timestamp_ntz"),
        (pa.string(), pa.timestamp("us", tz="UTC"), "price__timestamp"),
        (pa.string(), pa.list_(pa.int16()), "price__array_short"),
    ],
)
def test_a_type_that_does_not_fit_gets_a_column_named_for_it(
    before: pa.DataType, after: pa.DataType, name: str
) -> None:
    assert grown(schema(("price", before)), schema(("price", after)))[1] == (name, after)


def test_the_type_changed_back_finds_its_first_column() -> None:
    a, b = schema(("x", pa.int32())), schema(("x", pa.string()))
    columns = map_columns(map_columns((), a).columns, b).columns
    assert map_columns(columns, a).names == ("x",)
    assert map_columns(columns, b).names == ("x__string",)
    assert map_columns(columns, b).additions == ()


def test_a_column_with_exactly_the_type_goes_before_a_wider_one() -> None:
    columns = [TableColumn("x", pa.float64(), "x"), TableColumn("x__integer", pa.int32(), "x")]
    assert map_columns(columns, schema(("x", pa.int32()))).names == ("x__integer",)


def test_a_name_that_differs_in_case_is_the_same_column_when_the_type_fits() -> None:
    assert grown(schema(("a", pa.int64())), schema(("A", pa.int32()))) == [("a", pa.int64())]
    assert grown(schema(("a", pa.int64())), schema(("A", pa.string())))[1] == ("A__string", pa.string())


def test_a_users_column_named_like_a_suffixed_one_keeps_its_values_apart() -> None:
    first = schema(("x", pa.int32()))
    second = schema(("x", pa.string()))
    third = schema(("x", pa.string()), ("x__string", pa.string()))
    placed = map_columns(map_columns(map_columns((), first).columns, second).columns, third)
    assert placed.names == ("x__string", "x__string__string")
    beside = map_columns(map_columns((), first).columns, third)
    assert beside.names == ("x__string_2", "x__string")


def test_widening_replaces_the_type_where_nothing_is_stored() -> None:
    versions = schema(("x", pa.int32())), schema(("x", pa.int64()))
    assert grown(*versions, rules=UNSTORED) == [("x", pa.int64())]
    assert grown(*versions) == [("x", pa.int32()), ("x__long", pa.int64())]


def test_a_contract_column_of_another_type_is_not_our_table() -> None:
    with pytest.raises(SinkFailed):
        map_columns([TableColumn("_seq", pa.string(), "_seq")], schema(("_seq", pa.int64())))


def test_conform_fills_reorders_and_casts() -> None:
    columns = [
        TableColumn("gone", pa.map_(pa.string(), pa.string()), "gone"),
        TableColumn("x", pa.int64(), "x"),
        TableColumn("y", pa.string(), "y"),
    ]
    batch = pa.RecordBatch.from_arrays([pa.array(["q"]), pa.array([1], pa.int16())], names=["y", "x"])
    out = Conform.of(columns, ["y", "x"])(batch)
    assert out.schema == pa.schema([c.field for c in columns])
    assert out.to_pylist() == [{"gone": None, "x": 1, "y": "q"}]


def test_a_failing_cast_names_the_column_and_no_value() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([123456789])], names=["x"])
    with pytest.raises(SinkFailed) as raised:
        Conform(pa.schema([pa.field("x", pa.int8())]), (0,))(batch)
    assert "x" in raised.value.message
    assert "123456789" not in raised.value.message
    assert raised.value.__cause__ is None
