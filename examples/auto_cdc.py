"""Tables as they are (SCD 1) and with their history (SCD 2), by AUTO CDC: a pipeline of Spark 4.3 over a change log.

    spark-pipelines run --spec spark-pipeline.yml

For each table of `spark.cdc.tables` it keeps two: `orders` has the rows of `public.orders` as they are, and
`orders_history` has every version of each row. (Those of `sales.orders` are `sales_orders` and
`sales_orders_history`.) Run it again, and it goes on where it was. docs/spark-source.md
has the spec. auto_cdc_first_state.py comes before.

What a row of the log is to AUTO CDC:

- `insert` and `update_postimage` are upserts. `delete` is a delete.
- `update_preimage` is a delete of the old key. PostgreSQL sends it where a key changed, and under REPLICA IDENTITY
  FULL for each update. Where the key is the same, the upsert at the next `_seq` brings the row back at once.
- (`_commit_lsn`, `_seq`) is the sequence: it orders all changes, and no two share one.
- `truncate` has no key, and AUTO CDC knows none. The update fails, and names the commit. auto_cdc_truncated.py
  helps then.
- A row with `_unchanged` lacks a large value, which PostgreSQL did not send. AUTO CDC would put null in its place. The
  update fails. REPLICA IDENTITY FULL makes PostgreSQL send the value.
"""

import json

from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
root = spark.conf.get("spark.cdc.root")
state = spark.conf.get("spark.cdc.state")
since = spark.conf.get("spark.cdc.since")
truncated = json.loads(spark.conf.get("spark.cdc.truncated", "{}"))
OURS = ["_change_type", "_commit_lsn", "_commit_timestamp", "_xid", "_seq", "_unchanged", "_text"]


def refusal(table):
    """Why AUTO CDC cannot have a row; null where it can."""
    is_truncate = f.col("_change_type") == "truncate"
    where = f.concat(f.lit(f"{table}, commit LSN "), f.col("_commit_lsn").cast("string"))
    return f.when(is_truncate, f.concat(f.lit("there is a TRUNCATE: "), where)).when(
        f.size("_unchanged") > 0, f.concat(f.lit("a large value was not sent: "), where)
    )


def changes_of(table, schema):
    """The rows from before the stream, which are files, and the changes behind them."""
    changes = spark.readStream.format("xidstream").option("table", table).option("since", since).load(root)
    is_done = (f.col("_change_type") == "truncate") & f.col("_commit_lsn").isin(truncated.get(table, []))
    changes = changes.filter(~is_done)
    # In a column of the sequence, because Spark would leave out a column that nobody reads.
    seq = f.when(refusal(table).isNull(), f.col("_seq")).otherwise(f.raise_error(refusal(table)).cast("long"))
    first = spark.readStream.schema(schema).parquet(f"{state}/{table}")
    return changes.withColumn("_seq", seq).unionByName(first, allowMissingColumns=True)


def keep(table, keys):
    name = table.removeprefix("public.").replace(".", "_")
    # Asked for here, because a query function of a pipeline may not ask Spark for a schema.
    schema = spark.read.option("mergeSchema", True).parquet(f"{state}/{table}").schema
    dp.temporary_view(name=f"{name}_changes")(lambda: changes_of(table, schema))
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


for table, keys in json.loads(spark.conf.get("spark.cdc.tables")).items():
    keep(table, keys)
