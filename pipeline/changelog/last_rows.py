"""The last row of each key that a tail touches, with what the tail knows of the values that the row lacks.

``LastRows`` makes two plans. Where no row of the tail lacks a value, the last word on each key is all there is to it
(``last_words``). Else each row gets the last known values of its stay (``with_history``; what a stay is, ``fold``
says), and ``filled`` or ``filled_from`` put them, and the base's, in the place of those that it lacks.

Called by ``fold`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.inherited import inherited_values
from xidstream.pipeline.changelog.internal_columns import (
    ORDER_TYPE,
    TEXT_TYPE,
    any_of,
    has_texts,
    key_as,
    key_parts,
    same_key,
    value_columns,
)
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.tail import TailFacts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_OF_CHANGES: Final = ("lsn", "seq", "xid", "time")


class LastRows:
    """``toasted``: indexes of the columns that some row of the tail lacks."""

    def __init__(self, shape: TableShape, facts: TailFacts, toasted: Sequence[int]) -> None:
        self._shape = shape
        self._facts = facts
        self._toasted = list(toasted)
        self._parts = key_parts(shape)
        self._keys = [part.name for part in self._parts]
        self._names = list(shape.columns)

    def last_words(self, rows: DataFrame) -> DataFrame:
        """The last row of each key, where no row lacks a value."""
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        newest = Window.partitionBy(*self._keys).orderBy(f.desc("lsn"), f.desc("seq"))
        last = rows.withColumn("n", f.row_number().over(newest)).filter("n = 1")
        return last.select(*self._rows_columns(), self._gone(), f.lit(None).cast("boolean").alias("existed"))

    def with_history(self, rows: DataFrame) -> DataFrame:
        """The last row of each key, with the last known value of its stay in ``n*`` (a struct; null: unknown), and the
        key in ``b*`` under which the base may have it, if the row is ``from_base`` at all."""
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        rows = self._with_arrivals(rows)
        in_order = Window.partitionBy(*self._keys).orderBy("lsn", "seq")
        upto = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
        kind, place = f.col("kind"), f.col("place")
        begins = (kind == "insert") | f.col("arrives")
        columns = [
            f.last(f.when(begins, place), ignorenulls=True).over(upto).alias("begin"),
            f.first(~begins).over(upto).alias("existed"),
            f.lead(place).over(in_order).isNull().alias("is_last"),
        ]
        sets = kind.isin("insert", "update_postimage")
        for i in self._toasted:
            value = f.when(sets & ~self._lacks(i), self._value(i, place))
            columns.append(f.last(value, ignorenulls=True).over(upto).alias(f"n{i}"))
        rows = rows.select("*", *columns)
        begin = f.col("begin")
        # A value from before the stay is another row's.
        for i in self._toasted:
            is_own = begin.isNull() | (f.col(f"n{i}.place") >= begin)
            rows = rows.withColumn(f"n{i}", f.when(is_own, f.col(f"n{i}")))
        last = rows.filter("is_last").select(
            *self._rows_columns(),
            self._gone(),
            "existed",
            "begin",
            *[f"n{i}" for i in self._toasted],
            *key_as(self._parts, "b"),
            begin.isNull().alias("from_base"),
        )
        if self._toasted and self._facts.n_preimages:
            last = self._with_inherited(last, rows)
        return last

    def filled(self, last: DataFrame, base: DataFrame | None) -> DataFrame:
        """``last`` with the values that it lacks, from its history and from the base."""
        from pyspark.sql import functions as f

        if not self._toasted:
            none = f.lit(None).cast("array<string>").alias("missing")
            return last.select(*self._rows_columns(), "gone", "existed", none)
        if base is not None:
            last = self._with_base(last, base)
        lacking = [f.when(f.col(f"n{i}").isNull(), f.lit(self._names[i])) for i in self._toasted]
        missing = f.array_compact(f.array(*lacking))
        missing = f.when(~f.col("gone") & (f.size(missing) > 0), missing).alias("missing")
        known = self._filled_columns({i: f.col(f"n{i}") for i in self._toasted})
        values = [value.alias(name) for name, value in known.items()]
        return last.select(*self._keys, *values, *_OF_CHANGES, "gone", "existed", missing)

    @property
    def has_gaps(self) -> bool:
        """Whether some row of the tail lacks a value."""
        return bool(self._toasted)

    def lacks_a_value(self) -> Column:
        """Whether a row of ``last`` is there, and only the base knows all of it.

        A row that an insert began without a value was in no state before (a row filter let it in): nobody knows that
        value, and it is null.
        """
        from pyspark.sql import functions as f

        return ~f.col("gone") & f.col("from_base") & any_of([f.col(f"n{i}").isNull() for i in self._toasted])

    def own_columns(self) -> list[str]:
        """The columns of ``last`` that ``filled_from`` takes beside the base's columns."""
        return [*value_columns(self._shape), "text", *[f"n{i}" for i in self._toasted]]

    def filled_from(self, prefix: str) -> dict[str, Column]:
        """``c*`` and ``text`` of rows of ``last`` that stand beside the base's, whose names have ``prefix``."""
        from pyspark.sql import functions as f

        there = {i: self._value(i, f.lit(0).cast(ORDER_TYPE), prefix) for i in self._toasted}
        return self._filled_columns({i: f.coalesce(f.col(f"n{i}"), value) for i, value in there.items()})

    def _filled_columns(self, known: dict[int, Column]) -> dict[str, Column]:
        from pyspark.sql import functions as f

        columns = {
            c: known[i]["value"] if i in known else f.col(c) for i, c in enumerate(value_columns(self._shape))
        }
        return columns | {"text": self._text(known)}

    # -- parts -----------------------------------------------------------------------------------------

    def _rows_columns(self) -> list[str]:
        return [*self._keys, *value_columns(self._shape), "text", *_OF_CHANGES]

    def _gone(self) -> Column:
        from pyspark.sql import functions as f

        return f.col("kind").isin("delete", "update_preimage").alias("gone")

    def _lacks(self, i: int) -> Column:
        from pyspark.sql import functions as f

        return f.coalesce(f.array_contains("unchanged", self._names[i]), f.lit(False))

    def _value(self, i: int, place: Column, prefix: str = "") -> Column:
        from pyspark.sql import functions as f

        parts = [place.alias("place"), f.col(f"{prefix}c{i}").alias("value")]
        if self._has_text(i):
            parts.append(f.col(f"{prefix}text")[self._names[i]].alias("text"))
        return f.struct(*parts)

    def _has_text(self, i: int) -> bool:
        return has_texts(self._shape.columns[self._names[i]].type)

    def _text(self, known: dict[int, Column]) -> Column:
        """``text`` with the texts of the values that were filled in."""
        from pyspark.sql import functions as f

        with_text = [i for i in self._toasted if self._has_text(i)]
        if not with_text:
            return f.col("text")
        names = f.array(*[f.lit(self._names[i]) for i in with_text])
        texts = f.array(*[known[i]["text"] for i in with_text])
        own = f.map_filter(
            f.coalesce(f.col("text"), f.create_map().cast(TEXT_TYPE)),
            lambda k, _: ~f.array_contains(names, k),
        )
        all_texts = f.map_filter(
            f.map_concat(own, f.map_from_arrays(names, texts)), lambda _, v: v.isNotNull()
        )
        return f.when(f.size(all_texts) > 0, all_texts)

    def _with_arrivals(self, rows: DataFrame) -> DataFrame:
        """``arrives``: whether the row's key was another one before."""
        from pyspark.sql import functions as f

        if not self._facts.n_preimages:
            return rows.withColumn("arrives", f.lit(False))
        old = rows.filter("kind = 'update_preimage'").select(
            f.col("lsn").alias("o_lsn"), (f.col("seq") + 1).alias("o_seq"), *key_as(self._parts, "o")
        )
        if self._facts.keys_are_few:
            old = f.broadcast(old)
        here = (f.col("lsn") == f.col("o_lsn")) & (f.col("seq") == f.col("o_seq"))
        rows = rows.join(old, here & (f.col("kind") == "update_postimage"), "left")
        # An old tuple is sent, too, where a key that is stored outside of the row did not change.
        arrives = f.col("o_lsn").isNotNull() & ~same_key(self._parts, "k", "o")
        names = [*self._rows_columns(), "kind", "place", "unchanged"]
        return rows.select(*names, f.coalesce(arrives, f.lit(False)).alias("arrives"))

    def _with_inherited(self, last: DataFrame, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        lacks = any_of([self._lacks(i) for i in self._toasted])
        inherited = inherited_values(rows.filter(f.col("arrives") & lacks), rows, self._parts, self._toasted)
        last = last.join(inherited, f.col("begin") == f.col("id"), "left")
        came = f.col("id").isNotNull()
        replaced = {
            f"b{i}": f.when(came, f.col(f"h_b{i}")).otherwise(f.col(f"b{i}")) for i in range(len(self._parts))
        }
        replaced["from_base"] = f.when(came, f.col("h_from_base")).otherwise(f.col("from_base"))
        replaced |= {f"n{i}": f.coalesce(f"n{i}", f"h_n{i}") for i in self._toasted}
        return last.withColumns(replaced)

    def _with_base(self, last: DataFrame, base: DataFrame) -> DataFrame:
        """What is still unknown is the base's, under the key that the row had there."""
        from pyspark.sql import functions as f

        n_parts = len(self._parts)
        wanted = last.filter(self.lacks_a_value()).select(
            *[f.col(f"b{i}").alias(f"w{i}") for i in range(n_parts)]
        )
        if self._facts.keys_are_few:
            wanted = f.broadcast(wanted)
        values = [self._value(i, f.lit(0).cast(ORDER_TYPE)).alias(f"v{i}") for i in self._toasted]
        found = base.select(*key_as(self._parts, "f"), *values).join(
            wanted, same_key(self._parts, "f", "w"), "left_semi"
        )
        last = last.join(found, same_key(self._parts, "b", "f") & f.col("from_base"), "left")
        return last.withColumns({f"n{i}": f.coalesce(f"n{i}", f"v{i}") for i in self._toasted})
