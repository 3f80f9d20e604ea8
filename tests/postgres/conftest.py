"""The fixtures of ``tests/postgres_fixtures.py``, for this folder. Half of the scenarios' matrix is slow."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.postgres_fixtures import *  # noqa: F403
from tests.scenario_matrix import others_of


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"postgres_server", "scenario"} <= parameters.keys():
            pair = (parameters["postgres_server"], parameters["scenario"])
            tests[item.nodeid.partition("[")[0]].append((item, pair))
    for found in tests.values():
        others = others_of({pair for _, pair in found})
        for item, pair in found:
            if pair in others:
                item.add_marker(pytest.mark.slow)
