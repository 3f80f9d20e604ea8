"""The contract's layouts in Spark's terms: types, names as Spark reads them verbatim, frames brought into a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.spark.placement import Placement, Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def spark_schema(schema: pa.Schema) -> StructType:
    """Spark's types for the contract's: a timestamp without zone is TimestampNTZ."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def simple_types(schema: StructType) -> list[tuple[str, str]]:
    """Names and types, in order, without nullability (which an Arrow path cannot keep inside a map)."""
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


def quoted(name: str) -> str:
    """A column's name as Spark reads it verbatim: dots and backticks included."""
    return "`" + name.replace("`", "``") + "`"


def conformed(
    frame: DataFrame, columns: Sequence[Target], placement: Placement, schema: StructType
) -> DataFrame:
    """``frame``, of one layout, in ``schema``, which is that of ``columns``: cast, and null where it has no such
    column."""
    if simple_types(frame.schema) == simple_types(schema):
        return frame
    from pyspark.sql import functions

    index = {name: i for i, name in enumerate(placement.names)}
    selected = []
    for column, field in zip(columns, schema.fields, strict=True):
        source = index.get(column.name)
        value = functions.lit(None) if source is None else functions.col(quoted(frame.columns[source]))
        selected.append(value.cast(field.dataType).alias(column.name))
    return frame.select(*selected)
