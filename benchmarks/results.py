"""The results file, and the arithmetic between a measurement and a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

OUT = Path("benchmarks/out/results.json")
KEPT = Path("docs/performance/results.json")
"""The copy that the documentation's tables were made from."""


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of pairs that ran side by side."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown"
    )
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": model,
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def load(path: Path = OUT) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def save(case: str, measured: Any) -> None:
    """Replace one case's part of the file, and note the commit at which it was measured."""
    results = load()
    results["machine"] = machine()
    results[case] = {**measured, "commit": results["machine"]["commit"]}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
