"""Keeps pyarrow from importing pandas where nobody uses it: in all processes of a run that have no user's code.

With the first array that it makes of Python or numpy values pyarrow imports pandas, to recognise pandas' objects. In a
process that has Ray and numba this took 0.33 s of CPU, and 37 MB of memory (29 MB of it private). Each buffer paid it
before it was ready. So pyarrow is made to look once while there is no pandas to be found. If ``to_pandas`` is called
later, pyarrow looks again, and finds it. (The slot reader makes no array before it decodes small blocks,
and calls this then.)

Not for a process that runs a user's code (a function as the sink): there pyarrow must recognise what it is given.

Rejected: None for pandas in ``sys.modules``. Python's own import refuses that, but pyarrow's compiled one takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa


class _NoPandas:
    """A finder of ``sys.meta_path`` that refuses this one name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pyarrow is to do without pandas", name=name)
        return None


def skip_pandas_import() -> None:
    """Call this once, when the process starts, before it makes any array. A pandas that was imported stays."""
    refusing = _NoPandas()
    sys.meta_path.insert(0, refusing)
    try:
        pa.array([0])  # of a list with a value: pyarrow's Cython looks, and its C++ besides
    finally:
        sys.meta_path.remove(refusing)
