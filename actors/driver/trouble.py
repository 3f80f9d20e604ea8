"""Tells why a batch will never end, or why the Spark session will run no other, if that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from xidstream.actors.driver.batch_loop import STALLED_AFTER_S, BatchLoop
from xidstream.actors.driver.spark_master import SparkMaster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STALLED = f"a Spark job waited {STALLED_AFTER_S:.0f} s without a running task: what should run it is lost"
_JVM_LOST = "the JVM of the Spark driver is lost"
_STOPPED = "the Spark session was stopped"
_MASTER_LOST = "RayDP's master is lost: its Spark session cannot start executors any more"


def trouble_of(master: SparkMaster, loop: BatchLoop | None) -> str | None:
    """The reason why the current batch will never end; None if there is none."""
    if master.is_lost():
        return _MASTER_LOST
    try:
        return _STALLED if loop is not None and loop.is_stalled() else None
    except (Py4JError, OSError):
        return None  # Without its JVM the batch ends by itself, with an error or without.


def session_trouble(spark: SparkSession) -> str | None:
    """The reason why the session will run no more job; None if there is none.

    It is asked although nothing is being written. Batches of few rows do not need the JVM, and a large one must not be
    the first to find that it is gone.
    """
    try:
        context = spark.sparkContext
        return _STOPPED if context._jsc is None or context._jsc.sc().isStopped() else None
    except (Py4JError, OSError):
        return _JVM_LOST
