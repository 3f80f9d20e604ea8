"""A PySpark script with its own Spark session that follows a publication.

    python examples/shop.py 'host=db dbname=shop user=repl' SLOT PUBLICATION STORAGE

``STORAGE`` is a folder or URI for spilled segments. Make the slot first: ``xidstream slot create --slot SLOT``.
``spark_session`` finds a Java, starts Ray, and leaves CPUs for the pipeline; the session ends with the process.
"""

import sys

from xidstream import ChangeStream, spark_session


def handle(batch):
    """Whole transactions, in commit order. Called again with the same ones after a crash: deduplicate by LSN."""
    print(f"commits {batch.first_commit_lsn} to {batch.last_commit_lsn}:")
    for table in batch.tables:
        batch.dataframe(table).groupBy("_change_type").count().show()


def main(dsn, slot, publication, storage):
    spark = spark_session("shop")
    stream = ChangeStream({"dsn": dsn, "slot": slot, "publication": publication, "storage": storage})
    query = stream.foreachBatch(handle).trigger(availableNow=True).start(spark)
    query.awaitTermination()
    print(query.lastProgress)


if __name__ == "__main__":
    main(*sys.argv[1:])
