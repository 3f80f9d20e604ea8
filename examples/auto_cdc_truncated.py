"""A TRUNCATE as what AUTO CDC knows: a delete for each row that was there, at the place of the TRUNCATE.

    python auto_cdc_truncated.py ROOT STATE TABLE KEY[,KEY…] LSN

LSN is the commit that the pipeline's error named. The deletes are files beside those of auto_cdc_first_state.py. The
pipeline reads them as they come: their sequence says where they belong. What is written already is not written again.

One line for the spec is printed, with which the pipeline passes over this TRUNCATE. Where the spec has the line
already, add the LSN to its table's list.
"""

import json
import sys

from pyspark.sql import SparkSession

from xidstream import ChangeLog


def main(root, state, table, keys, lsn):
    spark = SparkSession.builder.getOrCreate()
    keys, before = keys.split(","), int(lsn) - 1
    log = ChangeLog(root)
    own = log.changes(spark, table, since=before, until=int(lsn))
    truncates = own.filter("_change_type = 'truncate'").select("_commit_lsn", "_seq")
    inserted = own.filter("_change_type != 'truncate'").select(keys)
    there = log.as_of(spark, lsn=before)[table].select(keys).union(inserted).distinct()
    deletes = there.crossJoin(truncates).selectExpr("*", "'delete' AS _change_type")
    written = (
        spark.read.option("mergeSchema", True).parquet(f"{state}/{table}").filter("_change_type = 'delete'")
    )
    deletes = deletes.join(written, [*keys, "_commit_lsn", "_seq"], "left_anti")
    deletes.write.mode("append").parquet(f"{state}/{table}")
    print(f"  spark.cdc.truncated: '{json.dumps({table: [int(lsn)]})}'")


if __name__ == "__main__":
    main(*sys.argv[1:])
