"""The shape of a table at one LSN: the source's columns, the Delta columns that hold each of them, and the key.

``shaped`` turns rows as the log has them into rows of a shape: the contract's columns first, as they are, then the
source's. A column whose type changed without a rewrite of the table has its older values in an older Delta column
(``placement``). A row has a value in one of these columns at most, so ``coalesce`` finds it.

A name is that of a source's column or of the contract, never both: such a clash stops the run. Names are PostgreSQL's,
verbatim, so each is quoted for Spark.

A query of a few columns reads a *narrowed* shape: these and the key's. A fold by key looks at no other column, so all
that it says of a narrowed table is what it says of the whole one.

Called by ``fold``, ``prepared``, ``change_log`` and the mirror.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


class ColumnShape(NamedTuple):
    """``type``: Spark's, of the column's newest definition. ``held_in``: the Delta columns that may have its values,
    newest first."""

    type: DataType
    held_in: tuple[str, ...]


@dataclass(frozen=True)
class TableShape:
    """``table``: ``schema.table``. ``columns``: by the source's names, in the table's order. ``key``: the columns that
    name a row; None where only the whole row does."""

    table: str
    columns: Mapping[str, ColumnShape]
    key: tuple[str, ...] | None

    @property
    def held_in(self) -> list[str]:
        """All Delta columns that may have values of its own."""
        return [held for column in self.columns.values() for held in column.held_in]


def chosen_columns(shape: TableShape, columns: Sequence[str]) -> list[str]:
    """``columns``, which somebody asks for. Raises UsageError where the table has not each of them, once."""
    names = [columns] if isinstance(columns, str) else list(columns)
    missing = [name for name in names if name not in shape.columns]
    if missing:
        raise UsageError(
            f"table {shape.table} has no column {', '.join(missing)} at this LSN",
            remedy=f"columns names some of these: {', '.join(shape.columns)}",
        )
    if not names or len(set(names)) < len(names):
        raise UsageError(
            "columns names no column, or one of them twice", remedy="leave columns out to get all of them"
        )
    return names


def narrowed(shape: TableShape, names: Iterable[str]) -> TableShape:
    """The key's columns and ``names``, in the table's order. For tables with a key: others are compared by whole rows
    where some were taken away."""
    kept = {*names, *(shape.key or ())}
    columns = {name: column for name, column in shape.columns.items() if name in kept}
    return TableShape(shape.table, columns, shape.key)


def shaped(frame: DataFrame, shape: TableShape) -> DataFrame:
    """Rows of the log as rows of ``shape``: the contract's columns that ``frame`` has, and the source's."""
    contract = [field.name for field in CONTRACT_FIELDS if field.name in frame.columns]
    values = [value_of(frame, name, column).alias(name) for name, column in shape.columns.items()]
    return frame.select(*contract, *values)


def value_of(frame: DataFrame, name: str, column: ColumnShape) -> Column:
    """The value of a source's column in rows of the log; null where no Delta column of ``frame`` holds it."""
    from pyspark.sql import functions as f

    there = {field.name: field.dataType for field in frame.schema.fields}
    held = [
        as_type(f.col(quoted(each)), there[each], column.type) for each in column.held_in if each in there
    ]
    if not held:
        return f.lit(None).cast(column.type)
    return held[0] if len(held) == 1 else f.coalesce(*held)


def as_type(value: Column, held: DataType, wanted: DataType) -> Column:
    """``value``, of type ``held``, as PostgreSQL shows it after an ALTER TYPE to ``wanted`` without a rewrite.

    That is Spark's cast but for decimals that become text (numeric(12,8), then numeric). Spark writes ``1E-8`` or
    ``0.00000001``, as its ANSI mode is off or on. PostgreSQL writes all digits, and a row's text must equal the text in
    an old tuple.
    """
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if isinstance(held, t.DecimalType) and isinstance(wanted, t.StringType):
        text = value.cast("string")
        # Java writes an exponent where the first of all digits stands after six zeros, so nothing stands before "0.".
        digits = f.lpad(f.regexp_replace(text, r"^-|\.|E.*$", ""), held.scale, "0")
        sign = f.when(text.startswith("-"), "-").otherwise("")
        return f.when(text.contains("E"), f.concat(sign, f.lit("0."), digits)).otherwise(text)
    if held != wanted and isinstance(held, t.ArrayType) and isinstance(wanted, t.ArrayType):
        inside, outside = held.elementType, wanted.elementType
        return f.transform(value, lambda each: as_type(each, inside, outside))
    return value.cast(wanted)
