"""A Spark session in one JVM, which reads Ray's objects as RayDP's executors do: for a run on one machine.

RayDP starts four JVMs, one after the other: a gateway, its application master, the driver's and an executor's. On one
machine the driver's does all of it. It is started with RayDP's jars on its class path, runs the tasks itself
(``local[N]``), and joins Ray as a driver of its own. So the way of a row from the object store to Spark is RayDP's own
(``object_store_frames``). Measured on two cores: 9 instead of 21 CPU seconds of start, three JVMs and 800 MB less
(docs/performance.md).

It is locked, too. There is no gateway of RayDP's, which lets any login of the machine run code as the run's user. What
Spark opens is bound to the loopback address and asks for a secret, which Spark makes for the session and keeps in
memory. PySpark's own gateway asks for a token. Ray's native library comes from a private folder.

It has one heap, so a task that needs too much of it ends the driver as well: the JVM ends at the first
OutOfMemoryError, because threads of Spark that died of one would leave jobs that never end. The run then starts another
driver (``supervision.run_driver``). A task that fails is tried again, as on a cluster.

What RayDP has to say about class path and Ray's addresses is asked of RayDP. ``session`` calls this module.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError

from xidstream.actors.driver.driver_jvm import raydp_settings
from xidstream.actors.driver.jvm_stderr import start_jvm
from xidstream.actors.driver.private_library import load_library
from xidstream.actors.driver.session_kind import JOINED_RAY
from xidstream.pipeline.settings.config import MIB, Config
from xidstream.pipeline.settings.sizes import parse_heap

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOPBACK: Final = "127.0.0.1"
_TASK_FAILURES: Final = 4
"""Spark's own spark.task.maxFailures, which a local session takes from its master URL: else a task has one attempt."""
_DRIVERS_HEAP_BYTES: Final = 512 * MIB
"""What the heap has beyond that of the executors whose work it does, for plans and the driver's own. With the defaults
the heap is what Spark gives a driver: 1 GiB."""

_OPTIONS: Final = "spark.driver.extraJavaOptions"

_session: SparkSession | None = None
"""The one of this process."""


def start_local(config: Config, app_name: str, conf: Mapping[str, str]) -> SparkSession:
    """The session, which has joined the Ray of this process. ``conf`` has ``local_conf``, and what the user wants.

    Raises any error of Py4J's, of RayDP's or of Spark's.
    """
    global _session
    from pyspark.sql import SparkSession

    # Also where the host has no name, and for the user interface, if somebody turns it on.
    os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    n_cores = config.spark_executors * config.spark_executor_cores
    executors = (config.spark_executors, config.spark_executor_cores, config.spark_executor_memory)
    # In front of other options, so that a user's word counts.
    options = f"-XX:+ExitOnOutOfMemoryError {conf.get(_OPTIONS, '')}"
    settings = raydp_settings({**conf, _OPTIONS: options}, *executors)
    start_jvm(settings)
    builder = SparkSession.builder.master(f"local[{n_cores}, {_TASK_FAILURES}]").appName(app_name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    _session = spark = builder.getOrCreate()
    _join_ray(spark)
    return spark


def stop_local() -> bool:
    """End the session that this process started here, if it did. Its JVM ends with the process."""
    global _session
    spark, _session = _session, None
    if spark is None:
        return False
    with contextlib.suppress(Py4JError, OSError):  # a JVM that is gone has left Ray, too
        _ray_master(spark).shutdownRay()
        spark.stop()
    return True


def local_conf(config: Config) -> dict[str, str]:
    """The settings that differ from those of RayDP's session."""
    return {
        JOINED_RAY: "true",
        "spark.driver.memory": heap_of(config),
        "spark.driver.host": _LOOPBACK,
        "spark.driver.bindAddress": _LOOPBACK,
        "spark.authenticate": "true",
    }


def heap_of(config: Config) -> str:
    """The heap of the one JVM, as Java takes it."""
    executors_bytes = config.spark_executors * (parse_heap(config.spark_executor_memory) or 0)
    return f"{(executors_bytes + _DRIVERS_HEAP_BYTES) // MIB}m"


def _join_ray(spark: SparkSession) -> None:
    """Join the JVM to Ray, as RayDP's executors are, and its driver where it puts objects."""
    from raydp.spark.ray_cluster_master import RayDPSparkMaster

    jvm: Any = spark._jvm
    load_library(jvm)
    # It needs no master, only a process that has Ray.
    properties: Any = RayDPSparkMaster.__ray_metadata__.modified_class._generate_ray_configs(None)
    _ray_master(spark).setProperties(properties)
    jvm.org.apache.spark.sql.raydp.ObjectStoreWriter.connectToRay()


def _ray_master(spark: SparkSession) -> Any:
    jvm: Any = spark._jvm
    return jvm.org.apache.spark.deploy.raydp.RayAppMaster
