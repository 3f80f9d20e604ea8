"""Start Ray on this machine, or join the cluster that the environment names.

Called once by whoever begins a run: the command line, a PySpark script, the demo. A Ray that was started here ends
with this process, however that ends.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.nodes import require_own_host_name, require_usable_nodes
from xidstream.actors.runtime.watchdog import kill_with_me
from xidstream.pipeline.errors import EnvironmentFault

LOCAL_OBJECT_STORE_BYTES = 1 << 30
"""Enough for the reader's blocks, a backlog and the batch in hand; Ray's default takes 30 % of the machine."""


def connect_ray(*, namespace: str = "xidstream") -> None:
    """Join the cluster that RAY_ADDRESS or the job names, else start one in this process's machine.

    Raises EnvironmentFault where Ray does not start or is not there, PreconditionMissing where Spark cannot start:
    here, or on a node of the cluster.
    """
    ensure_java()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = is_local()
    if local:
        # One machine: everything of Spark's stays on the loopback address, also where the host's name is unknown. Its
        # JVMs are the raylet's children and read it there.
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
        )
    except Exception as error:  # Ray raises plain Exception where its own processes are too slow to start
        raise _no_ray(error, local=local) from error
    if local:
        kill_with_me(_server_pids())
    else:
        require_usable_nodes()


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
    """Of the raylet, the GCS and what else ``ray.init`` started in this process."""
    node: Any = ray._private.worker._global_node
    servers = node.all_processes.values()
    return [info.process.pid for infos in servers for info in infos]


def is_local() -> bool:
    """Whether ``ray.init`` would start a Ray of its own: no address given, and no ``ray start`` on this node.

    Raises EnvironmentFault where RAY_ADDRESS asks for one that is not there.
    """
    try:
        return ray._private.services.canonicalize_bootstrap_address(None) is None  # type: ignore[arg-type]
    except (ConnectionError, ValueError) as error:  # none is there, or the address is none
        raise _no_ray(error, local=False) from error


def is_ours() -> bool:
    """Whether Ray is, or would be, one that this process starts for itself: on this machine alone."""
    if not ray.is_initialized():
        return is_local()
    # Of a driver that joined a cluster it is a node that only connects.
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())
