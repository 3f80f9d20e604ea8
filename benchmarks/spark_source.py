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
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from benchmarks.results import percentile
from xidstream.actors.runtime.java import ensure_java

_SLOT = "7/bench/bench"


def _write_log(root: str, n_files: int, rows_per_file: int) -> None:
    dice = np.random.default_rng(1)
    for i in range(n_files):
        lsn, n = (i + 1) << 20, rows_per_file
        columns: dict[str, Any] = {f"n{c}": dice.integers(0, 1 << 40, n) for c in range(4)}
        columns |= {f"x{c}": dice.random(n) for c in range(3)}
        columns |= {f"t{c}": pa.array(dice.integers(0, 1 << 30, n)).cast(pa.string()) for c in range(3)}
        contract = {
            "_change_type": ["insert"] * n,
            "_commit_lsn": np.full(n, lsn),
            "_commit_timestamp": pa.array(np.full(n, lsn), pa.timestamp("us", tz="UTC")),
            "_xid": np.full(n, i),
            "_seq": np.arange(n),
            "_unchanged": pa.nulls(n, pa.list_(pa.string())),
            "_text": pa.nulls(n, pa.map_(pa.string(), pa.string())),
        }
        of_slot = CommitProperties(app_transactions=[Transaction(_SLOT, lsn)])
        tables = pa.array([["public.t"]], pa.list_(pa.string()))
        for name, rows in (
            ("public.t", pa.table({**columns, **contract})),
            ("_transactions", pa.table({"commit_lsn": [lsn], "tables": tables})),
        ):
            write_deltalake(f"{root}/{name}", rows, mode="append", commit_properties=of_slot)


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
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rows-per-file", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ensure_java()
    # Spark looks for pyspark_xidstream with this Python, and in folders alone: an editable install is none.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory() as root:
        _write_log(root, asked.files, asked.rows_per_file)
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
    n_rows = asked.files * asked.rows_per_file
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
