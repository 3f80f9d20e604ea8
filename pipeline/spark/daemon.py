"""Spark's Python daemon with this package imported: ``spark.python.daemon.module=pipeline.spark.daemon``.

Spark forks a Python worker from the daemon for each task that finds none idle, and ends workers after a
minute without work. A worker that has to import pyarrow first costs a batch some 0.3 s; a fork of this one
has it. Only what is safe to fork is imported: neither numpy nor pyarrow starts threads by being imported,
and deltalake (which has a runtime with threads) is left out.
"""

from __future__ import annotations

import pyspark.daemon

import xidstream.pipeline.spark.parquet_files  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
