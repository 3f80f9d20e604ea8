"""CPU seconds and memory of the processes below this one, by role. They are read from the kernel while a case runs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psutil

_ROLES = (
    ("ray::SlotReader", "reader"),
    ("ray::XidBuffer", "buffers"),
    ("ray::CommitSequencer", "sequencer"),
    ("ray::SnapshotReader", "snapshot readers"),
    ("ray::SnapshotHolder", "snapshot holder"),
    ("xidstream.pipeline.spark.daemon", "spark"),
    ("pyspark", "spark"),
    ("raydp", "spark"),
    ("gcs_server", "ray"),
    ("raylet", "ray"),
    ("ray::", "ray"),
    ("/ray/", "ray"),
)
"""The first of these marks that is in a command line gives the role. This process has the role ``driver``."""

_INTERVAL_S = 0.25
"""A sample of all processes of a run takes some 12 ms of CPU time. A case that is over in seconds, and keeps both cores
busy, takes fewer."""


def server_cpu_s(postmaster: int) -> float:
    """CPU seconds of a server's processes so far, those that have ended included."""
    server = psutil.Process(postmaster)
    total = 0.0
    for process in [server, *server.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended, and counts with the postmaster's children soon
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def role_of(command_line: str) -> str:
    return next((role for mark, role in _ROLES if mark in command_line), "other")


@dataclass(frozen=True)
class Usage:
    """By role: CPU seconds, the largest private memory of one process, and its largest growth."""

    cpu_s: dict[str, float]
    peak_bytes: dict[str, int]
    growth_bytes: dict[str, int]


_OFTEN_S = 0.03


class Watch:
    """Takes samples until ``end``. A process that ends in between is counted up to its last sample. Those of the role
    ``often`` end before the case does, and are looked at every ``_OFTEN_S``."""

    def __init__(self, interval_s: float = _INTERVAL_S, *, often: str | None = None) -> None:
        self._interval_s = interval_s
        self._often = often
        self._me = psutil.Process()
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self._base: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self._stop = threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> Usage:
        self._stop.set()
        self._thread.join()
        self._sample()
        cpu: dict[str, float] = defaultdict(float)
        peak: dict[str, int] = defaultdict(int)
        growth: dict[str, int] = defaultdict(int)
        for pid, (role, last_s) in self._last.items():
            cpu[role] += last_s - self._first[pid]
            if pid in self._peak:
                peak[role] = max(peak[role], self._peak[pid])
                growth[role] = max(growth[role], self._peak[pid] - self._base[pid])
        return Usage(dict(cpu), dict(peak), dict(growth))

    def _run(self) -> None:
        next_s = time.monotonic() + self._interval_s
        while not self._stop.wait(self._interval_s if self._often is None else _OFTEN_S):
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + self._interval_s
                self._sample()
            for pid, (role, _) in self._last.items():
                if role == self._often:
                    self._count(pid, role)

    def _count(self, pid: int, role: str) -> None:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return  # it has ended
        self._last[pid] = (role, times.user + times.system)

    def _sample(self) -> None:
        for process in [self._me, *self._me.children(recursive=True)]:
            try:
                self._one(process)
            except psutil.Error:
                continue  # it ended between the listing and the look

    def _one(self, process: Any) -> None:
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_info()
            # A worker becomes an actor only after it was started, and then gets its name.
            role = "driver" if process.pid == self._me.pid else role_of(" ".join(process.cmdline()))
        cpu_s = times.user + times.system
        self._first.setdefault(process.pid, cpu_s)
        self._last[process.pid] = (role, cpu_s)
        private = int(memory.rss - memory.shared)
        self._base.setdefault(process.pid, private)
        self._peak[process.pid] = max(self._peak.get(process.pid, 0), private)
