"""A Spark session that is ready to work: RayDP's, or on one machine that of ``local_session``.

The setting ``spark`` says which. ``raydp.init_spark`` returns before its executors have registered, and returns
normally even when they can never fit; the first job would then hang. ``start_spark`` waits for them, bounded, and says
what is missing.
It also runs the first jobs, because they take seconds and no transaction should pay for that. What they need of the
driver's JVM alone (its start, its first plan) is done while RayDP's other processes start.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from xidstream.actors.driver.driver_jvm import start_driver_jvm
from xidstream.actors.driver.local_session import local_conf, start_local, stop_local
from xidstream.actors.driver.session_kind import n_executors
from xidstream.actors.driver.spark_secret import AUTHENTICATE, name_application, spark_secret
from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.nodes import require_usable_nodes
from xidstream.actors.runtime.ray_cluster import (
    connect_ray,
    is_ours,
    run_folder,
)
from xidstream.actors.runtime.spark_version import require_raydp_for_spark
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.checkout import IMPORT_ROOT
from xidstream.pipeline.errors import EnvironmentFault, PreconditionMissing
from xidstream.pipeline.settings import file_modes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.modes import SparkMode
from xidstream.pipeline.spark.session import SPARK_CONF, plan_first_job, warm_up
from xidstream.pipeline.spark_errors import fault_of, named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXECUTOR_TIMEOUT_S = 120

_LOG4J = Path(__file__).resolve().parent / "log4j2.properties"

_FAIR = {
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": f"file:{Path(__file__).resolve().parent / 'fairscheduler.xml'}",
}
"""For a run that refreshes base tables beside its sink."""

_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1"
"""The second compiler tier costs seconds of start-up and gains nothing for jobs this short."""

BASE_CONF = {
    **SPARK_CONF,
    # Executors must not wait for a whole CPU, nor Ray's scheduler for memory that Spark never uses.
    "spark.ray.raydp_spark_executor.actor.resource.memory": "1",
    "spark.ray.raydp_spark_master.actor.resource.CPU": "0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
    # RayDP makes an option of the driver's JVM of it, after all others: one among them would have no effect.
    "spark.log4j.config.file.name": f"file:{_LOG4J}",
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    # Of RayDP's own two JVMs: its gateway, and the application master.
    "spark.ray.raydp_app_master.extraJavaOptions": _JAVA_OPTIONS,
}


def spark_session(
    app_name: str = "xidstream", config: Config | Mapping[str, Any] | str | Path | None = None
) -> SparkSession:
    """A session for a PySpark script, which leaves room for the pipeline on a machine of two CPUs.

    Finds a Java, starts or joins Ray, and returns when the session is warm: some 10 s. On a Ray of this process's own
    it is one JVM, in a cluster RayDP's; the setting ``spark`` chooses. Of ``config`` (a Config, a mapping of its
    settings, or the path of a TOML file) these count: ``spark``, those that begin with ``spark_``, ``metrics_address``.
    The session ends with the process, or at ``stop()``.

    Raises PreconditionMissing where there is no Java, or the executors do not fit, and EnvironmentFault where Ray or
    Spark does not start.
    """
    joined_before = ray.is_initialized()
    settings = Config() if config is None else Config.load(config)
    with waiting("waiting for Ray"):
        connect_ray(offers_metrics=bool(settings.metrics_address))
    if joined_before:
        # By the user's own ray.init(), which may have started Ray without a Java.
        require_usable_nodes()
    with waiting("waiting for the Spark session"):
        return start_spark(settings, app_name)


def settled(config: Config) -> Config:
    """``config`` with ``auto`` replaced by what it means on the Ray that this process has, or would have.

    Whoever makes an actor that starts the session calls it first: an actor cannot tell whose Ray it is on.
    """
    if config.spark != SparkMode.AUTO.value:
        return config
    return dataclasses.replace(config, spark=(SparkMode.LOCAL if is_ours() else SparkMode.RAYDP).value)


def start_spark(config: Config, app_name: str) -> SparkSession:
    """A session that is warm: one JVM, or RayDP's with an executor registered, and all those warm that are there by
    then.

    Raises EnvironmentFault when it cannot be started, PreconditionMissing when the executors do not fit or RayDP does
    not support this Spark, and what ``fault_of`` makes of a first job that fails.
    """
    require_raydp_for_spark()
    import raydp

    # RayDP's own hook starts another Ray, and fails, where the script has ended Ray before.
    atexit.unregister(raydp.stop_spark)
    atexit.register(_stop_spark_at_exit)
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_local = settled(config).spark == SparkMode.LOCAL.value
    conf = {
        **BASE_CONF,
        "spark.executorEnv.PYTHONPATH": _python_path(),
        f"spark.executorEnv.{file_modes.VARIABLE}": config.storage_mode,
        **_temporary_files(),
        **(local_conf(config) if is_local else _raydp_conf(config)),
        **(_FAIR if config.mirror_every else {}),
        **config.spark_conf,
    }
    try:
        spark = (start_local if is_local else _start_raydp)(config, app_name, conf)
    except Exception as error:
        raise not_started(error) from error
    try:
        spark.sparkContext.setLogLevel("ERROR")
        plan_first_job(spark)
        _await_executors(spark, config)
        warm_up(spark)
    except Exception as error:
        raise fault_of(error, "starting the Spark session") from error
    return spark


def not_started(error: Exception) -> EnvironmentFault:
    """The fault of a session that did not start on this machine. Python and Spark look up ``localhost`` and the
    machine's own name."""
    if isinstance(error, socket.gaierror):
        host = socket.gethostname()
        return EnvironmentFault(
            f"the Spark session did not start: localhost, or this machine's host name ({host}), cannot be resolved",
            remedy=f"look at /etc/hosts of this machine: it needs a line for localhost, and one for {host}",
        )
    return EnvironmentFault(
        f"the Spark session did not start: {named(error)}",
        remedy="look at the setting spark_conf, and at the log of the Spark driver; nothing is lost",
    )


