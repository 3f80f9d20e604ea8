"""Two tables into two Delta tables, transaction by transaction: one query, one offset, and each change once.

    python copy_two_tables.py ROOT public.orders,public.customers TARGET CHECKPOINT

A batch holds whole transactions, of both tables, 300 at most. Its last commit LSN goes into Delta's commit. So whatever
comes again, after a crash or with another checkpoint, is known by its LSN and left out.
"""

import sys

import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

root, tables, target, checkpoint = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
changes = (
    spark.readStream.format("xidstream")
    .option("tables", tables)
    .option("maxTransactionsPerTrigger", 300)
    .load(root)
)


def write(batch, number):
    for table in tables.split(","):
        uri = f"{target}/{table}"
        done = DeltaTable(uri).transaction_version("copy") if DeltaTable.is_deltatable(uri) else None
        new = batch.filter((batch["_table"] == table) & (batch["_commit_lsn"] > (done or 0)))
        rows = new.select(f"`{table}`.*", "_change_type", "_commit_lsn", "_seq").toArrow()
        if rows.num_rows:
            upto = CommitProperties(
                app_transactions=[Transaction("copy", pc.max(rows["_commit_lsn"]).as_py())]
            )
            write_deltalake(uri, rows, mode="append", schema_mode="merge", commit_properties=upto)


query = (
    changes.writeStream.foreachBatch(write)
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
