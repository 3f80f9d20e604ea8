"""``xidstream run`` as a process, for the benchmarks that look at a whole run: its account, its memory by part."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.processes import role_of
from benchmarks.source import PUBLICATION, Source
from xidstream.actors.runtime.run_search import local_answers

_WAIT_S: Final = 120.0
_SINK: Final = "ray::SparkDriver"


class SlotRun:
    """A run of one slot into the folder ``tables`` of a folder, until the end of the block. ``start_s``: from the
    command to the slot in use. ``snapshot``: the setting."""

    def __init__(self, source: Source, slot: str, folder: Path, snapshot: str = "initial") -> None:
        self._source, self._slot, self._folder, self._snapshot = source, slot, folder, snapshot
        self.root = folder / "tables"

    def __enter__(self) -> SlotRun:
        where = ["--slot", self._slot, "--publication", PUBLICATION, "--storage", f"{self._folder}/storage"]
        command = [
            sys.executable,
            "-m",
            "actors",
            "run",
            "--dsn",
            self._source.dsn,
            *where,
            "--sink",
            f"delta:{self.root}",
        ]
        with open(self._folder / "run.log", "ab") as log:
            started_s = time.monotonic()
            self._process = subprocess.Popen([*command, "--snapshot", self._snapshot], stdout=log, stderr=log)
        self.await_(self._is_read)
        self.start_s = time.monotonic() - started_s
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_read(self) -> bool:
        query = "select active from pg_replication_slots where slot_name = %s"
        return bool(self._source.execute(query, self._slot)[0][0])

    def await_(self, condition: Any) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not condition():
            assert self._process.poll() is None, (self._folder / "run.log").read_text()
            assert time.monotonic() < deadline_s, "it did not happen in time"
            time.sleep(0.05)

    def account(self) -> dict[str, Any]:
        (answer,) = local_answers(self._slot)
        return dict(json.loads(answer))

    def n_transactions(self) -> int:
        return int(self.account()["sink"]["n_transactions"])

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def pss_mb(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for process in self.processes():
            line = " ".join(process.cmdline())
            known = {_SINK: "sink", "actors run": "supervisor"}
            role = next((name for mark, name in known.items() if mark in line), None) or role_of(line)
            found[role] += process.memory_full_info().pss
        return {"all": round(found.total() / 1e6), **{k: round(v / 1e6) for k, v in sorted(found.items())}}

    def sink_cpu_s(self) -> float:
        (sink,) = [each for each in self.processes() if _SINK in "".join(each.cmdline())]
        times = sink.cpu_times()
        return float(times.user + times.system)
