"""Starts the driver's JVM while RayDP's master starts.

``raydp.init_spark`` starts the master's process, waits for its JVM, and only then lets PySpark start the driver's JVM.
Neither needs the other yet, so the driver's JVM can start meanwhile, and PySpark uses a JVM that exists already. It
must be started with the settings that RayDP will ask for, because a JVM's class path is final. So RayDP's own code
makes these settings here, on a copy.

If something fails here, RayDP does the same step again in its turn, and reports the failure. If this RayDP is not the
known one, nothing is started early, and only the time is lost.

Rejected: an archive of loaded classes (CDS), which each JVM writes when it ends. It saved 0.5 to 1 s of the driver's
start. It takes 120 MB, the other JVMs cannot write theirs because RayDP kills them, and it needs a flag that the JVM
warns of because of RayDP's agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any


def start_driver_jvm(
    configs: Mapping[str, str],
    n_executors: int,
    cores: int,
    memory: str,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Start the JVM on a thread, and return at once. ``raydp.init_spark`` must follow with the same arguments.

    ``properties``: of the JVM, before anybody makes a session in it. They are not among its arguments."""
    from pyspark import SparkConf

    # Any error may be ignored: RayDP starts the same JVM itself, and reports what is wrong.
    with contextlib.suppress(Exception):
        settings = raydp_settings(configs, n_executors, cores, memory)
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        threading.Thread(target=_start, args=(conf, properties or {}), name="driver JVM", daemon=True).start()


def _start(conf: Any, properties: Mapping[str, str]) -> None:
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    # PySpark's own lock: a later caller waits, and finds the JVM with all its properties.
    with contextlib.suppress(Exception), SparkContext._lock:
        gateway = SparkContext._gateway or launch_gateway(conf)
        for key, value in properties.items():
            gateway.jvm.java.lang.System.setProperty(key, value)
        SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def raydp_settings(configs: Mapping[str, str], n_executors: int, cores: int, memory: str) -> dict[str, str]:
    """The settings that RayDP makes of ``configs``. May raise any error if this RayDP makes them in another way."""
    from raydp.spark.ray_cluster import SparkCluster

    cluster: Any = object.__new__(SparkCluster)
    cluster._num_executors, cluster._executor_cores, cluster._executor_memory = n_executors, cores, memory
    cluster._configs = dict(configs)
    cluster._prepare_spark_configs()
    return dict(cluster._configs)
