"""Iceberg beside Delta: ``python -m benchmarks.lakes [--sizes 10000,100000] [--rows 1000000] [--repeats 3]``.

Both sinks take the same transactions from slots of one server, in turn, in one run. So quote the ratios.

- *Lag*: from COMMIT's return to the writer until the sink has committed ``_transactions``, over the size of the
  transaction (``benchmarks.delta_lag``). A large one is linked by both.
- *Drain*: rows a second from a slot that is behind, of one large transaction, and of many small ones.

The Iceberg catalog is the folder's own, in SQLite. What a commit takes as the tables grow older says
``benchmarks.iceberg_commits`` beside ``benchmarks.delta_commits``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import delta_lag, ours
from benchmarks.results import median
from benchmarks.source import Source, server

LAKES = ("delta", "iceberg")
_SMALL_ROWS = 10
"""Rows of each of the small transactions."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="10000,100000,1000000", help="rows of the transactions whose lag is measured"
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a drain")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before; seconds of Delta and Iceberg, and their ratio")
    with server() as publisher, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)
        _lags(spark, publisher, [int(size) for size in given.sizes.split(",")], given.repeats)
        _drains(spark, publisher, given.rows, given.repeats)


def _lags(spark: Any, publisher: Any, sizes: list[int], repeats: int) -> None:
    source = Source(publisher, "lakelag")
    for lake in LAKES:
        delta_lag.measure(spark, source, 20_000, 0, f"warm_{lake}", lake)
    for size in sizes:
        seconds: dict[str, list[float]] = {lake: [] for lake in LAKES}
        for i in range(repeats):
            for lake in LAKES:
                measured = delta_lag.measure(spark, source, size, 0, f"{lake}_{i}", lake)
                seconds[lake].append(measured["lag_s"])
        _tell(f"lag, {size:,} rows", seconds)
    source.close()


def _drains(spark: Any, publisher: Any, n_rows: int, repeats: int) -> None:
    for name, rows_of_one in (
        ("one transaction", n_rows),
        (f"transactions of {_SMALL_ROWS} rows", _SMALL_ROWS),
    ):
        source = Source(publisher, f"lakedrain{rows_of_one}")
        slots = iter(source.slots(len(LAKES) * repeats))
        source.insert_in_transactions(n_rows, rows_of_one)
        seconds: dict[str, list[float]] = {lake: [] for lake in LAKES}
        for _ in range(repeats):
            for lake in LAKES:
                drained = ours.drain(spark, source, next(slots), n_rows, ours.nothing, lake=lake)
                seconds[lake].append(drained.done_s)
        source.close()
        _tell(f"drain of {n_rows:,} rows, {name}", seconds)


def _tell(what: str, seconds: dict[str, list[float]]) -> None:
    delta, iceberg = (median(seconds[lake]) for lake in LAKES)
    all_of = "; ".join(f"{lake} " + ", ".join(f"{s:.3f}" for s in seconds[lake]) for lake in LAKES)
    print(f"| {what} | {delta:.3f} | {iceberg:.3f} | {iceberg / delta:.2f} | ({all_of})", flush=True)


if __name__ == "__main__":
    main()
