"""What the sinks want of a Spark session: its settings, and a first job before the first batch.

``SPARK_CONF`` is for whoever starts the session (``actors``, or a user's own script); nothing here changes a
running session, which is the user's. ``warm_up`` is called by whoever starts a session, and by the ``open`` of sinks
whose every batch needs it: the first job of a session costs seconds (class loading, the executors' Python), and no
batch should pay for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GetSession = Callable[[], "SparkSession"]
"""The session, for the calling thread. The first call may start it, which takes seconds, and may raise any
XidstreamError."""

UNION_PARTITIONING: Final = "spark.sql.unionOutputPartitioning"

SPARK_CONF: Final[dict[str, str]] = {
    # With pandas 3 and Arrow off a null string comes back as the text 'NaN'.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # JVM -> Python, memory parts only: the default. Rows may be wide.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # The plans here have no shuffle: adaptive execution costs planning time and decides nothing.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # From Spark 4.1 on a union of frames with one partition each is one partition, so one core does all the work.
    UNION_PARTITIONING: "false",
    # Above so many paths the driver looks files up in a job, which takes a second; a large transaction has hundreds.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Timestamps are instants; a session zone changes how they print, and costs a conversion.
    "spark.sql.session.timeZone": "UTC",
    # Commit timestamps and columns are proleptic Gregorian: never shift them.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # Forks a Python worker with pyarrow and this package imported already.
    "spark.python.daemon.module": "xidstream.pipeline.spark.daemon",
    "spark.ui.enabled": "false",
}
"""Settings that suit the sinks, as strings for ``SparkConf`` or ``raydp.init_spark(configs=)``."""


def imports(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow``: import what the batches' functions will need, pass the rows on."""
    import xidstream.pipeline.spark.executor_tasks  # noqa: F401

    yield from batches


_warm: dict[str, int] = {}
"""How many cores this process has warmed up, by application."""


def warm_up(spark: SparkSession) -> None:
    """Run what a tiny batch runs, a few times, on every core: seconds, once, and again where there are more by now."""
    application = str(spark.sparkContext.applicationId)
    n = max(1, int(spark.sparkContext.defaultParallelism))
    if _warm.get(application, 0) >= n:
        return
    for _ in range(3):
        _first_job(spark, n).collect()
    _warm[application] = n


def plan_first_job(spark: SparkSession) -> None:
    """Have the driver's JVM load what a plan needs, and compile one: seconds, too, and no executor need be there."""
    _first_job(spark, 1)._jdf.queryExecution().toRdd()


def _first_job(spark: SparkSession, n_tasks: int) -> DataFrame:
    return spark.range(0, n_tasks, 1, n_tasks).mapInArrow(imports, "id long")
