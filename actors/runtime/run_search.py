"""Finds the runs of a slot: on this machine by their sockets, else on the nodes of the Ray cluster that is joined.

On a cluster each node is asked by a task of its own, which needs no CPU and so waits for none. A run's process is on
one of the nodes, because a driver needs a raylet beside it. Ray is imported only if no run is on this machine.
"""

from __future__ import annotations

import logging

from xidstream.actors.runtime.run_socket import ask, running
from xidstream.pipeline.errors import EnvironmentFault

_ANSWER_S = 30.0


def answers(slot: str = "") -> list[str]:
    """The accounts of all runs that are found, as JSON: of one slot, or of all. Raises EnvironmentFault where a run
    does not answer, or the cluster that RAY_ADDRESS names does not."""
    return local_answers(slot) or _answers_of_cluster(slot)


def local_answers(slot: str) -> list[str]:
    return [answer for name in running(slot) if (answer := ask(name)) is not None]


def _answers_of_cluster(slot: str) -> list[str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from xidstream.actors.runtime.ray_cluster import is_local, join_cluster

    if is_local():
        return []
    join_cluster()
    question = ray.remote(_on_node)
    asked = {
        question.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(slot): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
    }
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found: list[str] = []
    for ref in done:
        try:
            found += ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EnvironmentFault):
                raise error.cause from None
            logging.getLogger(__name__).warning(
                "the node %s cannot be asked: %s", asked[ref], type(error.cause).__name__
            )
        except ray.exceptions.RayError:
            continue  # the node has left meanwhile
    return found


def _on_node(slot: str) -> list[str]:
    """In a worker: what runs on its machine."""
    return local_answers(slot)
