"""The driver's JVM, started while RayDP's master starts.

``raydp.init_spark`` starts the master's process, waits for its JVM, and only then has PySpark start the driver's.
Neither needs the other yet, so the driver's may come up meanwhile; PySpark takes the one that is there. It must be
started with the settings that RayDP will ask for, because a JVM's class path is final: RayDP makes them itself
here, from a copy.

What fails here is tried again by RayDP in its turn, and reported from there. Where this RayDP is not the one that is
known, nothing is started early, and nothing is lost but the time.

Rejected: an archive of loaded classes (CDS), written by each JVM when it ends: it spared the driver's 0.5 to 1 s, takes
120 MB, cannot be had from the others, which RayDP kills, and was made with a flag that the JVM warns of, because of
RayDP's agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any


def start_driver_jvm(configs: Mapping[str, str], n_executors: int, cores: int, memory: str) -> None:
    """Return at once; the arguments are those of ``raydp.init_spark``, which must follow."""
    from pyspark import SparkConf

    # Whatever it is: RayDP starts the same JVM itself, and what is wrong is reported from there.
    with contextlib.suppress(Exception):
        settings = _raydp_settings(configs, n_executors, cores, memory)
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        threading.Thread(target=_start, args=(conf,), name="driver JVM", daemon=True).start()


def _start(conf: Any) -> None:
    from pyspark import SparkContext

    # Under PySpark's own lock, and nothing where one is there already: whoever comes later waits, and finds it.
    with contextlib.suppress(Exception):
        SparkContext._ensure_initialized(conf=conf)


def _raydp_settings(configs: Mapping[str, str], n_executors: int, cores: int, memory: str) -> dict[str, str]:
    """What RayDP makes of ``configs``. Raises anything where it does so in another way."""
    from raydp.spark.ray_cluster import SparkCluster

    cluster: Any = object.__new__(SparkCluster)
    cluster._num_executors, cluster._executor_cores, cluster._executor_memory = n_executors, cores, memory
    cluster._configs = dict(configs)
    cluster._prepare_spark_configs()
    return dict(cluster._configs)
