"""Ranges of keys that a reader asks for: what need not be read for them, and which rows are in them.

``KeySpans`` has for some columns of a key the least and the greatest value. A query says them where it asks for a table
(``LogState.table``, ``ChangeLog.changes``). Three things follow:

- ``file_may_hold``: files of a base table whose range in the Delta log lies outside are not opened. Only files that a
  mirror has written count: what other tools write there is no exact bound.
- ``wanted``: row groups whose statistics lie outside are not read. Arrow decides that from a file's footer.
- ``within``: the rows themselves, as Spark compares them. Nothing else decides which rows a reader gets.

The first two may pass what the third takes away, never the other way round. So they say nothing of columns whose order
in statistics is not Spark's (floats have NaN), of those that the table holds in another type than the query's, or in
several columns. A key that its column cannot hold (an infinite timestamp) is null there, and in no range.

Rejected: an expression of the caller's over all columns. A fold may leave out rows by their key alone: the others tell
what became of a key.

Called by ``table_at``, ``net`` and ``change_log``.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from xidstream.pipeline.changelog.log_table import LogFile, LogTable
from xidstream.pipeline.changelog.manifest import OWN_FILES
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.spark.spark_schemas import arrow_type, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

Keys = Mapping[str, tuple[Any, Any]]
"""By column, the least and the greatest value, both included. None: no bound on that side."""


@dataclass(frozen=True)
class KeySpan:
    """``least`` and ``greatest`` are of ``type``, which is Arrow's of ``spark_type``, or None."""

    column: str
    spark_type: DataType
    type: pa.DataType
    least: pa.Scalar | None
    greatest: pa.Scalar | None

    @property
    def has_statistics(self) -> bool:
        """Whether statistics have such values in Spark's order."""
        type_ = self.type
        return bool(
            pt.is_integer(type_) or pt.is_string(type_) or pt.is_date32(type_) or pt.is_timestamp(type_)
        )


@dataclass(frozen=True)
class KeySpans:
    """``shape``: of the table at the moment that is read."""

    shape: TableShape
    spans: tuple[KeySpan, ...]

    @classmethod
    def of(cls, shape: TableShape, keys: Keys, columns: Collection[str] | None) -> KeySpans | None:
        """What ``keys`` asks for; None where that is all rows. ``columns``: those that may be asked for, of
        ``shape``'s; None where the table has no key.

        Raises UsageError for any other column, and for a value that is none of its column's.
        """
        if columns is None:
            raise UsageError(
                f"table {shape.table} has no key: its rows have no range of keys",
                remedy="filter the DataFrame; leave keys out",
            )
        unknown = [name for name in keys if name not in columns]
        if unknown:
            raise UsageError(
                f"keys names {', '.join(map(repr, unknown))}, and table {shape.table} has the key "
                f"({', '.join(columns)})",
                remedy="filter the DataFrame by other columns",
            )
        spans = [_span(shape, name, bounds) for name, bounds in keys.items()]
        bounded = tuple(span for span in spans if not (span.least is None and span.greatest is None))
        return cls(shape, bounded) if bounded else None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(span.column for span in self.spans)

    def wanted(self, there: pa.Schema, *, or_null: bool = False) -> pc.Expression | None:
        """Which rows are asked for, as Arrow has it, of a log's table with the columns ``there``; None where it cannot
        tell. ``or_null``: those without a value as well."""
        parts = list[pc.Expression]()
        for span in self.spans:
            held_in = self.shape.columns[span.column].held_in
            held = held_in[0] if len(held_in) == 1 else None
            if held is None or not _holds(there, held, span):
                continue
            field, type_ = pc.field(held), there.field(held).type
            bounds = list[pc.Expression]()
            if span.least is not None:
                bounds.append(field >= pa.scalar(span.least.as_py(), type_))
            if span.greatest is not None:
                bounds.append(field <= pa.scalar(span.greatest.as_py(), type_))
            within = reduce(and_, bounds)
            parts.append(within | field.is_null() if or_null else within)
        return reduce(and_, parts) if parts else None

    def in_base(self, there: pa.Schema) -> KeySpans | None:
        """These ranges for a base table, which has the source's columns under their own names: those of ``there``
        alone, in the type that is asked for. Another type is that of before an ALTER TABLE."""
        spans = tuple(span for span in self.spans if _holds(there, span.column, span, of_any=True))
        columns = {name: column._replace(held_in=(name,)) for name, column in self.shape.columns.items()}
        shape = TableShape(self.shape.table, columns, self.shape.key)
        return KeySpans(shape, spans) if spans else None

    def files_of_base(self, table: LogTable) -> list[LogFile]:
        """The files of a base table that may have rows in the ranges, by what its Delta log says of them."""
        files = table.files()
        for span in self.spans:
            if span.has_statistics:
                least, greatest = (
                    bounds_of(span.column, OWN_FILES) for bounds_of in (table.least, table.greatest)
                )
                files = [f for f in files if _may_hold(least[f.path], greatest[f.path], span)]
        return files

    def within(self, *, or_null: bool = False) -> Column:
        """Which rows are in the ranges, of a frame with the source's columns. ``or_null``: those without a value as
        well."""
        from pyspark.sql import functions as f

        parts = list["Column"]()
        for span in self.spans:
            value = f.col(quoted(span.column))
            bounds = list["Column"]()
            if span.least is not None:
                bounds.append(value >= _literal(span.least, span.spark_type))
            if span.greatest is not None:
                bounds.append(value <= _literal(span.greatest, span.spark_type))
            within = reduce(and_, bounds)
            parts.append(within | value.isNull() if or_null else within)
        return reduce(and_, parts)


