"""Types of columns: as Iceberg has them, what may be widened, and which files are files of a column."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import FixedType, NestedField, StructType, TimeType, UUIDType

from xidstream.pipeline.iceberg.iceberg_types import (
    RULES,
    arrow_type,
    iceberg_type,
    reads,
    schema_of,
    stored,
    widens,
)
from xidstream.pipeline.log_tables.columns import TableColumn, map_columns
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA
from xidstream.pipeline.schema.types import _FIXED

TYPES = list(
    dict.fromkeys(
        [
            *(each.arrow for each in _FIXED.values()),
            pa.string(),
            pa.decimal128(38, 10),
            pa.list_(pa.int16()),
            pa.list_(pa.decimal128(12, 3)),
            pa.list_(pa.timestamp("us", "UTC")),
            *(
                field.type
                for fields in (CONTRACT_FIELDS, MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA)
                for field in fields
            ),
        ]
    )
)


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_every_type_of_the_contract_has_one_in_iceberg_and_comes_back(type_: pa.DataType) -> None:
    kept = stored(type_)
    assert arrow_type(iceberg_type(kept)) == kept
    assert stored(kept) == kept and reads(kept, type_)
    assert (kept == type_) is ("int16" not in str(type_))


@pytest.mark.parametrize(
    "type_",
    [TimeType(), UUIDType(), FixedType(4), StructType(NestedField(1, "a", TimeType(), required=False))],
    ids=str,
)
def test_a_type_that_only_others_give_to_a_column_is_one_that_can_be_null_in_a_file(type_: object) -> None:
    assert pa.nulls(2, arrow_type(type_)).null_count == 2  # type: ignore[arg-type]


def test_what_we_widen_iceberg_lets_us_widen() -> None:
    found = []
    types = [
        stored(each) for each in (*TYPES, pa.decimal128(20, 10), pa.list_(pa.int64()), pa.list_(pa.float32()))
    ]
    for wide, narrow in itertools.product(dict.fromkeys(types), repeat=2):
        if not widens(wide, narrow):
            continue
        found.append((str(wide), str(narrow)))
        path: tuple[str, ...] = ("c", "element") if pa.types.is_list(wide) else ("c",)
        inner = wide.value_type if pa.types.is_list(wide) else wide
        update = UpdateSchema(None, schema=schema_of([TableColumn("c", narrow, "c")], {}))  # type: ignore[arg-type]
        update.update_column(path, field_type=iceberg_type(inner))
        assert reads(wide, narrow) and not widens(narrow, wide)
    assert sorted(found) == [
        ("decimal128(38, 10)", "decimal128(20, 10)"),
        ("double", "float"),
        ("int64", "int32"),
        ("list<item: int64>", "list<item: int32>"),
    ]


def test_the_same_history_gives_the_same_columns_however_it_is_cut() -> None:
    history = [pa.int16(), pa.int32(), pa.int64(), pa.int16(), pa.string(), pa.int64()]
    columns: tuple[TableColumn, ...] = ()
    names = []
    for type_ in history:
        mapping = map_columns(columns, pa.schema([("x", type_)]), RULES)
        columns = mapping.columns
        names.append(mapping.names[0])
    assert [(c.name, c.type) for c in columns] == [("x", pa.int64()), ("x__string", pa.string())]
    assert names == ["x", "x", "x", "x", "x__string", "x"]
    for start in range(len(history)):
        again = columns
        for type_ in history[start:]:
            again = map_columns(again, pa.schema([("x", type_)]), RULES).columns
        assert again == columns


def test_ids_of_a_new_table_are_those_that_its_catalog_gives() -> None:
    fields = [*CONTRACT_FIELDS[5:], pa.field("l", pa.list_(pa.int32()))]
    schema = schema_of([TableColumn(f.name, f.type, f.name) for f in fields], {"_text": "told"})
    assert [field.field_id for field in schema.fields] == [1, 2, 3]
    assert schema.highest_field_id == 7
    assert schema.find_field("_text").doc == "told"
