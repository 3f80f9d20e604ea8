"""A slowly changing dimension of type 2: every version of each row, and from when to when it was valid.

    python examples/history.py URI TABLE KEY[,KEY…] SINCE

It begins with the table as it was at the LSN ``SINCE``. Several versions of one transaction count as the last of them.
"""

import sys

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as f

from xidstream import ChangeLog


def history(log, spark, table, key, since):
    """The source's columns, ``valid_from`` (null: from before ``since``), ``valid_to`` (null: still)."""
    first = log.as_of(spark, lsn=since)[table]
    columns = first.columns
    first = first.withColumns(
        {
            "_change_type": f.lit("insert"),
            "_commit_lsn": f.lit(0).cast("long"),
            "_commit_timestamp": f.lit(None).cast("timestamp"),
            "_seq": f.lit(0).cast("long"),
            "_unchanged": f.lit(None).cast("array<string>"),
        }
    )
    rows = first.unionByName(log.changes(spark, table, since=since).select(first.columns))
    by_key = Window.partitionBy(*key).orderBy("_commit_lsn", "_seq")
    # A large value that did not change was not sent again: it is the one of the row's version before.
    sent = {c: ~f.coalesce(f.array_contains("_unchanged", c), f.lit(False)) for c in columns if c not in key}
    known = {c: f.last(f.when(sent[c], f.struct(c)), ignorenulls=True).over(by_key)[c] for c in sent}
    rows = rows.withColumns({**known, "next_lsn": f.lead("_commit_lsn").over(by_key)})
    rows = rows.withColumn("valid_to", f.lead("_commit_timestamp").over(by_key))
    is_last_of_its_transaction = f.col("next_lsn").isNull() | (f.col("next_lsn") > f.col("_commit_lsn"))
    is_there = ~f.col("_change_type").isin("delete", "update_preimage", "truncate")
    versions = rows.filter(is_last_of_its_transaction & is_there)
    return versions.select(*columns, f.col("_commit_timestamp").alias("valid_from"), "valid_to")


def main(uri, table, key, since):
    spark = SparkSession.builder.getOrCreate()
    rows = history(ChangeLog(uri), spark, table, key.split(","), since)
    rows.orderBy(*key.split(","), "valid_from").show(truncate=False)
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
