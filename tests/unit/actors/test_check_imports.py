"""What the command line's process loads: not what the actors need, whose classes it names.

Each of these is tens of megabytes and a part of a second, and the process holds it for as long as the run lasts.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = "import sys, importlib; importlib.import_module(sys.argv[1]); print(*set(sys.argv[2:]) & set(sys.modules))"
KERNELS_AND_SPARK = ("numba", "pyspark", "raydp", "pandas")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("xidstream.actors.cli.checks", KERNELS_AND_SPARK),
        ("xidstream.actors.cli.run", (*KERNELS_AND_SPARK, "deltalake", "pyarrow.dataset")),
    ],
    ids=["check", "run"],
)
def test_the_command_loads_neither_the_decoder_nor_spark(module: str, absent: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *absent],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == []
