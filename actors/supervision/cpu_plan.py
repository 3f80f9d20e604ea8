"""What a run will ask of Ray, known before Ray starts: which CPUs each part asks for, and whether all of them fit.

A part asks Ray for a share of a CPU. Ray places it by that share, and never limits what it uses. On a cluster a share
says on which node a part has room, and when a node is to be added. There it is as the settings say, and
``placement`` waits for nodes. A Ray of the run's own has one machine, and nobody else is on it. So where the shares do
not fit, all of them shrink by the same factor, and no part waits for a CPU that never comes. ``plan`` also counts what
comes later, if at all: further buffers, the readers of snapshots, further executors. Else one of them could take the
CPUs of an executor that is still starting.

There is an end to it: below ``LEAST`` of their shares the parts would keep the machine busy with nothing to do. Then
``plan`` refuses, and ``xidstream check`` and ``run`` say so before anything is started.

Rejected: no shares at all on one machine, which would be one number less. But then nothing would end a run of a
hundred slots on two CPUs before the machine has no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.initial_copy.readers import HOLDER_CPUS, readers_here
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.modes import SnapshotMode, SparkMode

LEAST: Final = 0.25
"""Sixteen slots a CPU, with the defaults. With nothing to do a slot takes 5 % of a core (docs/sizing.md), so they keep
it nearly busy by being there."""

MASTER_CPUS: Final = 0.1
_MASTER_CONF: Final = "spark.ray.raydp_spark_master.actor.resource.CPU"
_EXECUTOR_CONF: Final = "spark.ray.raydp_spark_executor.actor.resource.cpu"
_SETTINGS: Final = {
    "xid buffer": ("buffer_cpus", "buffers_min"),
    "executor": ("spark_executor_cpus", "spark_executors"),
}
"""The settings of each part: how many CPUs it asks for, and how many of it there are."""
_STEPS: Final = 10_000
"""Ray counts CPUs in steps of 1/10,000."""


@dataclass(frozen=True)
class Shares:
    """CPUs that the parts ask for which have no setting for it."""

    reader: float = 0.1
    sequencer: float = 0.05
    driver: float = 0.1


FULL_SHARES: Final = Shares()
"""Where nothing is planned: in a cluster, and beside a session that the user made."""


@dataclass(frozen=True)
class Demand:
    """``n`` actors, each of which asks one node for ``cpus``. ``shrinks``: whether a plan may have it ask for less."""

    name: str
    cpus: float
    n: int = 1
    shrinks: bool = True

    def __str__(self) -> str:
        return f"the {self.name}" if self.n == 1 else f"{self.n} {self.name}s"


@dataclass(frozen=True)
class Plan:
    """The settings of each slot with the shares that fit, and the other parts' shares. ``scale``: what each asks for,
    of what it would ask for with room enough. ``needed``: CPUs that are asked for at the start."""

    configs: tuple[Config, ...]
    shares: Shares = FULL_SHARES
    scale: float = 1.0
    needed: float = 0.0


def demands(config: Config, shares: Shares = FULL_SHARES) -> list[Demand]:
    """The demands of one epoch of a slot before it can read."""
    return [
        Demand("slot reader", shares.reader),
        Demand("commit sequencer", shares.sequencer),
        Demand("xid buffer", config.buffer_cpus, config.buffers_min),
    ]


def plan(configs: Sequence[Config], cpus: float, *, has_sink: bool = True) -> Plan:
    """For one run of these slots on a Ray of its own, which has ``cpus``. ``spark`` is settled in them.

    Raises PreconditionMissing where not even the shrunk parts fit.
    """
    shares = FULL_SHARES
    needed = [each for config in configs for each in demands(config, shares)]
    needed += _of_spark(configs[0], shares) if has_sink else []
    later = _later(configs, cpus, has_sink=has_sink)
    scale = max(LEAST, min(1.0, _scale_that_fits([*needed, *later], cpus)))
    if scale > _scale_that_fits(needed, cpus):
        raise _too_small(configs, needed, cpus)
    scaled = Shares(*(_shrunk(share, scale) for share in dataclasses.astuple(shares)))
    planned = tuple(_planned(config, scale) for config in configs)
    return Plan(planned, scaled, scale, _asked(needed, scale))


def _of_spark(config: Config, shares: Shares) -> list[Demand]:
    """The demands of the session of the whole run."""
    found = [Demand("Spark driver", shares.driver)]
    if config.spark == SparkMode.RAYDP.value:
        own = config.spark_conf.get(_MASTER_CONF)
        # Its actor and that of its application master.
        found.append(Demand("RayDP master", float(own or MASTER_CPUS), 2, shrinks=own is None))
        found.append(_executors(config, config.spark_executors))
    return found


def _executors(config: Config, n: int) -> Demand:
    own = config.spark_conf.get(_EXECUTOR_CONF)
    return Demand("executor", float(own or config.spark_executor_cpus), n, shrinks=own is None)


def _later(configs: Sequence[Config], cpus: float, *, has_sink: bool) -> list[Demand]:
    """What may be asked for while the run reads."""
    first = configs[0]
    n_buffers = max(0, first.buffers_max - sum(config.buffers_min for config in configs))
    found = [Demand("xid buffer", first.buffer_cpus, n_buffers)]
    for config in configs if has_sink else ():
        if config.snapshot != SnapshotMode.NEVER.value:
            n_readers = readers_here(config.snapshot_connections, int(cpus))
            found.append(Demand("snapshot holder", HOLDER_CPUS, shrinks=False))
            found.append(Demand("snapshot reader", config.buffer_cpus, n_readers))
    if has_sink and first.spark == SparkMode.RAYDP.value:
        found.append(_executors(first, max(0, first.spark_executors_max - first.spark_executors)))
    return found


def _scale_that_fits(wanted: Iterable[Demand], cpus: float) -> float:
    fixed = shrinking = 0.0
    for each in wanted:
        if each.shrinks:
            shrinking += each.n * each.cpus
        else:
            fixed += each.n * each.cpus
    left = cpus - fixed
    return left / shrinking if shrinking else math.inf if left >= 0 else 0.0


def _asked(wanted: Iterable[Demand], scale: float) -> float:
    return sum(each.n * each.cpus * (scale if each.shrinks else 1.0) for each in wanted)


def _planned(config: Config, scale: float) -> Config:
    if scale == 1.0:
        return config
    conf = config.spark_conf
    if config.spark == SparkMode.RAYDP.value:
        conf = {_MASTER_CONF: str(_shrunk(MASTER_CPUS, scale)), **conf}
    return dataclasses.replace(
        config,
        buffer_cpus=_shrunk(config.buffer_cpus, scale),
        spark_executor_cpus=_shrunk(config.spark_executor_cpus, scale),
        spark_conf=conf,
    )


def _shrunk(share: float, scale: float) -> float:
    """In Ray's steps. Above 1 Ray takes whole CPUs only."""
    shrunk = math.floor(share * scale * _STEPS) / _STEPS
    return shrunk if shrunk <= 1 or scale == 1.0 else float(math.floor(shrunk))


def _too_small(configs: Sequence[Config], needed: Sequence[Demand], cpus: float) -> PreconditionMissing:
    shrunk, full = _asked(needed, LEAST), _asked(needed, 1.0)
    largest_text, remedy = (
        "",
        "give the run fewer slots, a machine with more CPUs, or a Ray cluster (RAY_ADDRESS)",
    )
    largest = max(needed, key=lambda each: each.n * each.cpus)
    if largest.name in _SETTINGS and largest.n * largest.cpus > full / 2:
        each, number = _SETTINGS[largest.name]
        largest_text = (
            f"; {largest.n * largest.cpus:.4g} are for {largest} "
            f"({number} = {largest.n}, {each} = {largest.cpus:g})"
        )
        remedy = f"lower {each if largest.cpus > 1 else number}; or {remedy}"
    return PreconditionMissing(
        f"this machine is too small for the run: {counted(len(configs), 'slot')} would ask Ray for {full:.4g} CPUs, or "
        f"for {shrunk:.4g} at the least, and it has {cpus:g}{largest_text}",
        remedy=remedy,
    )
