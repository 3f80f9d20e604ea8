"""``python -m benchmarks.spark_source``: rows a second of ``format("xidstream")`` against Spark's own Parquet reader.

Both read the same files of one table's change log, all columns, into Spark's sink that drops them, in turn: the ratio
is what counts on a machine with other work. CPU seconds are those of the JVM and its Python workers. It needs Spark 4
(``make test-spark4`` makes ``.venv-spark4``), and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from deltalake import DeltaTable

from benchmarks.results import percentile
from benchmarks.source import PUBLICATION, Source, server
from xidstream.actors.runtime.java import ensure_java

_ANSWER_S = 300


def _write_log(root: str, n_transactions: int, rows_each: int) -> None:
    """A run writes the log of one table: large transactions, whose files are linked at COMMIT."""
    with server() as publisher:
        source = Source(publisher, "spark_source")
        options = ["--dsn", source.dsn, "--slot", source.name, "--publication", PUBLICATION, "--create-slot"]
        options += [
            "--storage",
            f"{root}-storage",
            "--sink",
            f"delta:{root}",
            "--snapshot",
            "never",
            "--available-now",
        ]
        run = [sys.executable, "-m", "actors", "run", *options]
        subprocess.run(run, check=True, timeout=_ANSWER_S)  # makes the slot
        for _ in range(n_transactions):
            source.insert(rows_each)
        subprocess.run(run, check=True, timeout=_ANSWER_S)
        source.close()


def _cpu_s() -> float:
    spent = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        spent += times.user + times.system
    return spent


def _timed(read: Callable[[], Any]) -> tuple[float, float]:
    cpu_s, started_s = _cpu_s(), time.monotonic()
    read().write.format("noop").mode("overwrite").save()
    return time.monotonic() - started_s, _cpu_s() - cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=4)
    parser.add_argument("--rows-each", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ensure_java()
    # Spark looks for pyspark_xidstream with this Python, and in folders alone: an editable install is none.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/tables"
        _write_log(root, asked.transactions, asked.rows_each)
        spark = SparkSession.builder.master("local[2]").config("spark.driver.memory", "1g").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        files = [f"file://{each}" for each in DeltaTable(f"{root}/public.t").file_uris()]
        readers: dict[str, Callable[[], Any]] = {
            "parquet": lambda: spark.read.parquet(*files),
            "xidstream": lambda: spark.read.format("xidstream").option("table", "public.t").load(root),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
        for round_ in range(asked.rounds + 1):
            for name, read in readers.items():
                times = _timed(read)
                if round_:  # the first one warms both up
                    found[name].append(times)
        spark.stop()
    n_rows = asked.transactions * asked.rows_each
    wall_ratios = [x[0] / p[0] for p, x in zip(found["parquet"], found["xidstream"], strict=True)]
    cpu_ratios = [x[1] / p[1] for p, x in zip(found["parquet"], found["xidstream"], strict=True)]
    print(
        json.dumps(
            {
                "rows": n_rows,
                "load": round(os.getloadavg()[0], 1),
                **{
                    f"{name}_rows_per_s": round(n_rows / statistics.median(each[0] for each in times))
                    for name, times in found.items()
                },
                "wall_ratio": round(statistics.median(wall_ratios), 2),
                "wall_ratio_worst": round(percentile(wall_ratios, 100), 2),
                "cpu_ratio": round(statistics.median(cpu_ratios), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
