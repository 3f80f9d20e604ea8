"""``xidstream check`` starts nothing, and does not wait for what a run loads: the decoder's kernels, Spark."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = "import sys, xidstream.actors.cli.checks; print(*{'numba', 'pyspark', 'raydp', 'pandas'} & set(sys.modules))"


def test_the_check_loads_neither_the_decoder_nor_spark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == []
