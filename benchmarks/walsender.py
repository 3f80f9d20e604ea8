"""What the walsender did while a slot was read: it worked, waited for a CPU, or waited for its reader.

Read from the kernel (``/proc/PID/stat`` and ``schedstat``), so it sees a server on this machine alone. This tells a
reader that is too slow (the walsender waits for it) from a machine that is too small (it waits for a CPU).
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
    """Seconds of the walsender that worked most. What is left of the wall clock it was blocked."""

    user_s: float
    system_s: float
    waited_for_cpu_s: float


class WalsenderWatch:
    """Looks from ``__enter__`` to ``__exit__``; a walsender that ended is counted up to the last look."""

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
    # After the name, which may hold anything, the fields are plain: utime and stime are the 12th and 13th of them.
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return Spent(int(fields[11]) / ticks, int(fields[12]) / ticks, waited_ns / 1e9)
