"""Has every process of a run shorten its log after moments: a test cannot wait for an hour, nor for a thousand commits.

Python imports a module of this name at its start, where its folder is in PYTHONPATH. Ray's workers have the environment
of the run, so the Spark driver is among the processes. A test that patches its own process does not reach those.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SHORTENING = "xidstream.pipeline.sinks.log_shortening"
UPKEEP = "xidstream.pipeline.delta.upkeep"


def hurry(module: Any) -> None:
    if module.__name__ == SHORTENING:
        module.LEAST_AGE_S = 0.2
    else:
        module.PACES[module.UpkeepStep.LOG] = module.UpkeepPace(10, 0.5, offset=5)
        module.PACES[module.UpkeepStep.FILES] = module.UpkeepPace(10, 0.5)


class Hurry(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (SHORTENING, UPKEEP):
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        hurry(module)


sys.meta_path.insert(0, Hurry())
