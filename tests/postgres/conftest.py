"""The fixtures of ``tests/postgres_fixtures.py``, for this folder, and scenarios in databases of other encodings.

Half of the scenarios' matrix is slow. So are the tests of ``_NEWEST_FIRST`` on the older server.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.differential.scenario import Scenario
from tests.postgres_fixtures import *  # noqa: F403
from tests.postgres_fixtures import VERSIONS, Database, drop_database
from tests.scenario_matrix import others_of
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

_numbers = itertools.count(1)
_NEWEST_FIRST = {"test_session_settings.py", "test_snapshot_generations.py", "test_table_holder.py"}
"""Files of many tests, or long ones, that say of each server the same."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"postgres_server", "scenario"} <= parameters.keys():
            pair = (parameters["postgres_server"], parameters["scenario"])
            tests[item.nodeid.partition("[")[0]].append((item, pair))
        if item.path.name in _NEWEST_FIRST and parameters.get("postgres_server") == min(VERSIONS):
            item.add_marker(pytest.mark.slow)
    for found in tests.values():
        others = others_of({pair for _, pair in found})
        for item, pair in found:
            if pair in others:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def scenario_in(
    _servers: Callable[[int], EmbeddedPostgres], tmp_path: Path
) -> Iterator[Callable[..., Scenario]]:
    """``scenario_in(encoding)``: over a database of this encoding on PostgreSQL 18."""
    server = _servers(18)
    with ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))

        def make(encoding: str) -> Scenario:
            name = f"encoded_{next(_numbers)}"
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} LOCALE 'C'").format(
                    sql.Identifier(name), sql.Literal(encoding)
                )
            )
            stack.callback(drop_database, admin, name)
            if encoding == "LATIN1":
                # For the tests' own sessions, whose statements are UTF-8.
                admin.execute(
                    sql.SQL("ALTER DATABASE {} SET client_encoding = 'UTF8'").format(sql.Identifier(name))
                )
            connection = stack.enter_context(
                psycopg.connect(server.conninfo(name, client_encoding="UTF8"), autocommit=True)
            )
            scenario = Scenario(Database(server, name, connection), tmp_path, 4, "on")
            stack.callback(scenario.close)
            return scenario

        yield make
