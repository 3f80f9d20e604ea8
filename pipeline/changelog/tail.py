"""The rows of the log after a base, as the folds take them, and a few facts about them.

The facts come from one small job at plan time. It reads the contract's columns and the key, no wide value, and brings
back counts and names of columns, never a row. With them most plans stay simple: a log without unchanged values needs no
windows over former rows, one without preimages no chains of keys, and after a TRUNCATE nothing before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from xidstream.pipeline.changelog.internal_columns import (
    BROADCAST_BYTES,
    BROADCAST_ROWS,
    ORDER_TYPE,
    any_of,
    key_parts,
    order_of,
    prepared,
)
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.errors import Unsupported

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_ROW_BYTES = 64
"""What a row of a broadcast table takes beside its values, roughly."""


@dataclass(frozen=True)
class TailFacts:
    """``n_preimages``: old tuples. ``n_removals``: those and deletes. ``truncated_at``: place of the last TRUNCATE, as
    ``order_of`` packs it. ``unchanged``: names of the columns that some row lacks. ``key_bytes``: of texts in keys, or
    in the rows that are taken away where there is no key."""

    n_rows: int
    n_preimages: int
    n_removals: int
    truncated_at: int | None
    unchanged: frozenset[str]
    key_bytes: int

    @property
    def keys_are_few(self) -> bool:
        """Whether all keys of the tail may be sent to every executor."""
        n_bytes = self.key_bytes + self.n_rows * _ROW_BYTES
        return self.n_rows <= BROADCAST_ROWS and n_bytes <= BROADCAST_BYTES


def prepared_tail(tail: DataFrame, shape: TableShape) -> DataFrame:
    """``prepared`` rows with ``kind``, ``lsn``, ``seq``, ``place``, ``unchanged``, ``xid`` and ``time``."""
    from pyspark.sql import functions as f

    lsn, seq = f.col("_commit_lsn"), f.col("_seq")
    more = [
        f.col("_change_type").alias("kind"),
        lsn.alias("lsn"),
        seq.alias("seq"),
        order_of(lsn, seq).alias("place"),
        f.col("_unchanged").alias("unchanged"),
        *[
            f.col(name).alias(alias) if name in tail.columns else f.lit(None).cast(type_).alias(alias)
            for name, alias, type_ in (("_xid", "xid", "long"), ("_commit_timestamp", "time", "timestamp"))
        ],
    ]
    return prepared(tail, shape, more)


def tail_facts(tail: DataFrame, shape: TableShape) -> TailFacts:
    """Facts about the log's rows as the folds take them, to decide by before a fold. Runs a small job."""
    return facts_of(prepared_tail(tail, shape), shape)


def facts_of(rows: DataFrame, shape: TableShape) -> TailFacts:
    """Runs a job over ``prepared_tail``. Raises Unsupported where a change does not name its row: left out, it would
    leave a row that is gone, or the value before."""
    from pyspark.sql import functions as f

    kind = f.col("kind")
    types = [column.type for column in shape.columns.values()]
    texts = [part.name for part in key_parts(shape) if part.is_text or _is_text(types[part.column])]
    removals = kind.isin("update_preimage", "delete")
    if shape.key is None:
        texts = [f"c{i}" for i, type_ in enumerate(types) if _is_text(type_)]
    wide = reduce(add, [f.coalesce(f.octet_length(text), f.lit(0)) for text in texts], f.lit(0))
    if shape.key is None:
        wide = f.when(removals, wide)
    found = rows.agg(
        f.count(f.lit(1)),
        f.count(f.when(kind == "update_preimage", 1)),
        f.count(f.when(removals, 1)),
        f.max(f.when(kind == "truncate", f.col("place"))),
        f.array_distinct(f.flatten(f.collect_set("unchanged"))),
        f.coalesce(f.sum(wide), f.lit(0)),
        f.count(f.when(_is_nameless(shape), 1)),
    ).first()
    assert found is not None
    if found[6]:
        raise Unsupported(
            f"{found[6]} changes of table {shape.table} do not name their row: a column of its key "
            f"({', '.join(shape.key or ())}) has no value in them. A partition may have another REPLICA IDENTITY than "
            "its root",
            remedy="give each partition the replica identity of its root; then have the table read anew: `xidstream "
            f"snapshot request --table {shape.table}`",
        )
    truncated_at = None if found[3] is None else int(found[3])
    unchanged = frozenset(found[4] or ())
    return TailFacts(int(found[0]), int(found[1]), int(found[2]), truncated_at, unchanged, int(found[5]))


def _is_nameless(shape: TableShape) -> Column:
    """Whether a row, but for a TRUNCATE's, has null in a part of its key that cannot be null."""
    from pyspark.sql import functions as f

    parts = [f.col(part.name).isNull() for part in key_parts(shape) if not part.may_be_null]
    return (f.col("kind") != "truncate") & (any_of(parts) if parts else f.lit(False))


def guessed_bytes(tail: DataFrame) -> int:
    """What Spark's planner takes for the size of these rows: mostly that of their files. A Connect session does not
    tell: there they are taken for more than a join may send to every executor."""
    if not hasattr(tail, "_jdf"):
        return BROADCAST_BYTES + 1
    return int(str(tail._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))


def _is_text(type_: DataType) -> bool:
    from pyspark.sql import types as t

    return isinstance(type_, (t.StringType, t.BinaryType))


def behind_truncate(rows: DataFrame, facts: TailFacts) -> DataFrame:
    """What counts of ``prepared_tail``'s rows: those after the last TRUNCATE."""
    from pyspark.sql import functions as f

    if facts.truncated_at is None:
        return rows
    return rows.filter(f.col("place") > f.lit(str(facts.truncated_at)).cast(ORDER_TYPE))
