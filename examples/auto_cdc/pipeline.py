"""Tables as they are (SCD 1) and with their history (SCD 2), by AUTO CDC: a pipeline of Spark 4.3 over a change log.

    spark-pipelines run --spec spark-pipeline.yml

For each table of `spark.cdc.tables` the pipeline keeps two tables: `orders`, the rows of `public.orders` as they are, and
`orders_history`, every version of each row. Run it again, and it goes on where it was. The catalog's tables must take
MERGE, as those of Iceberg and Delta do: AUTO CDC writes by nothing else. spark-pipeline.yml says what to set.

What the rows of the log are to AUTO CDC:

- `insert` and `update_postimage` are upserts, and `delete` is a delete.
- `update_preimage` is a delete, too: of the old key. PostgreSQL sends it where a key changed. Under REPLICA IDENTITY
  FULL it sends it for each update. Then the row comes again at the next `_seq`, as an upsert: no row is lost.
- (`_commit_lsn`, `_seq`) is the sequence. It orders all changes, and no two have the same.
- `truncate` has no key, and AUTO CDC knows none. The run ends, and names its commit.
- A row with `_unchanged` lacks a large value that PostgreSQL did not send. AUTO CDC would write null over it. The run
  ends, and names the table: REPLICA IDENTITY FULL makes PostgreSQL send such values.

Rows from before the stream come from files that first_state.py wrote: AUTO CDC takes one flow for a table, a stream,
and has no `once`.
"""

import json

from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
root = spark.conf.get("spark.cdc.root")
state = spark.conf.get("spark.cdc.state", None)
since = spark.conf.get("spark.cdc.since", None)
OURS = ["_change_type", "_commit_lsn", "_commit_timestamp", "_xid", "_seq", "_unchanged", "_text"]


def refusal(table):
    """Null, or why AUTO CDC cannot have this row."""
    place = f.concat(f.lit(f" {table} in the commit at LSN "), f.col("_commit_lsn").cast("string"))
    truncated = f.concat(f.lit("a TRUNCATE of"), place, f.lit(": write a new first state and run a full refresh"))
    missing = f.concat(f.lit("a large value was not sent of"), place, f.lit(": set REPLICA IDENTITY FULL"))
    return f.when(f.col("_change_type") == "truncate", truncated).when(f.size("_unchanged") > 0, missing)


def changes_of(table):
    changes = spark.readStream.format("xidstream").option("table", table)
    if since is not None:
        changes = changes.option("since", since)
    changes = changes.load(root)
    # In a column of the sequence, which is never left out.
    checked = f.when(refusal(table).isNull(), f.col("_seq")).otherwise(f.raise_error(refusal(table)).cast("long"))
    changes = changes.withColumn("_seq", checked)
    if state is None:
        return changes
    files = f"{state}/{table}"
    return changes.unionByName(spark.readStream.schema(STATES[table]).parquet(files), allowMissingColumns=True)


def keep(table, keys):
    name = table.split(".")[-1]
    dp.temporary_view(name=f"{name}_changes")(lambda: changes_of(table))
    for target, scd_type in ((name, 1), (f"{name}_history", 2)):
        dp.create_streaming_table(target)
        dp.create_auto_cdc_flow(
            target=target,
            source=f"{name}_changes",
            keys=keys,
            sequence_by=f.struct("_commit_lsn", "_seq"),
            apply_as_deletes=f.col("_change_type").isin("delete", "update_preimage"),
            except_column_list=OURS,
            stored_as_scd_type=scd_type,
        )


tables = json.loads(spark.conf.get("spark.cdc.tables"))
STATES = {table: spark.read.parquet(f"{state}/{table}").schema for table in tables} if state else {}
for table, keys in tables.items():
    keep(table, keys)
