"""A base and the log behind it make the rows of a table. A plan for Spark: no row passes through Python.

**For the mirror and all other callers**, two functions whose signatures stay:

- ``net_changes(base, tail, shape)``: one row for each key that the tail touches. Its columns are the source's, in the
  shape's order and types (the key's are among them), then ``_text`` and ``_change_type``: names that no source's
  column has. Unchanged TOAST values are filled in. ``update_postimage`` is the key's row, whether there was one before
  or not. With ``delete`` there is none, and the columns beside the key mean nothing. A TRUNCATE touches every key of
  the base. Only for tables with a key.
- ``fold(base, tail, shape)``: the table's rows, in the source's columns and ``_text``. Tables without a key, too.

``base``: rows in the source's columns, with ``_text`` if the table has such values: a snapshot's (``shaped``), or a
base table's. For ``net_changes`` the part of a base that has all touched keys is enough. ``tail``: the log's rows
behind the base that the snapshot does not contain (``contained``), in any order, in the contract's columns and the
source's (``shaped``). ``facts``: those of the tail (``tail_facts``), if they are known; else a small job finds them.

The rule. insert and update_postimage set a row, delete removes it, and so does a preimage whose postimage has another
key. TRUNCATE removes all before it. The last word on a key counts. So untouched rows of the base are kept by a join
that broadcasts the touched keys where they are few: they cost a scan and no shuffle (``sieve``).

An unchanged value is the one that *this row* had before. A row lives under one key in a *stay*: it begins in the base,
by an insert, or by the arrival of a changed key, and ends by a delete or a departure. Within a stay the last known
value is found by a window over the tail. A stay that began by an arrival goes on with the values of the stay that it
departed from (``inherited``). A stay of the base has the base's value under the key that it began with. A former life
of the same key is another stay, whose values are never taken. Where a stay began by an insert that lacks a value (an
update brought the row into a row filter), nothing in the log has that value: it is null.

Considered: ``max_by`` over whole rows (a sort aggregate in Spark 3.5); a merge by key over base and tail (shuffles the
base: three times as long).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.rows import CHANGE_TYPES, DELETE, UPDATE_POSTIMAGE
from xidstream.pipeline.state.inherited import inherited_values
from xidstream.pipeline.state.keyless import fold_keyless
from xidstream.pipeline.state.prepared import (
    BROADCAST_BYTES,
    ORDER_TYPE,
    TEXT_TYPE,
    any_of,
    has_texts,
    key_as,
    key_parts,
    prepared,
    restored,
    same_key,
    value_columns,
)
from xidstream.pipeline.state.shape import TableShape
from xidstream.pipeline.state.sieve import sieved
from xidstream.pipeline.state.tail import TailFacts, behind_truncate, facts_of, guessed_bytes, prepared_tail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def net_changes(
    base: DataFrame, tail: DataFrame, shape: TableShape, facts: TailFacts | None = None
) -> DataFrame:
    """One row for each touched key: the source's columns, ``_text``, ``_change_type``."""
    from pyspark.sql import functions as f

    net = keyed_net(base, tail, shape, facts=facts)
    rows = net.rows.select(*net.columns, "text", "gone")
    if net.facts.truncated_at is not None:
        rows = rows.unionByName(net.untouched().select(*net.columns, "text", f.lit(True).alias("gone")))
    kind = f.when(f.col("gone"), DELETED).otherwise(SET).alias("_change_type")
    return restored(rows, shape, [f.col("text").alias("_text"), kind])


def fold(base: DataFrame, tail: DataFrame, shape: TableShape, facts: TailFacts | None = None) -> DataFrame:
    """All rows of the table: the source's columns, ``_text``."""
    from pyspark.sql import functions as f

    if shape.key is None:
        return fold_keyless(base, tail, shape, facts)
    net = keyed_net(base, tail, shape, facts=facts)
    there = net.base_and_changes() if net.fits_one_scan else net.base_or_changes()
    return restored(there, shape, [f.col("text").alias("_text")])


SET: Final = CHANGE_TYPES[UPDATE_POSTIMAGE]
DELETED: Final = CHANGE_TYPES[DELETE]
_OF_CHANGES: Final = ("lsn", "seq", "xid", "time")


