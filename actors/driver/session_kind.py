"""What a Spark session can do that others cannot, asked of the session itself.

There are three kinds. RayDP's has executors that are Ray actors, on any node. Ours on one machine (``local_session``)
is a JVM that has joined Ray, and has no executors. A user's own session may be anything, and knows nothing of Ray.
Nobody asks for the kind: who reads rows asks ``reads_ray_objects``, and who waits for executors asks
``has_ray_executors``. Both are called by the batch loop's side, and by whoever adopts a user's session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOINED_RAY: Final = "spark.xidstream.joinedRay"
"""Spark setting of a session whose one JVM has joined Ray: ``true``."""


def reads_ray_objects(spark: SparkSession) -> bool:
    """Whether the JVMs that run its tasks can read Ray's objects. Other sessions get rows through the storage."""
    return has_ray_executors(spark) or spark.sparkContext.getConf().get(JOINED_RAY, "") == "true"


def has_ray_executors(spark: SparkSession) -> bool:
    """Whether its executors are Ray actors, started by RayDP's master. If that is lost, a job waits for ever."""
    return str(spark.sparkContext.master).startswith("ray")


def n_executors(spark: SparkSession) -> int:
    """The number of registered executors. A local session has none: its one JVM counts."""
    n = int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size())
    return n if str(spark.sparkContext.master).startswith("local") else n - 1
