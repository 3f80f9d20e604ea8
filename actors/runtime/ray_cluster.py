"""Start Ray on this machine, or join the cluster that the environment names.

The command line, a PySpark script or the demo calls this once, at the beginning of a run. A Ray that was started here
ends with this process, however the process ends.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from xidstream.actors.runtime.hidden_variables import hidden_from_children
from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.nodes import require_own_host_name, require_usable_nodes
from xidstream.actors.runtime.watchdog import kill_with_me
from xidstream.pipeline.errors import EnvironmentFault

LOCAL_OBJECT_STORE_BYTES = 1 << 30
"""Enough for the reader's blocks, a backlog and the batch in hand. Ray's default takes 30 % of the machine's memory."""


_JSON_LOGS = ray.LoggingConfig(encoding="JSON", log_level="WARNING", additional_log_standard_attrs=["name"])
_TOKEN_ENABLED = "Token authentication is enabled for this Ray cluster"


def _without_noise(record: logging.LogRecord) -> bool:
    """Ray warns that it asks for a token, as it does by default. That it asks for none is still worth a warning."""
    return not record.getMessage().startswith(_TOKEN_ENABLED)


@hidden_from_children()
def connect_ray(
    *,
    namespace: str = "xidstream",
    metrics_port: int = 0,
    json_logs: bool = False,
    needs_spark: bool = True,
) -> None:
    """Join the cluster that RAY_ADDRESS or the job names, or else start one on this machine.

    ``metrics_port``: where a Ray that is started offers metrics; 0: a free port. ``json_logs``: the processes of this
    run's actors log JSON into Ray's files. ``needs_spark``: whether Spark will be started on this Ray.

    Raises EnvironmentFault if Ray does not start or is not there. Raises PreconditionMissing if Spark cannot start
    here, or on a node of the cluster.
    """
    if needs_spark:
        ensure_java()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = is_local()
    if local:
        logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_without_noise)
    if local and needs_spark:
        # On one machine all of Spark stays on the loopback address, even if the host's name is unknown. Its JVMs are
        # children of the raylet and inherit the variable.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        require_own_host_name()
    try:
        ray.init(
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
            include_dashboard=False if local else None,
            object_store_memory=LOCAL_OBJECT_STORE_BYTES if local else None,
            _metrics_export_port=metrics_port if local and metrics_port else None,
            logging_config=_JSON_LOGS if json_logs else None,
        )
    except Exception as error:  # Ray raises plain Exception where its own processes are too slow to start
        raise _no_ray(error, local=local) from error
    if local:
        kill_with_me(_server_pids())
    else:
        require_usable_nodes(needs_spark=needs_spark)


def join_cluster() -> None:
    """Join the cluster to ask something of it: nothing is started there but a task. Raises EnvironmentFault."""
    if ray.is_initialized():
        return
    try:
        ray.init(
            namespace="xidstream",
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises plain Exception here, too
        raise _no_ray(error, local=False) from error


def _no_ray(error: Exception, *, local: bool) -> EnvironmentFault:
    reason = str(error).strip().splitlines()[0]
    if local:
        logs = "look at its logs, session_latest/logs in Ray's temporary folder"
        return EnvironmentFault(f"Ray did not start on this machine: {reason}", remedy=logs)
    return EnvironmentFault(
        f"the Ray cluster was not joined: {reason}",
        remedy="check RAY_ADDRESS, and that `ray status` answers there",
    )


def _server_pids() -> list[int]:
    """The process ids of the raylet, the GCS and the other servers that ``ray.init`` started."""
    node: Any = ray._private.worker._global_node
    servers = node.all_processes.values()
    return [info.process.pid for infos in servers for info in infos]


def is_local() -> bool:
    """Whether ``ray.init`` would start a Ray of its own: no address is given, and no ``ray start`` ran on this node.

    Raises EnvironmentFault if RAY_ADDRESS names a Ray that is not there.
    """
    try:
        return ray._private.services.canonicalize_bootstrap_address(None) is None  # type: ignore[arg-type]
    except (ConnectionError, ValueError) as error:  # no Ray is there, or the address is not an address
        raise _no_ray(error, local=False) from error


def is_ours() -> bool:
    """Whether Ray is, or would be, one that this process starts for itself, on this machine alone."""
    if not ray.is_initialized():
        return is_local()
    # In a driver that joined a cluster, the global node only connects; it is not a head.
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def own_cpus() -> int | None:
    """The CPUs of a Ray that this process started, on this machine alone; None in a cluster, which may grow."""
    return int(ray.cluster_resources().get("CPU", 0)) if is_ours() else None
