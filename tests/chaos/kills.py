"""Which fault strikes when: a seed's schedule, and the file through which running processes hear of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.feedback_spy import FeedbackSpy
from xidstream.pipeline.faultpoints import POINTS, Fault, parse

JOURNAL_POINTS = frozenset(point for point in POINTS if "journal" in point)
"""Passed where the journal is forced on."""
STREAM_POINTS = {
    point: where
    for point, where in POINTS.items()
    if "snapshot" not in point and not where.startswith("mirror:") and point not in JOURNAL_POINTS
}
"""Rounds begin with empty tables and have no mirror, so they pass no point of these: tests/e2e kills there."""
DRIVER_POINTS = frozenset(p for p, where in STREAM_POINTS.items() if where.startswith("driver:"))
"""A kill here costs a new Spark session, an order of magnitude more than one elsewhere."""
PREPARED_POINTS = frozenset({"writing_prepared", "prepared_written"})
OTHER_POINTS = frozenset(STREAM_POINTS) - DRIVER_POINTS - PREPARED_POINTS


def schedule(
    seed: int,
    n_kills: int,
    *,
    two_phase: bool,
    driver_share: float,
    together: int = 1,
    journal: bool = False,
) -> list[str]:
    """``n_kills`` faults as the plan's text has them, in an order of the seed's.

    Each class of points (the driver's, the prepared transactions', all others) is dealt in turn over the seeds, each
    seed going on where the one before ended: so S seeds strike every point of a class equally often, give or take
    one. ``driver_share`` is how many of the kills may be of the driver. Only two-phase rounds pass the points of
    prepared transactions, so these come twice as often there. ``together``: so many are armed at once, the driver's
    excepted, to kill one part while the epoch after another's death still begins.
    """
    r = random.Random(f"kills {seed}")
    n_drivers = round(n_kills * driver_share)
    n_prepared = n_kills // 10 if two_phase else 0
    others_of = OTHER_POINTS | JOURNAL_POINTS if journal else OTHER_POINTS
    points = [
        *_dealt(sorted(DRIVER_POINTS), n_drivers, before=(seed - 1) * n_drivers),
        *_dealt(sorted(PREPARED_POINTS), n_prepared, before=0),
        # The rest of a seed without prepared transactions is the larger one; an overlap harms no one.
        *_dealt(
            sorted(others_of), n_kills - n_drivers - n_prepared, before=(seed - 1) * (n_kills - n_drivers)
        ),
    ]
    r.shuffle(points)
    faults = [f"{p}:kill@{_passage(r, p)}#{seed}-{i}" for i, p in enumerate(points)]
    alone = [f for f, p in zip(faults, points, strict=True) if p in DRIVER_POINTS]
    others = [f for f, p in zip(faults, points, strict=True) if p not in DRIVER_POINTS]
    groups = [",".join(others[i : i + together]) for i in range(0, len(others), together)]
    r.shuffle(groups)
    for fault in alone:
        groups.insert(r.randrange(len(groups) + 1), fault)
    return groups


def _dealt(points: list[str], n: int, *, before: int) -> list[str]:
    """``n`` points in turn, behind ``before`` that were dealt already."""
    return [points[(before + i) % len(points)] for i in range(n)]


def _passage(r: random.Random, point: str) -> int:
    """The rare ones at once, the frequent ones somewhere."""
    rare = point in PREPARED_POINTS or "segment" in point or point in ("sealing", "sealed")
    if rare or point in DRIVER_POINTS:
        return 1
    return r.choice((1, 2, 3, 5) if POINTS[point].startswith(("reader", "buffer")) else (1, 1, 2))


@dataclass
class Plan:
    """The file and the tokens; ``arm`` changes what all processes do at once."""

    folder: Path

    def __post_init__(self) -> None:
        self.file = self.folder / "faults"
        self.tokens = self.folder / "tokens"
        self.tokens.mkdir(parents=True, exist_ok=True)
        self.arm("")

    def arm(self, text: str) -> tuple[Fault, ...]:
        new = self.folder / "faults.new"
        new.write_text(text)
        new.replace(self.file)
        return parse(text)

    def struck_at(self, fault: Fault) -> float | None:
        """When (``time.time``) the fault struck, or None."""
        try:
            return (self.tokens / fault.token).stat().st_mtime
        except FileNotFoundError:
            return None


# -- kills from outside ----------------------------------------------------------------------------------

_JVMS = {
    "spark_executor": ("io.ray.runtime.runner.worker.DefaultWorker", "-Dspark.driver.port="),
    "spark_app_master": ("io.ray.runtime.runner.worker.DefaultWorker", "-Dspark.executor.instances="),
    "spark_master_gateway": ("org.apache.spark.deploy.raydp.AppMasterEntryPoint",),
    "spark_driver_jvm": ("org.apache.spark.deploy.SparkSubmit",),
}
"""Kind of JVM → what is in its command line, and in no other kind's."""

OUTSIDE = (*_JVMS, "connection")
"""What is killed from outside, because no code of ours runs there."""


def kill_from_outside(what: str, spy: FeedbackSpy) -> bool:
    """Whether there was something to kill. JVMs are those of the Ray that this process started, and no other's."""
    if what == "connection":
        spy.cut()
    else:
        victims = jvms(what)
        for victim in victims:
            victim.kill()
        return bool(victims)
    return True


def jvms(kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.name() == "java":
                line = process.cmdline()
                if all(any(a.startswith(mark) for a in line) for mark in _JVMS[kind]):
                    found.append(process)
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
    return found
