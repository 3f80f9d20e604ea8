"""Arrow types as Spark's, and back."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA
from xidstream.pipeline.spark.spark_schemas import arrow_type, spark_schema

_PLAIN = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(38, 10),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
]
_OWN = [field.type for schema in (CONTRACT_FIELDS, TRANSACTIONS_SCHEMA, MESSAGES_SCHEMA) for field in schema]


@pytest.mark.parametrize("type_", [*_PLAIN, *map(pa.list_, _PLAIN), *dict.fromkeys(_OWN)], ids=str)
def test_every_type_that_rows_have_comes_back_from_spark_as_it_was(type_: pa.DataType) -> None:
    (field,) = spark_schema(pa.schema([("x", type_)])).fields
    assert arrow_type(field.dataType) == type_


def test_a_struct_of_somebody_elses_column_has_an_arrow_type() -> None:
    struct = t.StructType([t.StructField("a", t.MapType(t.StringType(), t.ByteType()))])
    assert arrow_type(struct) == pa.struct([("a", pa.map_(pa.string(), pa.int8()))])


def test_a_type_that_delta_has_not_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="interval"):
        arrow_type(t.DayTimeIntervalType())