def _span(shape: TableShape, name: str, bounds: Sequence[Any]) -> KeySpan:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise UsageError(
            f"keys[{name!r}] is not a pair",
            remedy="give the least and the greatest value, both included; None where there is no bound",
        )
    spark_type = shape.columns[name].type
    type_ = arrow_type(spark_type)
    least, greatest = (None if value is None else _value(name, value, type_) for value in bounds)
    return KeySpan(name, spark_type, type_, least, greatest)


def _value(name: str, value: Any, type_: pa.DataType) -> pa.Scalar:
    is_moment = isinstance(value, datetime.datetime)
    if pt.is_timestamp(type_) and is_moment and (value.tzinfo is None) != (type_.tz is None):
        raise UsageError(
            f"keys[{name!r}] needs {'no' if type_.tz is None else 'a'} time zone, as the column's type has it"
        )
    if is_moment and not pt.is_timestamp(type_):
        raise UsageError(f"keys[{name!r}] has a value that is no {type_}")
    found: pa.Scalar | None = None
    with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
        found = pa.scalar(value, type_)
    # Arrow cuts 1.5 to 1, and would take a row that is not in the range.
    if found is None or (pt.is_integer(type_) and found.as_py() != value):
        raise UsageError(f"keys[{name!r}] has a value that is no {type_}")
    return found


def _holds(there: pa.Schema, name: str, span: KeySpan, *, of_any: bool = False) -> bool:
    """Whether ``there`` has the column in the span's type; unless ``of_any``, with statistics in Spark's order."""
    index = there.get_field_index(name)
    if index < 0 or not (of_any or span.has_statistics):
        return False
    found = there.field(index).type
    return found == span.type or bool(pt.is_large_string(found) and pt.is_string(span.type))


def _may_hold(least: Any, greatest: Any, span: KeySpan) -> bool:
    if least is None or greatest is None:
        return True
    low, high = pa.scalar(least, span.type), pa.scalar(greatest, span.type)
    is_above = span.greatest is not None and pc.greater(low, span.greatest).as_py()
    is_below = span.least is not None and pc.less(high, span.least).as_py()
    return not (is_above or is_below)


def _literal(value: pa.Scalar, type_: DataType) -> Column:
    """By its text, where it is none: Spark would read a datetime of Python's in the process's time zone."""
    from pyspark.sql import functions as f

    found = value.as_py()
    return f.lit(found) if isinstance(found, (str, bytes)) else f.lit(str(found)).cast(type_)
