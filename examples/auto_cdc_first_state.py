"""The rows from before the stream, as files that the pipeline reads beside it.

    python auto_cdc_first_state.py ROOT STATE TABLE[,TABLE…]

It takes the tables as they are at the newest commit, writes them below STATE, and prints two lines for
spark-pipeline.yml. The pipeline takes the changes after that commit. (AUTO CDC has no `once`, and one flow per table.)

Where a table has files below STATE already it writes nothing, and fails: a pipeline may have read them.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from xidstream import ChangeLog


def main(root, state, tables):
    spark = SparkSession.builder.getOrCreate()
    found = ChangeLog(root).as_of(spark)
    for table in tables.split(","):
        rows = found[table].withColumns(
            {
                "_change_type": f.lit("insert"),
                "_commit_lsn": f.lit(int(found.lsn)).cast("long"),
                "_seq": f.lit(-1).cast("long"),
            }
        )
        rows.write.mode("errorifexists").parquet(f"{state}/{table}")
    print(f"  spark.cdc.state: {state}\n  spark.cdc.since: {found.lsn}")


if __name__ == "__main__":
    main(*sys.argv[1:])
