"""Spark's Python daemon with this package imported: ``spark.python.daemon.module=pipeline.spark.daemon``.

Spark forks a Python worker from the daemon for each task that finds none idle, and ends workers after a
minute without work. A worker that has to import pyarrow first costs a batch some 0.3 s; a fork of this one
has it. Only what is safe to fork is imported: neither numpy nor pyarrow starts threads by being imported,
and deltalake (which has a runtime with threads) is left out.

What the workers write has the run's ``storage_mode``: those of other machines do not inherit its umask.
"""

from __future__ import annotations

import os

import pyspark.daemon

import xidstream.pipeline.spark.executor_tasks  # noqa: F401
from xidstream.pipeline.settings import file_modes

if __name__ == "__main__":
    if file_modes.VARIABLE in os.environ:
        file_modes.choose_for_process(os.environ[file_modes.VARIABLE])
    pyspark.daemon.manager()
