"""Two tables into two tables of Delta, transaction by transaction: one query, one offset, and each batch once.

    python copy_two_tables.py ROOT public.orders,public.customers TARGET CHECKPOINT

A batch holds whole transactions, of both tables. Spark repeats a batch that it has not noted as done, with the same
number and the same rows. So the number goes into the commit, and a batch that is in a table is left out there.
"""

import sys

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

root, tables, target, checkpoint = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
changes = spark.readStream.format("xidstream").option("tables", tables).load(root)


def write(batch, number):
    for table in tables.split(","):
        uri = f"{target}/{table}"
        done = DeltaTable(uri).transaction_version("copy") if DeltaTable.is_deltatable(uri) else None
        if done is not None and done >= number:
            continue
        own = batch.filter(batch["_table"] == table).select(
            f"`{table}`.*", "_change_type", "_commit_lsn", "_seq"
        )
        once = CommitProperties(app_transactions=[Transaction("copy", number)])
        rows = pa.table(own.toArrow())
        write_deltalake(uri, rows, mode="append", schema_mode="merge", commit_properties=once)


query = (
    changes.writeStream.foreachBatch(write)
    .option("checkpointLocation", checkpoint)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
