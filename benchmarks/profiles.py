"""Profiles: where the CPU goes while the large transaction is drained, in the parts and in the walsender.

The kernel gives the CPU by thread. Only this shows what Ray's own threads and the JVM's compilers take. py-spy samples
the Python of the reader and the buffers without stopping them: a sample that pauses its process would cost more here
than what it measures. This needs the right to trace processes: root, or ``kernel.yama.ptrace_scope = 0``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ours, references
from benchmarks.processes import role_of
from benchmarks.results import median
from benchmarks.source import Source, server
from benchmarks.walsender import Spent, WalsenderWatch

_PER_S = 100
_READER = (
    ("gather (", "messages from libpq into a block (compiled)"),
    ("put_object (", "a block into shared memory"),
    ("submit (", "calls to the sequencer"),
    ("_actor_method_call (", "calls to buffers and sequencer"),
    ("collect (", "results of calls"),
    ("_look (", "the looks between"),
    ("_read (", "the loop around"),
    ("feedback (", "feedback, statistics"),
    ("stats (", "feedback, statistics"),
)
_BUFFER = (
    ("scan (", "find the rows of a block"),
    ("next_column (", "find a column's values"),
    ("strings (", "text"),
    ("timestamptz (", "timestamps"),
    ("integer (", "integers"),
    ("decimal (", "numeric"),
    ("floating (", "floats"),
    ("decode_transaction_block (", "rest of decoding"),
    ("write_segment (", "spill to a segment"),
    ("seal (", "release what is in memory"),
    ("deserialize_objects (", "take a block from shared memory"),
    ("guarded (", "the rest of a call"),
)
"""The innermost frame with one of these marks gives a sample its label. Other samples are not counted: threads that
wait, and Ray's work between calls, which is not Python."""
_WAITING = ("_look (", "wait_readable (")
"""A thread whose innermost frame is one of these sleeps."""

_THREADS = (
    ("ray::", "main threads"),
    ("C1 Compiler", "JIT compiler"),
    ("C2 Compiler", "JIT compiler"),
    ("G1 ", "garbage collector"),
    ("GC ", "garbage collector"),
    ("Executor task", "tasks"),
)


def run(rows: int, repeats: int) -> dict[str, Any]:
    with server() as publisher, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)
        source = Source(publisher, "profile")
        slots = iter(source.slots(5 * repeats))
        source.insert(rows)
        end_lsn = source.end_lsn()
        source.insert(1)
        measured: dict[str, Any] = {"rows": rows, "walsender": {}}
        for link, dsn in (("TCP", source.dsn), ("Unix socket", source.socket_dsn)):
            theirs, us = [], []
            for _ in range(repeats):
                with WalsenderWatch(source.socket_dsn) as watch:
                    wall_s = references.recvlogical(source, next(slots), end_lsn, dsn=dsn)
                theirs.append(_parts(wall_s, watch.spent))
                with WalsenderWatch(source.socket_dsn) as watch:
                    drained = ours.drain(spark, source, next(slots), rows + 1, ours.nothing, dsn=dsn)
                us.append(_parts(drained.handler_s, watch.spent))
            measured["walsender"][link] = {"pg_recvlogical": _medians(theirs), "xidstream": _medians(us)}
        runs = [_profiled(spark, source, next(slots), rows) for _ in range(repeats)]
        source.close()
    measured["threads"] = {
        role: {
            thread: median([r["threads"][role].get(thread, 0.0) for r in runs]) / rows * 1e6
            for thread in set().union(*(r["threads"][role] for r in runs))
        }
        for role in ("reader", "buffers", "sequencer", "spark", "ray")
    }
    measured["python"] = {
        role: dict(sum((Counter(r["python"][role]) for r in runs), Counter()))
        for role in ("reader", "buffers")
    }
    return measured


def _parts(wall_s: float, spent: Spent) -> dict[str, float]:
    parts = {"wall_s": wall_s, **asdict(spent)}
    parts["blocked_s"] = max(0.0, wall_s - sum(asdict(spent).values()))
    return parts


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median([r[name] for r in runs]) for name in runs[0]}


def _profiled(spark: Any, source: Source, slot: str, rows: int) -> dict[str, Any]:
    """One drain to a Spark action on every row: CPU seconds by role and thread, samples by role and label."""
    with (
        tempfile.TemporaryDirectory(prefix="xs-bench-") as folder,
        ours.stream(spark, source, slot, ours.touch_every_row) as running,
    ):
        reader, *buffers = running.supervisor.pids
        spies = [_spy(pid, Path(folder) / str(pid)) for pid in (reader, *buffers)]
        before = _thread_times()
        running.wait(lambda: running.n_rows >= rows + 1)
        after = _thread_times()
        for spy in spies:
            spy.send_signal(signal.SIGINT)
            spy.wait()
        python = {
            "reader": _samples(Path(folder) / str(reader), _READER),
            "buffers": sum((_samples(Path(folder) / str(b), _BUFFER) for b in buffers), Counter()),
        }
    threads: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for key, (role, name, cpu_s) in after.items():
        threads[role][name] += cpu_s - (before[key][2] if key in before else 0.0)
    return {"threads": threads, "python": python}


def _spy(pid: int, out: Path) -> subprocess.Popen[bytes]:
    py_spy = Path(sys.executable).with_name("py-spy")
    command = [py_spy, "record", "--nonblocking", "--rate", str(_PER_S), "--format", "raw", "--output", out]
    return subprocess.Popen(
        [*map(str, command), "--pid", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _samples(raw: Path, labels: tuple[tuple[str, str], ...]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, n = line.rsplit(" ", 1)
        label = label_of(stack.split(";"), labels)
        if label is not None:
            counted[label] += int(n)
    return counted


def label_of(frames: list[str], labels: tuple[tuple[str, str], ...]) -> str | None:
    """The label of a sample. ``frames`` begin with the outermost, as ``Class.function (file:line)``."""

    def has(frame: str, mark: str) -> bool:
        return frame.startswith(mark) or "." + mark in frame

    if any(has(frames[-1], mark) for mark in _WAITING):
        return None
    return next((label for frame in reversed(frames) for mark, label in labels if has(frame, mark)), None)


def _thread_times() -> dict[tuple[int, int], tuple[str, str, float]]:
    """(pid, thread id) -> role, kind of thread, CPU seconds, for all processes below this one."""
    ticks = os.sysconf("SC_CLK_TCK")
    times = {}
    for process in psutil.Process().children(recursive=True):
        try:
            role = role_of(" ".join(process.cmdline()))
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
                fields = rest.split()
                kind = thread_kind(name, is_main=task.name == str(process.pid))
                times[process.pid, int(task.name)] = (role, kind, (int(fields[11]) + int(fields[12])) / ticks)
        except (psutil.Error, OSError):
            continue  # it ended between the listing and the look
    return times


def thread_kind(name: str, *, is_main: bool) -> str:
    """The kind of a thread. ``name`` is the kernel's name of it, which has at most 15 characters."""
    if is_main:
        return "main threads"
    return next((kind for mark, kind in _THREADS if name.startswith(mark)), "other threads")
