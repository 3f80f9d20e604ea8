"""The fold of a table without a key: a multiset of whole rows, where an old tuple takes away one that is like it.

Rows are alike when PostgreSQL would show the same text for each column. That is the value and its ``_text``; for floats
the text of the number, because Spark's grouping takes -0.0 for 0.0, which are two texts.

Only rows that the tail takes away on balance are looked for in the base. What it adds on balance is appended. So a
table that is only inserted into is the base and the tail, one after the other, and no row is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xidstream.pipeline.changelog.internal_columns import all_of, prepared, restored, value_columns
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.tail import TailFacts, behind_truncate, facts_of, prepared_tail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


def fold_keyless(
    base: DataFrame, tail: DataFrame, shape: TableShape, facts: TailFacts | None = None
) -> DataFrame:
    """Fold a table without a key. The arguments are those of ``fold``."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    rows = prepared_tail(tail, shape)
    facts = facts_of(rows, shape) if facts is None else facts
    rows = behind_truncate(rows, facts)
    columns = [*value_columns(shape), "text"]
    before = prepared(base, shape).select(*columns)
    if facts.truncated_at is not None:
        before = before.filter(f.lit(False))
    if not facts.n_removals:
        there = before.unionByName(rows.select(*columns))
        return restored(there, shape, [f.col("text").alias("_text")])
    net = _net(rows, shape)
    added = net.filter("n > 0").withColumn("copy", f.explode(f.expr("sequence(1L, n)"))).select(*columns)
    names = [f"g{i}" for i in range(len(columns))]
    taken = net.filter("n < 0").select(
        *[f.col(g).alias(f"t_{g}") for g in names], (-f.col("n")).alias("n_taken")
    )
    if facts.keys_are_few:
        taken = f.broadcast(taken)
    before = before.select(*columns, *_likeness(shape))
    alike = all_of([f.col(g).eqNullSafe(f.col(f"t_{g}")) for g in names])
    kept = before.join(taken, alike, "left_anti").select(*columns)
    each = Window.partitionBy(*names).orderBy(f.lit(0))
    rest = before.join(taken, alike).withColumn("copy", f.row_number().over(each)).filter("copy > n_taken")
    there = kept.unionByName(rest.select(*columns)).unionByName(added)
    return restored(there, shape, [f.col("text").alias("_text")])


def _net(rows: DataFrame, shape: TableShape) -> DataFrame:
    """Each row of the tail with its values and ``g*``, and how many more of it there are after the tail (``n``)."""
    from pyspark.sql import functions as f

    sign = f.when(f.col("kind").isin("insert", "update_postimage"), 1).otherwise(-1).cast("long")
    values = [*value_columns(shape), "text"]
    marked = rows.select(*values, sign.alias("sign"), *_likeness(shape))
    grouped = marked.groupBy(*[f"g{i}" for i in range(len(values))])
    return grouped.agg(f.sum("sign").alias("n"), *[f.first(value).alias(value) for value in values]).filter(
        "n <> 0"
    )


def _likeness(shape: TableShape) -> list[Column]:
    """``g*``: what two rows that are alike have in common, and no others."""
    from pyspark.sql import functions as f

    found = []
    for i, column in enumerate(shape.columns.values()):
        value = f.col(f"c{i}")
        found.append((value.cast("string") if _is_float(column.type) else value).alias(f"g{i}"))
    # Spark does not group by maps.
    texts = f.array_sort(f.map_entries("text"))
    found.append(f.when(f.size("text") > 0, texts).alias(f"g{len(found)}"))
    return found


def _is_float(type_: DataType) -> bool:
    from pyspark.sql import types as t

    element = type_.elementType if isinstance(type_, t.ArrayType) else type_
    return isinstance(element, (t.FloatType, t.DoubleType))
