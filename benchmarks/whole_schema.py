"""Base tables of a whole schema: ``python -m benchmarks.whole_schema --tables 1000 --rows 100``.

No server: the log is made here, in the sink's layout, with a snapshot of each table and then transactions that update
one row of some tables. The first refresh builds all base tables. Then come refreshes after transactions of one table,
of ten, and of a tenth of all. Of each refresh: seconds from the look at the log to the line in the manifest; the CPU
seconds of this process, which say more than those on a busy machine (Spark's process is not in them, and small tables
need none); and the megabytes that this process had at most meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mirror import RELATION, MadeLog, local_session
from xidstream.actors.mirror import Mirror


def run(n_tables: int, rows: int, repeats: int, folder: Path) -> dict[str, Any]:
    relations = [dataclasses.replace(RELATION, relid=20_000 + i, table=f"t{i:05d}") for i in range(n_tables)]
    log = MadeLog(folder / "log")
    log.snapshot(rows, relations)
    log.update(np.arange(1), 0, relations[:1])
    spark = local_session(folder)
    mirror = Mirror(str(log.path))
    found: dict[str, Any] = {"tables": n_tables, "rows": rows, "load": os.getloadavg()[0]}
    spark.range(1).count()  # the session is there
    found["first"] = costs(lambda: mirror.refresh(spark))
    number = 0
    for n in sorted({1, min(10, n_tables), max(1, n_tables // 10)}):
        times = []
        for _ in range(repeats):
            number += 1
            log.update(np.arange(1), number, relations[:n])
            times.append(costs(lambda: mirror.refresh(spark)))
        found[f"behind_{n}_tables"] = times
        print(json.dumps(found), file=sys.stderr, flush=True)
    spark.stop()
    return found


def costs(act: Callable[[], object]) -> dict[str, float]:
    """``peak_mb``: resident, of this process, while ``act`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began_s, cpu_s = time.monotonic(), time.process_time()
    act()
    ended_s, ended_cpu_s = time.monotonic(), time.process_time()
    (peak,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return {
        "s": round(ended_s - began_s, 2),
        "cpu_s": round(ended_cpu_s - cpu_s, 2),
        "peak_mb": round(int(peak.split()[1]) / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=100, help="of each table")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-schema-") as folder:
        print(json.dumps(run(options.tables, options.rows, options.repeats, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
