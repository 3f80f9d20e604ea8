"""The types of columns: Arrow's as Iceberg's and back, and what Iceberg may do with a column's type.

Iceberg (format version 2) has no integer of 16 bits, so ``int2`` is an ``int``. All other types of the contract it has
as they are: PostgreSQL counts microseconds, as Iceberg 2 does, and what neither knows is text in the contract already
(``time with time zone``, ``interval``, numerics without bounds, and so on: docs/rows.md).

A column may be widened in place: ``int`` to ``long``, ``float`` to ``double``, a decimal to one with more digits and
the same scale, and an array when its elements may. Files with the narrower type stay as they are, and later files may
have it, too: whoever reads them promotes. So a file of a transaction that was written under either type is a file of
the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Final

import pyarrow as pa
import pyarrow.types as pt
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from xidstream.pipeline.log_tables.columns import ColumnRules, TableColumn

_PRIMITIVES: Final[dict[pa.DataType, PrimitiveType]] = {
    pa.bool_(): BooleanType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
    pa.timestamp("us"): TimestampType(),
    pa.timestamp("us", "UTC"): TimestamptzType(),
}
_ARROW: Final[dict[IcebergType, pa.DataType]] = {iceberg: arrow for arrow, iceberg in _PRIMITIVES.items()}


def stored(type_: pa.DataType) -> pa.DataType:
    """The type of a column for values of a type of the contract."""
    if type_ in (pa.int8(), pa.int16()):
        return pa.int32()
    return pa.list_(stored(type_.value_type)) if pt.is_list(type_) else type_


def widens(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether Iceberg lets a column of type ``narrow`` become ``wide``, which is another."""
    if pt.is_list(wide) and pt.is_list(narrow):
        return widens(wide.value_type, narrow.value_type)
    if pt.is_decimal(wide) and pt.is_decimal(narrow):
        return bool(wide.scale == narrow.scale and wide.precision > narrow.precision)
    return (wide, narrow) in ((pa.int64(), pa.int32()), (pa.float64(), pa.float32()))


def reads(column: pa.DataType, file: pa.DataType) -> bool:
    """Whether a file may have the type ``file`` for a column of type ``column``."""
    found = stored(file)
    return bool(column == found) or widens(column, found)


RULES: Final = ColumnRules(stored, widens, reads)


def iceberg_type(type_: pa.DataType) -> IcebergType:
    """Iceberg's type for one that a column has. The ids of what is nested are to be assigned."""
    if pt.is_decimal(type_):
        return DecimalType(type_.precision, type_.scale)
    if pt.is_list(type_):
        element = iceberg_type(type_.value_type)
        return ListType(element_id=-1, element_type=element, element_required=False)
    if pt.is_map(type_):
        key, value = iceberg_type(type_.key_type), iceberg_type(type_.item_type)
        return MapType(key_id=-1, key_type=key, value_id=-2, value_type=value, value_required=False)
    return _PRIMITIVES[type_]


@cache
def arrow_type(type_: IcebergType) -> pa.DataType:
    """Arrow's type, as the contract has it; for a type that only others give to a column, as pyiceberg has it."""
    if isinstance(type_, DecimalType):
        return pa.decimal128(type_.precision, type_.scale)
    if isinstance(type_, ListType):
        return pa.list_(arrow_type(type_.element_type))
    if isinstance(type_, MapType):
        return pa.map_(arrow_type(type_.key_type), arrow_type(type_.value_type))
    if type_ in _ARROW:
        return _ARROW[type_]
    field = NestedField(1, "it", type_, required=False)
    return schema_to_pyarrow(Schema(field), include_field_ids=False).field(0).type


def schema_of(columns: Sequence[TableColumn], comments: dict[str, str]) -> Schema:
    """With the ids that a new table gives to these columns."""
    fields = [
        NestedField(i, column.name, iceberg_type(column.type), required=False, doc=comments.get(column.name))
        for i, column in enumerate(columns, 1)
    ]
    ids = itertools.count(1)
    return assign_fresh_schema_ids(Schema(*fields), lambda: next(ids))
