"""The processes below one, looked at while they come and go."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Living:
    """What was true a moment ago."""

    process: psutil.Process
    name: str
    command: tuple[str, ...]


def living_below(pid: int | None = None) -> list[Living]:
    """The living descendants of a process (default: this one); what ended in between, zombies too, is left out."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(Living(process, process.name(), tuple(process.cmdline())))
        except psutil.Error:
            continue
    return found


def spark_driver_jvms(pid: int) -> list[psutil.Process]:
    return [
        p.process
        for p in living_below(pid)
        if p.name == "java" and any("SparkSubmit" in argument for argument in p.command)
    ]
