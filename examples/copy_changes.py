"""A table's changes into a table of Parquet files, each exactly once: Structured Streaming over a change log.

    python copy_changes.py ROOT public.orders TARGET CHECKPOINT

ROOT is what the run got after `delta:`. It needs Spark 4.2, and neither Ray nor a run. It takes what there is and
ends. Start it again, and it goes on where it was, also after it was killed. Without availableNow it does not end.
"""

import sys

from pyspark.sql import SparkSession

root, table, target, checkpoint = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
changes = (
    spark.readStream.format("xidstream")
    .option("table", table)
    .option("maxTransactionsPerTrigger", 1000)
    .load(root)
)
query = (
    changes.writeStream.format("parquet")
    .option("path", target)
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
