"""``python -m benchmarks.store_reads``: a state and changes in an object store, whole and in two of 30 columns.

The store is moto's S3 in a process of its own. A log as the sink writes it has one table of a key and 29 texts of
random characters, which no encoding makes smaller, and a transaction that has updated one in a hundred of its rows.
Each way of reading goes to Spark's ``noop`` sink. Requests and bytes are counted by the server and are the same each
time, those of Parquet files and those of the tables' own logs apart. Seconds are of this machine, the median of some.
It prints one line of JSON for each way.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.results import median
from tests.s3_server import CountedS3, counted_s3, n_bytes_of
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, keyed
from tests.spark.support import LocalSegments, batch_of, memory_frame, put_memory, read_memory
from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.session import SPARK_CONF

_N_COLUMNS: Final = 30
_TWO: Final = ["c7", "c20"]
_TABLE: Final = keyed("wide", {"id": INT8, **{f"c{i}": TEXT for i in range(1, _N_COLUMNS)}}, "id", relid=1)


def _no_session() -> Any:
    raise AssertionError("the log is written without Spark")


def _write_log(s3: CountedS3, folder: str, n_rows: int) -> str:
    segments = LocalSegments(folder)

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, segments, number)
        return SinkBatch(
            batch, _no_session, memory_frame, segments, read_memory, put_memory, segments.storage
        )

    def row(i: int) -> dict[str, Any]:
        return {"id": i, **{f"c{c}": secrets.token_urlsafe(27) for c in range(1, _N_COLUMNS)}}

    root = f"{s3.uri}/log"
    log = LogMaker(root, None, make_batch, storage_options=s3.options)
    log.snapshot(_TABLE, [row(i) for i in range(n_rows)])
    log.tables.clear()
    log.commit((_TABLE, [{**row(i), "_change": UPDATE_POSTIMAGE} for i in range(0, n_rows, 100)]))
    log.sink.close()
    return root


def _session() -> Any:
    from pyspark.sql import SparkSession

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    builder = SparkSession.builder.master("local[2]").appName("store-reads")
    for key, value in {**SPARK_CONF, "spark.driver.memory": "2g", "spark.driver.host": "127.0.0.1"}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _ways(log: LogFrames, spark: Any) -> dict[str, Callable[[], Any]]:
    name = _TABLE.name
    return {
        "state, all columns": lambda: log.as_of(spark)[name],
        "state, select of two": lambda: log.as_of(spark)[name].select(*_TWO),
        "state, columns=two": lambda: log.as_of(spark).table(name, _TWO),
        "changes, all columns": lambda: log.changes(spark, name),
        "changes, select of two": lambda: log.changes(spark, name).select("_change_type", *_TWO),
        "changes, columns=two": lambda: log.changes(spark, name, columns=_TWO),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--without-columns", action="store_true", help="of a version that has no such argument"
    )
    asked = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "testing"
    with counted_s3() as s3, tempfile.TemporaryDirectory(prefix="xs-store-") as folder:
        root = _write_log(s3, folder, asked.rows)
        spark = _session()
        try:
            for way, made in _ways(LogFrames(root, storage_options=s3.options), spark).items():
                if asked.without_columns and "columns=" in way:
                    continue
                took_s = []
                for _ in range(asked.rounds + 1):  # the first warms up
                    s3.asked()
                    started_s = time.monotonic()
                    made().write.format("noop").mode("overwrite").save()
                    took_s.append(time.monotonic() - started_s)
                    requests = s3.asked()
                files = [
                    each for each in requests if "/_delta_log/" not in each.what and ".parquet" in each.what
                ]
                print(
                    json.dumps(
                        {
                            "way": way,
                            "file_requests": len(files),
                            "file_bytes": n_bytes_of(files),
                            "other_requests": len(requests) - len(files),
                            "seconds": round(median(took_s[1:]), 2),
                        }
                    ),
                    flush=True,
                )
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
