"""Measures what the walsender did while a slot was read: it worked, waited for a CPU, or waited for its reader.

The figures come from the kernel (``/proc/PID/stat`` and ``schedstat``), so they need a server on this machine. They
tell a reader that is too slow (the walsender waits for it) from a machine that is too small (the walsender waits for a
CPU).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psycopg

_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Spent:
    """Seconds of the walsender that worked most. For the rest of the wall clock it was blocked."""

    user_s: float
    system_s: float
    waited_for_cpu_s: float


class WalsenderWatch:
    """Takes samples from ``__enter__`` to ``__exit__``. A walsender that ended is counted up to its last sample."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stop = threading.Event()
        self._seen: dict[int, Spent] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> WalsenderWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def spent(self) -> Spent:
        if not self._seen:
            raise RuntimeError("no walsender was seen")
        return max(self._seen.values(), key=lambda s: s.user_s)

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._stop.wait(_INTERVAL_S):
                for (pid,) in connection.execute(b"select pid from pg_stat_replication").fetchall():
                    try:
                        self._seen[pid] = _spent(pid)
                    except FileNotFoundError:
                        continue  # it ended meanwhile


def _spent(pid: int) -> Spent:
    ticks = os.sysconf("SC_CLK_TCK")
    # The name may hold any character, so it is skipped. Of the fields after it, the 12th and 13th are utime and stime.
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return Spent(int(fields[11]) / ticks, int(fields[12]) / ticks, waited_ns / 1e9)