@dataclass(frozen=True)
class KeyedNet:
    """``last``: the last row of each key behind the last TRUNCATE, not filled in yet. ``base``: all its rows, prepared.
    ``behind``: the tail's rows behind the TRUNCATE. ``tail_bytes``: Spark's guess of the tail's size."""

    last: DataFrame
    base: DataFrame
    behind: DataFrame
    facts: TailFacts
    shape: TableShape
    net: _Net
    tail_bytes: int

    @property
    def columns(self) -> list[str]:
        return value_columns(self.shape)

    @property
    def rows(self) -> DataFrame:
        """``k*``, ``c*`` and ``text``; ``lsn``, ``seq``, ``xid`` and ``time`` of the key's last change; ``gone``;
        ``existed``, whether the key was there before the tail (but for a TRUNCATE); ``missing``, the columns that no
        earlier row gave a value."""
        # What a TRUNCATE took gives no value.
        return self.net.filled(self.last, self.base if self.facts.truncated_at is None else None)

    def untouched(self) -> DataFrame:
        """The rows of the base whose keys no row behind the last TRUNCATE has."""
        from pyspark.sql import functions as f

        parts = key_parts(self.shape)
        touched = self.behind.select(*key_as(parts, "t"))
        if not self.facts.keys_are_few:
            return self.base.join(touched, same_key(parts, "k", "t"), "left_anti")
        base, is_touched = sieved(self.base, "k", touched, parts, self.shape, self.facts.n_rows)
        return base.join(f.broadcast(touched), is_touched, "left_anti").select(*self.base.columns)

    def base_or_changes(self) -> DataFrame:
        """All rows: those of the base that nothing touched, and the last ones. Rows that lack a value look for it in
        the base, which is scanned once more."""
        from pyspark.sql import functions as f

        there = self.rows.filter(~f.col("gone")).select(*self.columns, "text")
        if self.facts.truncated_at is not None:
            return there
        return self.untouched().select(*self.columns, "text").unionByName(there)

    @property
    def fits_one_scan(self) -> bool:
        """Whether the rows that lack a value can be sent to every executor."""
        is_small = self.facts.keys_are_few and self.tail_bytes <= BROADCAST_BYTES
        return self.net.has_gaps and self.facts.truncated_at is None and is_small

    def base_and_changes(self) -> DataFrame:
        """All rows, with one scan of the base: a row that lacks a value takes the place of the row that has it."""
        from pyspark.sql import functions as f

        parts, columns = key_parts(self.shape), self.columns
        base = self.base.select(
            *key_as(parts, "f_k"), *[f.col(c).alias(f"f_{c}") for c in columns], f.col("text").alias("f_text")
        )
        touched = self._by_base_key()
        base, is_touched = sieved(base, "f_k", touched, parts, self.shape, self.facts.n_rows)
        is_patch = f.col("is_patch")
        rows = base.join(f.broadcast(touched), is_touched, "left").filter(is_patch.isNull() | is_patch)
        patched = self.net.filled_from("f_")
        there = rows.select(
            *[f.when(is_patch, patched[c]).otherwise(f.col(f"f_{c}")).alias(c) for c in columns],
            f.when(is_patch, patched["text"]).otherwise(f.col("f_text")).alias("text"),
        )
        complete = self.net.filled(self.last.filter(~f.col("gone") & ~self.net.lacks_a_value()), None)
        return there.unionByName(complete.select(*columns, "text"))

    def _by_base_key(self) -> DataFrame:
        """One row for each touched key, in ``t*``. ``is_patch``: whether the base's row with that key has what some
        last row lacks, which then is here. Else the base's row goes."""
        from pyspark.sql import functions as f

        parts, lacks, values = key_parts(self.shape), self.net.lacks_a_value(), self.net.own_columns()
        if not self.facts.n_preimages:  # no key is another than it was
            patch = [f.when(lacks, f.col(name)).alias(name) for name in values]
            return self.last.select(*key_as(parts, "t"), lacks.alias("is_patch"), *patch)
        befores = [f.col(f"b{i}") for i in range(len(parts))]
        patches = self.last.filter(lacks).select(*befores, *values, f.lit(True).alias("is_patch"))
        touched = self.last.select(*key_as(parts, "t")).join(patches, same_key(parts, "t", "b"), "left")
        is_patch = f.coalesce("is_patch", f.lit(False)).alias("is_patch")
        return touched.select(*[f"t{i}" for i in range(len(parts))], is_patch, *values)


def keyed_net(
    base: DataFrame,
    tail: DataFrame,
    shape: TableShape,
    *,
    existed: bool = False,
    facts: TailFacts | None = None,
) -> KeyedNet:
    """``existed``: whether that column is wanted; else it is null. ``facts``: the tail's; a small job finds them."""
    if shape.key is None:
        raise UsageError(f"table {shape.table} has no key: its rows are folded as a multiset")
    rows = prepared_tail(tail, shape)
    facts = facts_of(rows, shape) if facts is None else facts
    rows = behind_truncate(rows, facts)
    toasted = [i for i, name in enumerate(shape.columns) if name in facts.unchanged]
    net = _Net(shape, facts, toasted)
    last = net.with_history(rows) if toasted or existed else net.last_words(rows)
    return KeyedNet(last, prepared(base, shape), rows, facts, shape, net, guessed_bytes(tail))


class _Net:
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
        """Of ``last``: whether the row is there, and only the base knows all of it.

        A row that an insert began without a value was in no state before (a row filter let it in): nobody knows that
        value, and it is null.
        """
        from pyspark.sql import functions as f

        return ~f.col("gone") & f.col("from_base") & any_of([f.col(f"n{i}").isNull() for i in self._toasted])

    def own_columns(self) -> list[str]:
        """Of ``last``: what ``filled_from`` takes beside the base's columns."""
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
