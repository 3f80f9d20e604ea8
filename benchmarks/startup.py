"""From ``xidstream run`` to the first row in the handler, in its own process; and what the kernels' cache spares."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import median
from benchmarks.source import PUBLICATION, Source, server
from pipeline.spark.frames import SparkBatch

_MARK = "XIDSTREAM_BENCH_MARK"
_WARM_UP = """
import time
began_s = time.monotonic()
from pipeline.decode import warm_up
warm_up()
print(time.monotonic() - began_s)
"""


def note_first(batch: SparkBatch) -> None:
    """The handler of the measured run: when it was called first."""
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
        cached = [_warm_up_s({}) for _ in range(repeats)]
        empty = [_warm_up_s({"NUMBA_CACHE_DIR": f"{folder}/cache{i}"}) for i in range(repeats)]
    return {
        "first_row": {"median_s": median(seconds), "all_s": seconds},
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
    done = subprocess.run(
        [sys.executable, "-c", _WARM_UP],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return float(done.stdout)
