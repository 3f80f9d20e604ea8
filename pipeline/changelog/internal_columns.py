"""Rows under names of our own, and the parts of a key: what the folds have in common.

A user's table may have columns of any name and any case. So the folds work on columns ``c0``, ``c1``, … in the order of
the shape, beside ``k0``, ``k1``, … for the key and a few more. No name of a table appears between ``prepared`` and
``restored``, and none can clash.

A part of a key is the column's value. Where the column's type cannot hold every value of PostgreSQL (an infinite
timestamp, NaN in a numeric), its text is a second part. Spark groups and joins floats as PostgreSQL's indexes compare
them: -0.0 equals 0.0, and NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.shape import TableShape, as_type
from xidstream.pipeline.log_tables.columns import shows
from xidstream.pipeline.spark.spark_schemas import arrow_type, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

TEXT_TYPE: Final = "map<string,string>"
ORDER_TYPE: Final = "decimal(38,0)"
_SEQ_BITS: Final = 63

BROADCAST_ROWS: Final = 1_000_000
BROADCAST_BYTES: Final = 64 << 20
"""The most that is sent to every executor, and held by the driver while it is."""


@dataclass(frozen=True)
class KeyPart:
    """``name``: internal. ``column``: index of the shape's column. ``is_text``: its text, where it has no value."""

    name: str
    column: int
    is_text: bool
    may_be_null: bool


def key_parts(shape: TableShape) -> tuple[KeyPart, ...]:
    """None for a table without a key."""
    parts: list[KeyPart] = []
    order = list(shape.columns)
    for name in shape.key or ():
        i = order.index(name)
        by_text = has_texts(shape.columns[name].type)
        parts.append(KeyPart(f"k{len(parts)}", i, is_text=False, may_be_null=by_text))
        if by_text:
            parts.append(KeyPart(f"k{len(parts)}", i, is_text=True, may_be_null=True))
    return tuple(parts)


def has_texts(type_: DataType) -> bool:
    """Whether PostgreSQL has values of such a column that the type cannot hold."""
    from pyspark.sql import types as t

    return isinstance(type_, (t.DateType, t.TimestampType, t.TimestampNTZType, t.DecimalType, t.ArrayType))


def value_columns(shape: TableShape) -> list[str]:
    return [f"c{i}" for i in range(len(shape.columns))]


def prepared(frame: DataFrame, shape: TableShape, more: Sequence[Column] = ()) -> DataFrame:
    """``k*``, ``c*``, ``text`` and ``more`` of rows with the source's columns; null what ``frame`` has not, or has of
    another column that was called so (``shows``). The same holds for ``text``, so a row does not keep the text of a
    column that was dropped: no old tuple from after that would be like it."""
    from pyspark.sql import functions as f

    there = {field.name: field.dataType for field in frame.schema.fields}
    has = {name: _has(there, name, column.type) for name, column in shape.columns.items()}
    values = [
        as_type(f.col(quoted(name)), there[name], column.type) if has[name] else f.lit(None).cast(column.type)
        for name, column in shape.columns.items()
    ]
    texts = (f.col("_text") if "_text" in there else f.lit(None)).cast(TEXT_TYPE)
    names = list(shape.columns)
    keys = []
    for part in key_parts(shape):
        name, value = names[part.column], values[part.column]
        if part.is_text:
            value = texts[name] if has[name] else f.lit(None).cast("string")
        keys.append(value.alias(part.name))
    text = texts_of(texts, [name for name in names if has[name]]) if "_text" in there else texts
    aliased = [value.alias(name) for value, name in zip(values, value_columns(shape), strict=True)]
    return frame.select(*keys, *aliased, text.alias("text"), *more)


def texts_of(texts: Column, names: Sequence[str]) -> Column:
    """What ``texts`` has of these columns; null where that is nothing."""
    from pyspark.sql import functions as f

    own = f.map_filter(texts, lambda name, _: name.isin(*names))
    return f.when(f.size(own) > 0, own)


def _has(there: Mapping[str, DataType], name: str, newest: DataType) -> bool:
    found = there.get(name)
    return found is not None and (found == newest or shows(arrow_type(newest), arrow_type(found)))


def restored(frame: DataFrame, shape: TableShape, more: Sequence[str | Column] = ()) -> DataFrame:
    """The source's columns under their own names, then ``more``."""
    from pyspark.sql import functions as f

    values = [f.col(c).alias(name) for c, name in zip(value_columns(shape), shape.columns, strict=True)]
    return frame.select(*values, *more)


def order_of(commit_lsn: Column, seq: Column) -> Column:
    """A place in the log as one number of fixed width, which Spark aggregates in a hash table."""
    from pyspark.sql import functions as f

    step = f.lit(str(1 << _SEQ_BITS)).cast("decimal(19,0)")
    return (commit_lsn.cast("decimal(19,0)") * step + seq.cast("decimal(19,0)")).cast(ORDER_TYPE)


def all_of(conditions: Sequence[Column]) -> Column:
    return reduce(lambda a, b: a & b, conditions)


def any_of(conditions: Sequence[Column]) -> Column:
    return reduce(lambda a, b: a | b, conditions)


def same_key(parts: Sequence[KeyPart], left: str, right: str) -> Column:
    """The key whose parts are called ``left``0, ``left``1, … is that of ``right``0, …"""
    from pyspark.sql import functions as f

    conditions = []
    for i, part in enumerate(parts):
        ours, theirs = f.col(f"{left}{i}"), f.col(f"{right}{i}")
        conditions.append(ours.eqNullSafe(theirs) if part.may_be_null else ours == theirs)
    return all_of(conditions)


def key_as(parts: Sequence[KeyPart], prefix: str) -> list[Column]:
    """The key's parts under the names ``prefix``0, …"""
    from pyspark.sql import functions as f

    return [f.col(part.name).alias(f"{prefix}{i}") for i, part in enumerate(parts)]
