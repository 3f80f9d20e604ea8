"""How a run gets in: its password changes while it runs, and no child has it. Captures, because they need no Spark."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_capture import capture_options, confirmed, create_slot, wal_lsn
from tests.e2e.test_command_line import NEWEST, ROWS, XIDSTREAM, environment, is_read, set_up, wait_for_reader
from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@contextmanager
def capturing(
    database: Database, folder: Path, *more: str, variables: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The run, and the file that it writes its lines to."""
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*XIDSTREAM, *capture_options(database, folder, *more)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment(variables),
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def role(database: Database) -> Iterator[tuple[str, str]]:
    name, password = f"changing_{database.name}", secrets.token_hex(16)
    database.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD '{password}'")
    yield name, password
    database.execute(f"DROP ROLE {name}")


@NEWEST
def test_a_run_outlives_a_password_that_is_changed_at_the_server_first(
    database: Database, role: tuple[str, str], tmp_path: Path
) -> None:
    set_up(database)
    create_slot(database)
    name, password = role
    file = tmp_path / "password"
    file.write_text(f"{password}\n")
    dsn = database.dsn(over_tcp=True, user=name)
    with capturing(database, tmp_path, "--dsn", dsn, "--password-command", f"cat {file}") as (process, log):
        wait_for_reader(database)
        wait_until(lambda: log.exists() and process.poll() is None)
        new = secrets.token_hex(16)
        database.execute(f"ALTER ROLE {name} PASSWORD '{new}'")
        database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        wait_until(lambda: "tries it again for up to 300 s" in log.read_text() or process.poll() is not None)
        assert not is_read(database)
        file.write_text(f"{new}\n")
        wait_for_reader(database)
        database.execute(ROWS.format(1, 100))
        end = wal_lsn(database)
        wait_until(lambda: confirmed(database) >= end or process.poll() is not None)
        processes = [process.pid, *(each.process.pid for each in living_below(process.pid))]
        shown = [_argv_and_environment(pid) for pid in processes[1:]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()
    told = log.read_text()
    assert told.count("wrong or missing password") == 1, told
    for text in (told, *shown):
        assert password not in text and new not in text
    assert str(file) not in told
    assert not [text for text in shown if str(file) in text], "the command's text is in no child's arguments"


@NEWEST
def test_a_password_in_the_environment_is_in_no_childs(
    database: Database, role: tuple[str, str], tmp_path: Path
) -> None:
    set_up(database)
    create_slot(database)
    name, password = role
    dsn = database.dsn(over_tcp=True, user=name)
    with capturing(database, tmp_path, "--dsn", dsn, variables={"PGPASSWORD": password}) as (process, log):
        wait_for_reader(database)
        shown = {each.name: _argv_and_environment(each.process.pid) for each in living_below(process.pid)}
        assert {"gcs_server", "raylet"} <= shown.keys()
        assert [name for name, text in shown.items() if password in text or "PGPASSWORD" in text] == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()


def _argv_and_environment(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.cmdline()} {process.environ()}"
    except psutil.NoSuchProcess:
        return ""
