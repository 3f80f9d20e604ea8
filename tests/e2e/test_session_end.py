"""How a script's Spark session ends, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ray
from xidstream import spark_session

print(spark_session("ends").range(3).count(), "rows")
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_script_that_ends_ray_before_it_ends_prints_no_traceback_and_starts_no_other_ray() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "3 rows" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.count("Started a local Ray instance") <= 1
