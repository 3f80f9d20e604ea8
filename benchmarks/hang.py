"""What waits for a sink that hangs: one-row commits at a steady rate, no journal, and memory by part as they pile up.

The reader, its buffers and the sequencer are the actors of a run. In place of the Spark driver stands one that takes a
batch and never reports it: no JVM is needed to hang. ``bytes_per_commit`` is the slope between the first look after
``SINGLE_UNITS`` commits and the last one, so that what a process takes at its start is not in it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
import ray
from ray._private.internal_api import node_stats

from benchmarks.processes import role_of
from benchmarks.source import PUBLICATION, Source, server
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.settings.config import Config

_PARTS = ("reader", "buffers", "sequencer")
_LOOK_S = 10.0
_WARM_COMMITS = 3_000
_WRITERS = 4


class _HangingDriver:
    """Takes the first batch, and nothing after it."""

    replaceable = True

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        return None

    def is_alive(self) -> bool:
        return True

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        self._thread = threading.Thread(target=self._hang, args=(sequencer,), daemon=True)
        self._thread.start()

    def _hang(self, sequencer: Any) -> None:
        loop = ray.get(sequencer.sink_opened.remote(INVALID_LSN, 0)).loop
        while not self._stop.is_set() and ray.get(sequencer.next_batch.remote(0.5, loop)) is None:
            pass
        self._stop.wait()

    def result(self, timeout_s: float) -> bool:
        return self._stop.wait(timeout_s)

    def end(self, timeout_s: float) -> bool:
        self._stop.set()
        return True

    def progress(self) -> SinkReport:
        return SinkReport()

    def account(self) -> None:
        return None

    def take_output(self) -> list[str]:
        return []

    def close(self) -> None:
        self._stop.set()


def run(rate: float, seconds: float) -> dict[str, Any]:
    connect_ray()
    with server() as publisher, tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
        return _hang(Source(publisher, "hang"), folder, rate, seconds)


def _hang(source: Source, folder: str, rate: float, seconds: float) -> dict[str, Any]:
    (slot,) = source.slots(1)
    config = Config.of(
        {
            "dsn": source.dsn,
            "slot": slot,
            "publication": PUBLICATION,
            "storage": str(Path(folder) / "storage"),
            "journal_max_bytes": 0,
            "snapshot": "never",
        }
    )
    driver = _HangingDriver()
    supervisor = Supervisor(config, lambda: driver, notify=lambda text: None)
    running = threading.Thread(target=supervisor.run, daemon=True)
    running.start()
    while not supervisor.pids:
        time.sleep(0.2)
    ends_s, counts = time.monotonic() + seconds, [0] * _WRITERS
    writers = [
        threading.Thread(target=_write, args=(source.dsn, number, rate / _WRITERS, ends_s, counts))
        for number in range(_WRITERS)
    ]
    for writer in writers:
        writer.start()
    looks = []
    while time.monotonic() < ends_s:
        time.sleep(_LOOK_S)
        looks.append(_look(supervisor, sum(counts)))
        print(f"hang: {looks[-1]}", flush=True)
    for writer in writers:
        writer.join()
    supervisor.stop()
    running.join(60)
    first = next(look for look in looks if look["commits"] >= _WARM_COMMITS)
    n = looks[-1]["commits"] - first["commits"]
    return {
        "rate": rate,
        "seconds": seconds,
        "looks": looks,
        "bytes_per_commit": {part: (looks[-1][part] - first[part]) / n for part in (*_PARTS, "object store")},
    }


def _look(supervisor: Supervisor, commits: int) -> dict[str, Any]:
    account = supervisor.status().account
    reader, sequencer = account.reader, account.sequencer
    return {
        "commits": commits,
        "units": None if sequencer is None else sequencer.n_waiting,
        "backlog_bytes": None if reader is None else reader.backlog_bytes,
        **_memory(),
        "object store": _object_store_bytes(),
    }


def _object_store_bytes() -> int:
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


def _memory() -> dict[str, int]:
    """Private bytes of each part's processes, together."""
    found = dict.fromkeys(_PARTS, 0)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            part = role_of(" ".join(process.cmdline()))
            if part in found:
                found[part] += int(process.memory_full_info().uss)
    return found


def _write(dsn: str, number: int, rate: float, ends_s: float, counts: list[int]) -> None:
    """One-row transactions; a late one is not made up for."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        due_s = time.monotonic()
        while due_s < ends_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
            row = number + _WRITERS * counts[number]
            connection.execute("insert into t values (%s, 1, 'x', 1, now(), 0.5, true)", [row])
            counts[number] += 1
            due_s = max(due_s + 1 / rate, time.monotonic() - 1 / rate)
