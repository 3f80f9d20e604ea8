"""Start-up: from ``xidstream run``, in a process of its own, to the first row in the handler.

It also measures the longest parts one after the other, and the time that the kernels' cache saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import median
from benchmarks.source import PUBLICATION, Source, server
from xidstream.pipeline.spark.spark_batch import SparkBatch

_MARK = "XIDSTREAM_BENCH_MARK"
_WARM_UP = """
import time
began_s = time.monotonic()
from xidstream.pipeline.decode import warm_up
warm_up()
print(time.monotonic() - began_s)
"""
_PARTS = """
import json, time
times, began_s = {}, time.monotonic()
def done(part):
    global began_s
    now_s = time.monotonic()
    times[part], began_s = now_s - began_s, now_s
from xidstream.actors.driver import session as sessions
from xidstream.pipeline.settings.config import Config
done("imports")
sessions.connect_ray()
done("ray.init")
sessions.start_spark(Config(), "parts")
done("Spark session and its first jobs")
sessions.stop_spark()
print(json.dumps(times))
"""


def note_first(batch: SparkBatch) -> None:
    """The handler of the measured run. It notes when it was called first."""
    mark = Path(os.environ[_MARK])
    if not mark.exists():
        mark.write_text(str(time.time()))


def run(repeats: int) -> dict[str, Any]:
    seconds = []
    with server() as publisher, tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
        for i in range(repeats):
            source = Source(publisher, f"startup{i}")
            (slot,) = source.slots(1)
            source.insert(100)
            seconds.append(_first_row_s(source, slot, Path(folder) / str(i)))
            source.close()
        parts = [json.loads(_run(_PARTS, {})) for _ in range(repeats)]
        cached = [_warm_up_s({}) for _ in range(repeats)]
        empty = [_warm_up_s({"NUMBA_CACHE_DIR": f"{folder}/cache{i}"}) for i in range(repeats)]
    return {
        "first_row": {"median_s": median(seconds), "all_s": seconds},
        "parts": {part: median([p[part] for p in parts]) for part in parts[0]},
        "kernels_cached": {"median_s": median(cached), "all_s": cached},
        "kernels_compiled": {"median_s": median(empty), "all_s": empty},
    }


def _first_row_s(source: Source, slot: str, folder: Path) -> float:
    folder.mkdir()
    mark = folder / "mark"
    command = [sys.executable, "-m", "actors", "run", "--dsn", source.dsn, "--slot", slot]
    command += ["--publication", PUBLICATION, "--storage", f"{folder}/segments"]
    command += ["--sink", "foreach:benchmarks.startup:note_first", "--available-now"]
    started_s = time.time()
    subprocess.run(
        command, env={**os.environ, _MARK: str(mark)}, check=True, capture_output=True, timeout=300
    )
    return float(mark.read_text()) - started_s


def _warm_up_s(environment: dict[str, str]) -> float:
    return float(_run(_WARM_UP, environment))


def _run(script: str, environment: dict[str, str]) -> str:
    """Run ``script`` in a process of its own. Returns the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.splitlines()[-1]
