"""What a run costs at a trickle: ``python -m benchmarks.trickle [--against CHECKOUT]``.

``xidstream run`` writes the changes of one table into Delta, or hands them to a function, while a client commits some
small transactions a second. The figures are per cent of one core, by role: the run's own processes, Ray's and Spark's.
They are taken after the first ten seconds of the trickle, which load what is loaded once. ``idle`` is the same run
before the first transaction.

With ``--against``, another checkout with an environment of its own in ``.venv`` takes turns with this one. Quote ratios
of such a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import role_of
from benchmarks.source import PUBLICATION, Source, server

_START_S = 180.0
_WARM_S = 10.0
_MARK = "XIDSTREAM_BENCH_MARK"


_HANDLER = f"""
import os
from pathlib import Path

def note(batch):
    Path(os.environ["{_MARK}"]).touch()
"""


@contextmanager
def _running(checkout: Path, source: Source, folder: Path, sink: str) -> Iterator[int]:
    python = checkout / ".venv/bin/python"
    command = [str(python) if python.exists() else sys.executable, "-m", "actors", "run", "--dsn", source.dsn]
    command += ["--slot", source.name, "--publication", PUBLICATION, "--storage", f"{folder}/storage"]
    (folder / "trickle_handler.py").write_text(_HANDLER)
    command += ["--create-slot", "--sink"]
    command += [f"delta:{folder}/tables" if sink == "delta" else "foreach:trickle_handler:note"]
    environment = {**os.environ, _MARK: str(folder / "mark"), "PYTHONPATH": str(folder)}
    with open(folder / "run.log", "wb") as output:
        run = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output)
        try:
            yield run.pid
        finally:
            run.terminate()
            run.wait()


def measure(checkout: Path, source: Source, sink: str, rate: float, seconds: float) -> dict[str, Any]:
    """Per cent of a core by role, at ``rate`` and idle."""
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as name:
        folder = Path(name)
        seen = folder / ("tables/_transactions" if sink == "delta" else "mark")
        with _running(checkout, source, folder, sink) as run:
            _await(lambda: _is_read(source))
            source.insert(1)
            _await(seen.exists)
            time.sleep(_WARM_S)
            idle = _share(run, seconds, lambda: time.sleep(seconds))
            _trickle(source, rate, _WARM_S)
            busy = _share(run, seconds, lambda: _trickle(source, rate, seconds))
    return {"idle": idle, "trickle": busy}


def _is_read(source: Source) -> bool:
    asked = "select active from pg_replication_slots where slot_name = %s"
    return source.execute(asked, source.name) == [(True,)]


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError("the run did not come on")
        time.sleep(0.1)


def _trickle(source: Source, rate: float, seconds: float) -> None:
    began_s, n = time.monotonic(), 0
    while (passed_s := time.monotonic() - began_s) < seconds:
        if n <= passed_s * rate:
            source.insert(1)
            n += 1
        else:
            time.sleep(0.005)


def _share(run: int, seconds: float, work: Callable[[], None]) -> dict[str, float]:
    before = _cpu_s(run)
    work()
    after = _cpu_s(run)
    spent: dict[str, float] = defaultdict(float)
    for pid, (role, cpu_s) in after.items():
        spent[role] += cpu_s - before.get(pid, (role, 0.0))[1]
    shares = {role: round(cpu_s / seconds * 100, 1) for role, cpu_s in sorted(spent.items())}
    return {**shares, "all": round(sum(spent.values()) / seconds * 100, 1)}


def _cpu_s(run: int) -> dict[int, tuple[str, float]]:
    """Role and CPU seconds so far, by process of the run."""
    process = psutil.Process(run)
    found = {}
    for each in [process, *process.children(recursive=True)]:
        try:
            times, role = each.cpu_times(), role_of(" ".join(each.cmdline()))
        except psutil.Error:
            continue  # it has ended
        found[each.pid] = ("xidstream run" if each.pid == run else role, times.user + times.system)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout with a .venv")
    parser.add_argument("--sink", choices=("delta", "foreach"), default="delta")
    parser.add_argument("--rate", type=float, default=10.0, help="transactions a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    checkouts = {"here": Path.cwd(), **({"against": asked.against.resolve()} if asked.against else {})}
    found: dict[str, list[Any]] = {name: [] for name in checkouts}
    with server() as publisher:
        for i in range(asked.rounds):
            for name, checkout in checkouts.items():
                source = Source(publisher, f"trickle_{name}_{i}")
                found[name].append(measure(checkout, source, asked.sink, asked.rate, asked.seconds))
                source.close()
                print(json.dumps({name: found[name][-1]}), flush=True)


if __name__ == "__main__":
    main()
