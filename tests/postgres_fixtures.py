"""Fixtures with embedded servers: one server for each version and session, one database for each test.

Used by ``from tests.postgres_fixtures import *`` in a folder's conftest.py. Servers run with ``fsync=off``.

- ``postgres_server``: the server, shared by the session, for each version of ``VERSIONS``. To run on one
  version only: ``@pytest.mark.parametrize("postgres_server", [18], indirect=True)``.
- ``database``: a new database on it (``Database``), dropped with its slots after the test.
- ``own_postgres``: a factory of servers that are a test's own, to be stopped, crashed and badly configured.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

__all__ = ["Database", "_servers", "database", "drop_database", "own_postgres", "postgres_server"]

VERSIONS = (16, 18)
# Not synchronous_commit=off: a walsender sends what is flushed, and an asynchronous commit is flushed up to
# 600 ms later, so that every test would wait for the WAL writer.
FAST = {"fsync": "off", "full_page_writes": "off"}

_numbers = itertools.count(1)


@dataclass
class Database:
    """One test's database. ``connection`` is a superuser's, with autocommit."""

    server: EmbeddedPostgres
    name: str
    connection: psycopg.Connection[Any]

    @property
    def version(self) -> int:
        return self.server.version

    def dsn(self, **parameters: str | int) -> str:
        """A conninfo of this database; parameters as in ``EmbeddedPostgres.conninfo``."""
        return self.server.conninfo(self.name, **parameters)  # type: ignore[arg-type]

    def execute(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), arguments or None)
        return cursor.fetchall() if cursor.description else []

    def connect(self, **parameters: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(), autocommit=True, **parameters)


@pytest.fixture(scope="session")
def _servers() -> Iterator[Callable[[int], EmbeddedPostgres]]:
    with ExitStack() as stack:
        running: dict[int, EmbeddedPostgres] = {}

        def server(version: int) -> EmbeddedPostgres:
            if version not in running:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"xs-pg{version}-"))
                running[version] = stack.enter_context(
                    EmbeddedPostgres(Path(folder) / "data", version=version, settings=FAST, tcp=True)
                )
            return running[version]

        yield server


@pytest.fixture(params=VERSIONS, ids=lambda v: f"pg{v}")
def postgres_server(
    request: pytest.FixtureRequest, _servers: Callable[[int], EmbeddedPostgres]
) -> EmbeddedPostgres:
    return _servers(request.param)


@pytest.fixture
def database(postgres_server: EmbeddedPostgres) -> Iterator[Database]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres_server.conninfo(), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        with psycopg.connect(postgres_server.conninfo(name), autocommit=True) as connection:
            yield Database(postgres_server, name, connection)
            for (gid,) in connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = %s", (name,)
            ):
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        drop_database(admin, name)


def drop_database(admin: psycopg.Connection[Any], name: str) -> None:
    """Drop the database with its slots; a walsender that a test left behind is ended, and waited for."""
    admin.execute(
        "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
        " WHERE database = %s AND active_pid IS NOT NULL",
        (name,),
    )
    admin.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", (name,)
    )
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def own_postgres() -> Iterator[Callable[..., EmbeddedPostgres]]:
    """``own_postgres(version=18, settings={…}, tcp=…)``: a started server, stopped after the test."""
    with ExitStack() as stack:

        def make(
            *, version: int = 18, settings: dict[str, str] | None = None, **options: Any
        ) -> EmbeddedPostgres:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"xs-pg{version}-"))
            server = EmbeddedPostgres(
                Path(folder) / "data", version=version, settings={**FAST, **(settings or {})}, **options
            )
            stack.callback(server.stop, "immediate")
            return server.start()

        yield make
