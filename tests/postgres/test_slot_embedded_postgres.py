"""The embedded server itself: its settings, its stops, and that it never outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.postgres_fixtures import Database
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ConfigError, EnvironmentFault

pytestmark = pytest.mark.postgres


def test_server_has_logical_wal_and_speaks_its_version(database: Database) -> None:
    assert database.execute("SHOW wal_level") == [("logical",)]
    assert database.execute("SHOW server_version_num")[0][0].startswith(str(database.version))


def test_tcp_needs_a_password(database: Database) -> None:
    database.execute("CREATE ROLE tcp_user LOGIN PASSWORD 'geheim'")
    try:
        psycopg.connect(database.dsn(over_tcp=True, user="tcp_user", password="geheim")).close()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(database.dsn(over_tcp=True, user="tcp_user", password="falsch"))
    finally:
        database.execute("DROP ROLE tcp_user")


def test_restart_keeps_conninfo_and_takes_settings(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(tcp=True)
    before = server.conninfo(), server.conninfo(over_tcp=True)
    server.restart("immediate", settings={"work_mem": "8MB"})
    assert (server.conninfo(), server.conninfo(over_tcp=True)) == before
    with psycopg.connect(server.conninfo()) as connection:
        assert connection.execute("SHOW work_mem").fetchone() == ("8MB",)


def test_bad_setting_fails_with_the_servers_log_and_leaves_nothing(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "data", settings={"fsync": "off", "wal_level": "no_such_level"})
    with pytest.raises(EnvironmentFault, match='invalid value for parameter "wal_level"'):
        server.start()
    assert not server.is_running
    with pytest.raises(ConfigError, match="not started"):
        _ = server.socket_dir


def test_data_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("16\n")
    with pytest.raises(ConfigError, match="belongs to PostgreSQL 16, not 18"):
        EmbeddedPostgres(tmp_path, version=18).start()


def test_unknown_version_and_program_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not 9"):
        EmbeddedPostgres(tmp_path, version=9)
    server = EmbeddedPostgres(tmp_path)
    assert server.bin("pgbench").exists()
    with pytest.raises(ConfigError, match="no program 'pg_nothing'"):
        server.bin("pg_nothing")


def test_killed_python_leaves_no_server(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from actors.demo.embedded_postgres import EmbeddedPostgres as E\n"
        "s = E(pathlib.Path(sys.argv[1]), settings={'fsync': 'off'}).start()\n"
        "print(s.socket_dir, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    ) as python:
        assert python.stdout is not None
        socket_dir = Path(python.stdout.readline().strip())
        # A connection sees the server's end as the end of its socket: no polling, no sleeping.
        connection = psycopg.connect(
            host=str(socket_dir), user="postgres", dbname="postgres", autocommit=True
        )
        python.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT pg_sleep(30)")
