"""One read of a table by Spark's JDBC source into Parquet, in a process of its own: it needs the driver's jar.

``python -m benchmarks.jdbc_read JAR PORT DATABASE TABLE KEY ROWS OUT PARTITIONS`` prints the seconds of the second read
and the CPU seconds of all its processes in that time. The first read, of a thousandth, loads what is loaded once.
"""

from __future__ import annotations

import json
import os
import sys
import time

from pyspark.sql import SparkSession

from benchmarks.snapshot_peers import jvm_cpu_s
from xidstream.actors.runtime.java import ensure_java


def main() -> None:
    jar, port, database, table, key, n_rows, out, n_partitions = sys.argv[1:]
    ensure_java()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jar)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )

    def read(rows: int, path: str) -> None:
        frame = spark.read.jdbc(
            f"jdbc:postgresql://127.0.0.1:{port}/{database}",
            f"(select * from {table} where {key} <= {rows}) t",
            column=key,
            lowerBound=1,
            upperBound=rows,
            numPartitions=int(n_partitions),
            properties={"driver": "org.postgresql.Driver", "user": "postgres", "fetchsize": "10000"},
        )
        frame.write.parquet(path)

    read(max(1, int(n_rows) // 1000), f"{out}-warm")
    started_s, cpu_s = time.monotonic(), jvm_cpu_s(os.getpid())
    read(int(n_rows), out)
    spent = {"seconds": time.monotonic() - started_s, "cpu_s": jvm_cpu_s(os.getpid()) - cpu_s}
    assert spark.read.parquet(out).count() == int(n_rows)
    print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
