"""The changes of a table between two LSNs: as the log has them, or in their net form, one row for each key.

The net form says what became of each key that existed before, or does so now: ``insert``, ``update`` or ``delete``,
with the values of its last row (a deleted one has its key alone). A key that came and went between the two LSNs is left
out. Whether a key existed before is told by its first row in the log: an insert, or the arrival of a changed key, says
no, and all others yes. Where a TRUNCATE stands between, the state before tells it, and each of its keys that nothing
set again is deleted.

Called by ``change_log``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from xidstream.pipeline.changelog.fold import KeyedNet, keyed_net
from xidstream.pipeline.changelog.internal_columns import key_as, key_parts, restored, same_key
from xidstream.pipeline.changelog.key_spans import KeySpans
from xidstream.pipeline.changelog.log_table import LogTable
from xidstream.pipeline.changelog.shape import TableShape, narrowed, shaped
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.changelog.tail import tail_facts
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS
from xidstream.pipeline.schema.rows import SNAPSHOT
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SEQ_MASK: Final = (1 << 63) - 1


def log_rows(
    spark: SparkSession,
    table: LogTable,
    shape: TableShape,
    since: Lsn,
    until: Lsn,
    spans: KeySpans | None = None,
) -> DataFrame:
    """The log's changes after ``since`` up to ``until``: the source's columns, then the contract's. ``spans``: those
    of these keys, and those that have none: a TRUNCATE is of every key."""
    from pyspark.sql import functions as f

    lsn, its_lsn = f.col("_commit_lsn"), pc.field("_commit_lsn")
    names = [*CONTRACT_COLUMNS, *shape.held_in]
    wanted = (its_lsn > int(since)) & (its_lsn <= int(until))
    by_key = None if spans is None else spans.wanted(table.schema, or_null=True)
    wanted = wanted if by_key is None else wanted & by_key
    rows = table.rows(spark, table.files(since + 1, until), names, wanted)
    rows = rows.filter((lsn > int(since)) & (lsn <= int(until)) & (f.col("_change_type") != SNAPSHOT))
    found = shaped(rows, shape)
    found = found if spans is None else found.filter(spans.within(or_null=True))
    contract = [name for name in found.columns if name not in shape.columns]
    return found.select(*map(quoted, [*shape.columns, *contract]))


def net_rows(spark: SparkSession, at: TableAt, since: Lsn, before: DataFrame | None) -> DataFrame:
    """The net form of the changes after ``since`` up to ``at.lsn``. ``before``: the table's state at ``since``; None
    where it is not known."""
    from pyspark.sql import functions as f

    tail = log_rows(spark, at.log_table, at.shape, since, at.lsn)
    base = tail.limit(0) if before is None else before
    facts = None
    if at.log_table.is_opaque:  # the job reads the key alone
        by_key = narrowed(at.shape, ())
        facts = tail_facts(log_rows(spark, at.log_table, by_key, since, at.lsn), by_key)
    net = keyed_net(base, tail, at.shape, existed=True, facts=facts)
    rows = net.rows
    if net.facts.truncated_at is not None and before is not None:
        rows = _with_truncated(net)
    gone, existed = f.col("gone"), f.col("existed")
    keys = {part.column for part in key_parts(at.shape)}
    # What a deleted row held is known or not, as it happens: its key is what says something.
    rows = rows.withColumns({c: f.when(~gone, f.col(c)) for i, c in enumerate(net.columns) if i not in keys})
    kind = f.when(gone, "delete").when(existed, "update").otherwise("insert").alias("_change_type")
    return restored(
        rows.filter(~gone | existed),
        at.shape,
        [
            kind,
            f.col("lsn").alias("_commit_lsn"),
            f.col("time").alias("_commit_timestamp"),
            f.col("xid").alias("_xid"),
            f.col("seq").alias("_seq"),
            f.col("missing").alias("_unchanged"),
            f.col("text").alias("_text"),
        ],
    )


def _with_truncated(net: KeyedNet) -> DataFrame:
    from pyspark.sql import functions as f

    parts = key_parts(net.shape)
    there = net.base.select(*key_as(parts, "e"), f.lit(True).alias("was_there"))
    rows = net.rows.drop("existed").join(there, same_key(parts, "k", "e"), "left")
    rows = rows.withColumn("existed", f.coalesce("was_there", f.lit(False)))
    place = net.facts.truncated_at or 0
    keys = {part.column for part in parts}
    values = [f.col(c) if i in keys else f.lit(None).alias(c) for i, c in enumerate(net.columns)]
    truncated = net.untouched().select(
        *values,
        f.lit(None).alias("text"),
        f.lit(True).alias("gone"),
        f.lit(True).alias("existed"),
        f.lit(None).alias("missing"),
        f.lit(place >> 63).alias("lsn"),
        f.lit(place & _SEQ_MASK).alias("seq"),
        f.lit(None).alias("xid"),
        f.lit(None).alias("time"),
    )
    return rows.select(*truncated.columns).unionByName(truncated)
