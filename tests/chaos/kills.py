"""Which fault strikes when: a seed's schedule, and the file through which running processes hear of it; kills, and
pauses: a process stands still, alone or with all others of the run, for longer than the server waits for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tests.feedback_spy import FeedbackSpy
from xidstream.pipeline.faultpoints import POINTS, Fault, parse

JOURNAL_POINTS = frozenset(point for point in POINTS if "journal" in point)
"""Passed where the journal is forced on."""
STREAM_POINTS = {
    point: where
    for point, where in POINTS.items()
    if "snapshot" not in point
    and not where.startswith(("mirror:", "iceberg:", "erasure:", "retention:"))
    and point not in JOURNAL_POINTS
}
"""Rounds begin with empty tables and have no mirror, so they pass no point of these: tests/e2e kills there."""
TOGETHER_POINTS = frozenset({"iceberg_tables_committed"})
"""Passed where a catalog commits several tables in one request."""
ICEBERG_POINTS = (
    frozenset(point for point, where in POINTS.items() if where.startswith("iceberg:")) - TOGETHER_POINTS
)
"""Passed where the sink is one of Iceberg tables: the driver's, too."""
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
    iceberg: str | None = None,
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
    of_driver = DRIVER_POINTS | ICEBERG_POINTS if iceberg else DRIVER_POINTS
    if iceberg == "rest":
        of_driver |= TOGETHER_POINTS
    others_of = OTHER_POINTS | JOURNAL_POINTS if journal else OTHER_POINTS
    points = [
        *_dealt(sorted(of_driver), n_drivers, before=(seed - 1) * n_drivers),
        *_dealt(sorted(PREPARED_POINTS), n_prepared, before=0),
        # The rest of a seed without prepared transactions is the larger one; an overlap harms no one.
        *_dealt(
            sorted(others_of), n_kills - n_drivers - n_prepared, before=(seed - 1) * (n_kills - n_drivers)
        ),
    ]
    r.shuffle(points)
    faults = [f"{p}:kill@{_passage(r, p)}#{seed}-{i}" for i, p in enumerate(points)]
    alone = [f for f, p in zip(faults, points, strict=True) if p in of_driver]
    others = [f for f, p in zip(faults, points, strict=True) if p not in of_driver]
    groups = [",".join(others[i : i + together]) for i in range(0, len(others), together)]
    r.shuffle(groups)
    for fault in alone:
        groups.insert(r.randrange(len(groups) + 1), fault)
    return groups


WHOLE: Final = "whole"
"""In the tag of a pause: all processes of the run stand still, as those of a machine do that is moved."""


def with_pauses(groups: list[str], seed: int, pauses: list[str]) -> list[str]:
    """``groups``, and among them ``pauses`` as ``schedule`` gives them: half of them armed beside a group of kills, and
    two of three of the whole run."""
    r = random.Random(f"pauses {seed}")
    made = list(groups)
    for i, text in enumerate(pauses):
        fault = f"{text.partition('#')[0].replace(':kill', ':stop')}#{'alone' if i % 3 == 0 else WHOLE}-{seed}-{i}"
        beside = [n for n, group in enumerate(made) if "," in group and ":stop" not in group]
        if beside and r.random() < 0.5:
            made[r.choice(beside)] += f",{fault}"
        else:
            made.insert(r.randrange(len(made) + 1), fault)
    return made


def _dealt(points: list[str], n: int, *, before: int) -> list[str]:
    """``n`` points in turn, after ``before`` that were dealt already."""
    return [points[(before + i) % len(points)] for i in range(n)]


def _passage(r: random.Random, point: str) -> int:
    """The rare ones at once, the frequent ones somewhere."""
    rare = point in PREPARED_POINTS or "segment" in point or point in ("sealing", "sealed")
    if rare or point in DRIVER_POINTS | ICEBERG_POINTS | TOGETHER_POINTS:
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

    def pid_of(self, fault: Fault) -> int:
        """Of the process where it struck; 0 if that is not written yet."""
        return int((self.tokens / fault.token).read_text() or 0)

    def struck_at(self, fault: Fault) -> float | None:
        """When (``time.time``) the fault struck, or None."""
        try:
            return (self.tokens / fault.token).stat().st_mtime
        except FileNotFoundError:
            return None


# -- pauses ----------------------------------------------------------------------------------------------


def stop_processes(pid: int, *, whole: bool) -> list[psutil.Process]:
    """Those that stand still now: ``pid``, which has stopped itself, and with ``whole`` all others of the run (actors,
    JVMs, and what they started). Ray's own processes go on: they belong to the machine."""
    stopped = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
            is_of_run = process.name() == "java" or (line and line[0].startswith("ray::"))
            if process.pid == pid or (whole and is_of_run and "IDLE" not in line[0]):
                process.suspend()
                stopped.append(process)
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
    return stopped


def let_go_on(stopped: list[psutil.Process]) -> None:
    for process in stopped:
        try:
            process.resume()
        except psutil.NoSuchProcess:
            pass  # it was killed meanwhile


# -- kills from outside ----------------------------------------------------------------------------------

_JVMS = {
    "spark_executor": ("io.ray.runtime.runner.worker.DefaultWorker", "-Dspark.driver.port="),
    "spark_app_master": ("io.ray.runtime.runner.worker.DefaultWorker", "-Dspark.executor.instances="),
    "spark_master_gateway": ("org.apache.spark.api.python.PythonGatewayServer",),
    "spark_driver_jvm": ("org.apache.spark.deploy.SparkSubmit",),
}
"""Kind of JVM → what is in its command line, and in no other kind's."""

JVMS = frozenset(_JVMS)

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
