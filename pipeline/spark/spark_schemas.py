"""The contract's layouts in Spark's terms: types, names as Spark reads them verbatim, frames brought into a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.log_tables.columns import ColumnMapping, TableColumn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


def spark_schema(schema: pa.Schema) -> StructType:
    """Spark's types for the contract's: a timestamp without zone is TimestampNTZ."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def arrow_type(type_: DataType) -> pa.DataType:
    """The reverse of ``spark_schema``, for one type, and for all others that a Delta table may have. (PySpark's own
    function is private, and takes other arguments in other versions.) Raises UsageError for any other type."""
    from pyspark.sql import types as t

    if isinstance(type_, t.DecimalType):
        return pa.decimal128(type_.precision, type_.scale)
    if isinstance(type_, t.ArrayType):
        return pa.list_(pa.field("element", arrow_type(type_.elementType), type_.containsNull))
    if isinstance(type_, t.MapType):
        value = pa.field("value", arrow_type(type_.valueType), type_.valueContainsNull)
        return pa.map_(pa.field("key", arrow_type(type_.keyType), nullable=False), value)
    if isinstance(type_, t.StructType):
        return pa.struct([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in type_.fields])
    plain: dict[type[DataType], pa.DataType] = {
        t.BooleanType: pa.bool_(),
        t.ByteType: pa.int8(),
        t.ShortType: pa.int16(),
        t.IntegerType: pa.int32(),
        t.LongType: pa.int64(),
        t.FloatType: pa.float32(),
        t.DoubleType: pa.float64(),
        t.StringType: pa.string(),
        t.BinaryType: pa.binary(),
        t.DateType: pa.date32(),
        t.TimestampType: pa.timestamp("us", tz="UTC"),
        t.TimestampNTZType: pa.timestamp("us"),
    }
    if type(type_) not in plain:
        raise UsageError(f"no Delta table has a column of type {type_.simpleString()}")
    return plain[type(type_)]


def simple_types(schema: StructType) -> list[tuple[str, str]]:
    """Names and types, in order, without nullability (which an Arrow path cannot keep inside a map)."""
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


def quoted(name: str) -> str:
    """A column's name as Spark reads it verbatim: dots and backticks included."""
    return "`" + name.replace("`", "``") + "`"


def conformed(
    frame: DataFrame, columns: Sequence[TableColumn], mapping: ColumnMapping, schema: StructType
) -> DataFrame:
    """``frame``, of one layout, in ``schema``, which is that of ``columns``: cast, and null where it has no such
    column."""
    if simple_types(frame.schema) == simple_types(schema):
        return frame
    from pyspark.sql import functions

    index = {name: i for i, name in enumerate(mapping.names)}
    selected = []
    for column, field in zip(columns, schema.fields, strict=True):
        source = index.get(column.name)
        value = functions.lit(None) if source is None else functions.col(quoted(frame.columns[source]))
        selected.append(value.cast(field.dataType).alias(column.name))
    return frame.select(*selected)
