"""A process of the pipeline's own makes Arrow's arrays without pandas, and finds it when it asks."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

import numpy as np
import pyarrow as pa

from xidstream.actors.runtime.no_pandas import skip_pandas_import

skip_pandas_import()
found = list(sys.meta_path)
table = pa.table({"a": [1, None], "b": np.zeros(2), "c": pa.array(["x", "y"]), "d": [pa.scalar(1)] * 2})
print("pandas" in sys.modules, table.to_pandas().shape, "pandas" in sys.modules, found == sys.meta_path)
"""


def test_arrays_are_made_without_pandas_which_is_there_when_it_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "(2,", "4)", "True", "True"]
