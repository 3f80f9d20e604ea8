"""A base and the log after it make the rows of a table. A plan for Spark: no row passes through Python.

**For the mirror and all other callers**, two functions whose signatures stay:

- ``net_changes(base, tail, shape)``: one row for each key that the tail touches. Its columns are the source's, in the
  shape's order and types (the key's are among them), then ``_text`` and ``_change_type``: names that no source's
  column has. Unchanged TOAST values are filled in. ``update_postimage`` is the key's row, whether there was one before
  or not. With ``delete`` there is none, and the columns beside the key mean nothing. A TRUNCATE touches every key of
  the base. Only for tables with a key.
- ``fold(base, tail, shape)``: the table's rows, in the source's columns and ``_text``. Tables without a key, too.

``base``: rows in the source's columns, with ``_text`` if the table has such values: a snapshot's (``shaped``), or a
base table's. For ``net_changes`` the part of a base that has all touched keys is enough. ``tail``: the log's rows
after the base that the snapshot does not contain (``contained``), in any order, in the contract's columns and the
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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.internal_columns import (
    BROADCAST_BYTES,
    key_as,
    key_parts,
    prepared,
    restored,
    same_key,
    value_columns,
)
from xidstream.pipeline.changelog.keyless import fold_keyless
from xidstream.pipeline.changelog.last_rows import LastRows
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.sieve import sieved
from xidstream.pipeline.changelog.tail import (
    TailFacts,
    behind_truncate,
    facts_of,
    guessed_bytes,
    prepared_tail,
)
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema.rows import CHANGE_TYPES, DELETE, UPDATE_POSTIMAGE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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


def base_alone(base: DataFrame, shape: TableShape) -> DataFrame:
    """All rows of a table that has no change after its base, as ``fold`` has them."""
    from pyspark.sql import functions as f

    return restored(prepared(base, shape), shape, [f.col("text").alias("_text")])


SET: Final = CHANGE_TYPES[UPDATE_POSTIMAGE]
DELETED: Final = CHANGE_TYPES[DELETE]


@dataclass(frozen=True)
class KeyedNet:
    """``last``: the last row of each key after the last TRUNCATE, not filled in yet. ``base``: all its rows, prepared.
    ``behind``: the tail's rows after the TRUNCATE. ``tail_bytes``: Spark's guess of the tail's size."""

    last: DataFrame
    base: DataFrame
    behind: DataFrame
    facts: TailFacts
    shape: TableShape
    net: LastRows
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
        """The rows of the base whose keys no row after the last TRUNCATE has."""
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
        """All rows, with one scan of the base: a row that lacks a value takes the place of the row that has it.

        So a row is lost here if it is taken for one of the base and its key is not in the base. No log has such rows.
        To find them would take a second look at the base's keys, or a shuffle of its rows.
        """
        from pyspark.sql import functions as f

        parts, columns = key_parts(self.shape), self.columns
        base = self.base.select(
            *key_as(parts, "f_k"), *[f.col(c).alias(f"f_{c}") for c in columns], f.col("text").alias("f_text")
        )
        touched = self._by_base_key()
        # The keys as the tail has them: the sieve need not wait for its windows.
        keys = self.behind.select(*key_as(parts, "t"))
        base, is_touched = sieved(base, "f_k", keys, parts, self.shape, self.facts.n_rows)
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
    from pyspark.sql import functions as f

    if shape.key is None:
        raise UsageError(f"table {shape.table} has no key: its rows are folded as a multiset")
    rows = prepared_tail(tail, shape)
    facts = facts_of(rows, shape) if facts is None else facts
    rows = behind_truncate(rows, facts)
    # No row that counts has a null there (``facts_of``). Spark would say so of one of two uses of these rows, and then
    # shuffle them twice.
    for part in key_parts(shape):
        rows = rows if part.may_be_null else rows.filter(f.col(part.name).isNotNull())
    toasted = [i for i, name in enumerate(shape.columns) if name in facts.unchanged]
    net = LastRows(shape, facts, toasted)
    last = net.with_history(rows) if toasted or existed else net.last_words(rows)
    return KeyedNet(last, prepared(base, shape), rows, facts, shape, net, guessed_bytes(tail))
