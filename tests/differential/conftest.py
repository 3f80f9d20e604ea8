"""Servers of the differential test's own: autovacuum's locks would make a seed mean something else each time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.differential.runner import SERVER_SETTINGS
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "differential: a streamed slot against its unstreamed twin, on an embedded server"
    )


@pytest.fixture(scope="session")
def differential_server() -> Iterator[Callable[[int], EmbeddedPostgres]]:
    with ExitStack() as stack:
        running: dict[int, EmbeddedPostgres] = {}

        def server(version: int) -> EmbeddedPostgres:
            if version not in running:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"xs-diff-{version}-"))
                running[version] = stack.enter_context(
                    EmbeddedPostgres(Path(folder) / "data", version=version, settings=SERVER_SETTINGS)
                )
            return running[version]

        yield server
