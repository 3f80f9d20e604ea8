"""``xidstream capture``: from the command to the first rows durable in the journal, and the memory it takes.

In a process of its own, with a Ray of its own, as a person starts it. The rows were committed before. They are durable
when the record in the storage names a file of the journal, which is looked for every 20 ms. Then one transaction of
``rows`` rows is captured. Memory is that of the command and of all processes below it: the resident set, in which
shared pages count in each process, and the proportional one (PSS), in which they count once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import median
from benchmarks.source import PUBLICATION, Source, server
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import ProgressRecord, read_progress
from xidstream.pipeline.storage.storage import Storage

_TIMEOUT_S = 300.0
_SETTLED_S = 3.0


def run(rows: int, repeats: int) -> dict[str, Any]:
    with server() as publisher, tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
        runs = [
            _capture(Source(publisher, f"capture{i}"), Path(folder) / str(i), rows) for i in range(repeats)
        ]
    return {
        "rows": rows,
        "first_rows": {
            "median_s": median([r["first_s"] for r in runs]),
            "all_s": [r["first_s"] for r in runs],
        },
        "large": {"median_s": median([r["large_s"] for r in runs]), "all_s": [r["large_s"] for r in runs]},
        "idle": runs[-1]["idle"],
        "after_large": runs[-1]["after_large"],
    }


def _capture(source: Source, folder: Path, rows: int) -> dict[str, Any]:
    (slot,) = source.slots(1)
    source.insert(100)
    end = source.execute(
        "select system_identifier, (pg_current_wal_lsn() - '0/0')::bigint from pg_control_system()"
    )
    layout = Layout(int(end[0][0]), slot, "bench")
    storage = Storage(str(folder))
    command = [sys.executable, "-m", "actors", "capture", "--dsn", source.dsn, "--slot", slot]
    command += ["--publication", PUBLICATION, "--storage", str(folder)]
    started_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, lambda: _has_journal(read_progress(storage, layout)))
        first_s = time.monotonic() - started_s
        time.sleep(_SETTLED_S)
        idle = _memory(process.pid)
        began_s = time.monotonic()
        source.insert(rows)
        committed_s = time.monotonic()
        lsn = Lsn(int(source.execute("select (pg_current_wal_lsn() - '0/0')::bigint")[0][0]))
        _wait(process, lambda: (describe_slot(source.dsn, slot).confirmed_flush or Lsn(0)) >= lsn)
        large_s = time.monotonic() - committed_s
        after = _memory(process.pid)
        return {
            "first_s": first_s,
            "insert_s": committed_s - began_s,
            "large_s": large_s,
            "idle": idle,
            "after_large": after,
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        source.close()


def _has_journal(record: ProgressRecord | None) -> bool:
    return record is not None and bool(record.journal)


def _wait(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the capture did not get there: status {process.poll()}")
        time.sleep(0.02)


def _memory(pid: int) -> dict[str, Any]:
    command = psutil.Process(pid)
    found: dict[str, Any] = {"rss_bytes": 0, "pss_bytes": 0, "n_processes": 0, "n_jvms": 0}
    for process in [command, *command.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            found["n_jvms"] += process.name() == "java"
        except psutil.Error:
            continue  # it ended meanwhile
        found["rss_bytes"] += info.rss
        found["pss_bytes"] += info.pss
        found["n_processes"] += 1
    return found
