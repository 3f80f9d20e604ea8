"""A PySpark script with its own RayDP session that follows a publication.

    python examples/shop.py 'host=db dbname=shop user=repl' SLOT PUBLICATION STORAGE

``STORAGE`` is a folder or URI for spilled segments. Make the slot first: ``xidstream slot create --slot SLOT``.
On a machine without Java, ``actors.runtime.java.ensure_java`` puts the one from pip on PATH before Ray starts.
"""

import sys

import ray
import raydp

from xidstream import ChangeStream
from xidstream.actors.runtime.java import ensure_java


def handle(batch):
    """Whole transactions, in commit order. Called again with the same ones after a crash: deduplicate by LSN."""
    print(f"commits {batch.first_commit_lsn} to {batch.last_commit_lsn}:")
    for table in batch.tables:
        batch.dataframe(table).groupBy("_change_type").count().show()


def main(dsn, slot, publication, storage):
    ensure_java()
    ray.init()
    spark = raydp.init_spark(
        "shop",
        num_executors=1,
        executor_cores=1,
        executor_memory="512m",
        configs={"spark.sql.execution.arrow.pyspark.enabled": "true"},
    )
    stream = ChangeStream({"dsn": dsn, "slot": slot, "publication": publication, "storage": storage})
    query = stream.foreachBatch(handle).trigger(availableNow=True).start(spark)
    query.awaitTermination()
    print(query.lastProgress)
    raydp.stop_spark()


if __name__ == "__main__":
    main(*sys.argv[1:])