def _temporary_files() -> dict[str, str]:
    """Where the run's Ray is its own: all that the JVMs write is in the run's folder, which is removed at its end."""
    folder = run_folder()
    if folder is None:
        return {}
    temporary = f"{folder}/t"
    # A JVM that Ray kills would leave its performance counters in /tmp.
    options = f"-XX:-UsePerfData {shlex.quote(f'-Djava.io.tmpdir={temporary}')}"
    # Else RayDP's agent logs to /tmp/ray/session_latest.
    of_driver = f"{options} {shlex.quote(f'-Dray.logging.dir={folder}/logs')}"
    return {
        "spark.local.dir": temporary,
        "spark.driver.extraJavaOptions": f"{_JAVA_OPTIONS} {of_driver}",
        "spark.executor.extraJavaOptions": f"{_JAVA_OPTIONS} {options}",
        "spark.ray.raydp_app_master.extraJavaOptions": f"{_JAVA_OPTIONS} {options}",
    }


def _raydp_conf(config: Config) -> dict[str, str]:
    return {
        "spark.ray.raydp_spark_executor.actor.resource.cpu": str(config.spark_executor_cpus),
        **_dynamic_allocation(config),
    }


def _start_raydp(config: Config, app_name: str, conf: dict[str, str]) -> SparkSession:
    import raydp

    # It imports RayDP, which a local session needs for less.
    from xidstream.actors.driver.locked_master import lock_master

    lock_master()
    executors = (config.spark_executors, config.spark_executor_cores, config.spark_executor_memory)
    secret = None if conf.get(AUTHENTICATE) == "false" else spark_secret()
    if secret is not None:
        conf = secret.added_to(conf)
    start_driver_jvm(conf, *executors, properties=None if secret is None else secret.of_driver)
    spark = raydp.init_spark(app_name, *executors, fault_tolerant_mode=False, configs=conf)
    if secret is not None:
        name_application(spark)
    return spark


def _dynamic_allocation(config: Config) -> dict[str, str]:
    """Executors are asked for while tasks wait, and given back when idle; the sinks' plans have no shuffle to keep."""
    if config.spark_executors_max <= config.spark_executors:
        return {}
    return {
        "spark.dynamicAllocation.enabled": "true",
        # Without a shuffle service Spark refuses dynamic allocation unless it tracks shuffles itself.
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": str(config.spark_executors),
        "spark.dynamicAllocation.initialExecutors": str(config.spark_executors),
        "spark.dynamicAllocation.maxExecutors": str(config.spark_executors_max),
        "spark.dynamicAllocation.executorIdleTimeout": f"{config.spark_executors_idle_s:.0f}s",
        # Else an executor that once wrote a shuffle, as a user's handler may, is kept for good.
        "spark.dynamicAllocation.shuffleTracking.timeout": f"{config.spark_executors_idle_s:.0f}s",
    }


def stop_spark() -> None:
    """End the session that this process started."""
    import raydp

    if not stop_local():
        raydp.stop_spark()


def _stop_spark_at_exit() -> None:
    if ray.is_initialized():
        stop_spark()


def _await_executors(spark: SparkSession, config: Config) -> None:
    deadline = time.monotonic() + _EXECUTOR_TIMEOUT_S
    while time.monotonic() < deadline:
        if n_executors(spark):
            return
        time.sleep(0.2)
    raise PreconditionMissing(
        f"no Spark executor started within {_EXECUTOR_TIMEOUT_S} s: the cluster has "
        f"{ray.available_resources().get('CPU', 0)} CPUs free, an executor asks for {config.spark_executor_cpus}",
        remedy="lower spark_executor_cpus, or add nodes",
    )


def _python_path() -> str:
    """The executors' Python must find this project, also where it came as a job's working directory.

    After what was there: a user's own ``pipeline.py`` must win against the folder of that name in a checkout.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([inherited, str(IMPORT_ROOT)]) if inherited else str(IMPORT_ROOT)
