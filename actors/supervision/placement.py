"""Whether Ray has CPUs for the pipeline's actors, and what to say and do where it has not.

Ray keeps an actor that fits on no node waiting, without a word and for ever. So what has no process yet is
compared with what the nodes have free. A lack is told in numbers: what is free, and what is needed. A Ray of this
process's own gets no further CPUs, so there a lack of ``LOCAL_PATIENCE_S`` ends the run. A cluster may be adding a
node, which takes minutes: there the lack is told, and it ends the epoch after ``CLUSTER_PATIENCE_S``.

A run of the command line on a Ray of its own has been planned (``cpu_plan``): there is a lack only where its settings
take CPUs that the plan does not know of.

``fits`` and ``RoomWatch`` decide, and ask nobody; ``free_cpus`` and ``unplaced`` ask Ray. ``epoch`` looks
while its parts start. ``await_room`` looks before they do, for a stream on a session that the user made.

Rejected: to ask Ray for the state of an actor alone. It is "pending" while it waits for a CPU and also while its
process starts, which takes ten seconds on a busy machine and was told as a lack of CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from xidstream.actors.driver.session_kind import n_executors
from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.actors.supervision.cpu_plan import Demand, Shares, demands
from xidstream.pipeline.errors import EnvironmentFault, PreconditionMissing
from xidstream.pipeline.settings.config import Config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_PATIENCE_S = 30.0
"""A process that Ray is starting holds its CPUs already, and takes some seconds."""
CLUSTER_PATIENCE_S = 600.0
"""Longer than any cloud provider took to bring a node."""

_ROUNDING = 1e-3
_REMEDY = (
    "make the session with xidstream.spark_session(), which leaves room; or have its executors ask Ray for less "
    "(spark.ray.raydp_spark_executor.actor.resource.cpu), or give Ray more CPUs"
)


@dataclass(frozen=True)
class FreeCpus:
    """``free``: the unreserved CPUs of each node that lives. ``total``: the CPUs of all nodes."""

    free: tuple[float, ...]
    total: float


def fits(needed: Iterable[Demand], free: Sequence[float]) -> bool:
    """Whether there is a node for each: the largest first, each on the first node that has room."""
    left = list(free)
    for cpus in sorted((each.cpus for each in needed for _ in range(each.n)), reverse=True):
        for i, room in enumerate(left):
            if room + _ROUNDING >= cpus:
                left[i] = room - cpus
                break
        else:
            return False
    return True


class RoomWatch:
    """Turns a lack of CPUs into words, and one that lasts into an error. Times are monotonic.

    ``local``: whether Ray is this process's own, so that no further CPUs can come.
    """

    def __init__(self, *, local: bool) -> None:
        self._patience_s = LOCAL_PATIENCE_S if local else CLUSTER_PATIENCE_S
        self._error: type[EnvironmentFault] = PreconditionMissing if local else EnvironmentFault
        self._since_s: float | None = None

    def look(self, now_s: float, needed: Collection[Demand], cpus: FreeCpus) -> str | None:
        """``needed``: by what has no process yet. Returns the lack in words, None where there is none.

        Raises PreconditionMissing (in a cluster EnvironmentFault) where there was one at every look for too long.
        """
        if fits(needed, cpus.free):
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = now_s
        lack = lack_text(needed, cpus)
        if now_s - self._since_s >= self._patience_s:
            raise self._error(lack, remedy=_REMEDY)
        return lack


def lack_text(needed: Collection[Demand], cpus: FreeCpus) -> str:
    """A lack in numbers."""
    *others, last = map(str, needed)
    names = f"{', '.join(others)} and {last}" if others else last
    plural = len(others) > 0 or any(each.n > 1 for each in needed)
    asked = sum(each.cpus * each.n for each in needed)
    scattered = ", too few on each node" if sum(cpus.free) + _ROUNDING >= asked else ""
    return (
        f"{names} cannot start: {'they need' if plural else 'it needs'} {asked:.4g} CPUs, and "
        f"{sum(cpus.free):.4g} of {cpus.total:.4g} CPUs are free{scattered}"
    )


def free_cpus() -> FreeCpus:
    """The free CPUs, as far as Ray knows. It hears of each node a few times a second."""
    state: Any = ray._private.state
    free = tuple(float(node.get("CPU", 0)) for node in state.available_resources_per_node().values())
    return FreeCpus(free, float(ray.cluster_resources().get("CPU", 0)))


def unplaced(config: Config, shares: Shares, reader: Any, sequencer: Any) -> list[Demand]:
    """What has no process yet: of ``demands``, and of the Spark driver's actor where there is one.

    Ray is asked, and not the actors themselves.
    """
    reader_demand, sequencer_demand, buffers_demand = demands(config, shares)
    state: Any = ray._private.state
    reader_info, pending = state.actors(reader._actor_id.hex()), _pending()
    found = unplaced_driver(shares, reader, pending)
    if _waits(reader_info):
        found += [reader_demand, buffers_demand]
    else:
        # The reader's own: there is none before it has connected, and then they come all at once.
        n = sum(each["OwnerAddress"] == reader_info.get("Address") for each in pending)
        if n:
            found.append(Demand(buffers_demand.name, buffers_demand.cpus, n))
    if _waits(state.actors(sequencer._actor_id.hex())):
        found.append(sequencer_demand)
    return found


def unplaced_driver(
    shares: Shares, reader: Any, pending: Sequence[dict[str, Any]] | None = None
) -> list[Demand]:
    """The Spark driver's actor, if it has no process yet. It has the owner of ``reader``: the run's process."""
    ours = ray._private.state.actors(reader._actor_id.hex()).get("OwnerAddress")
    for each in _pending() if pending is None else pending:
        if each["ActorClassName"] == "SparkDriver" and each["OwnerAddress"] == ours:
            return [Demand("Spark driver", shares.driver)]
    return []


def _pending() -> list[dict[str, Any]]:
    state: Any = ray._private.state
    return [each for each in state.actors(None, None, "PENDING_CREATION").values() if _waits(each)]


def _waits(actor: dict[str, Any]) -> bool:
    """An actor that ended, or that Ray has not heard of yet, waits for nothing."""
    return actor.get("State") == "PENDING_CREATION" and not actor.get("Pid")


def await_room(config: Config, spark: SparkSession) -> None:
    """Before anything is started beside ``spark``: its executors are there, and leave room for an epoch.

    The executors come first, because they take their CPUs some seconds after ``raydp.init_spark`` has returned. A
    cluster is not asked: it adds nodes only for what is waiting already. Raises PreconditionMissing within
    twice ``LOCAL_PATIENCE_S``.
    """
    if not is_ours():
        return
    watch = RoomWatch(local=True)
    deadline_s = time.monotonic() + LOCAL_PATIENCE_S
    needed = demands(config)
    while True:
        now_s = time.monotonic()
        lack = watch.look(now_s, needed, free_cpus())
        if lack is None and (n_executors(spark) > 0 or now_s > deadline_s):
            return
        time.sleep(0.1)
