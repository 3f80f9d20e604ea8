"""Tokens that are good for one connection: each session gets a new one from the program, whoever opens it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.postgres.test_slot_commands import Printed, xidstream
from tests.postgres_fixtures import Database
from xidstream.actors.preflight import findings_of
from xidstream.actors.reader.heartbeat_thread import heartbeats
from xidstream.pipeline.account import Window
from xidstream.pipeline.errors import LoginRefused, PasswordCommandFailed
from xidstream.pipeline.findings import Status
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import advance_slot, create_slot, describe_slot, drop_slot
from xidstream.pipeline.postgres.heartbeat import heartbeat_connection, write_heartbeat
from xidstream.pipeline.postgres.login import Login, login_of
from xidstream.pipeline.postgres.opening import connect_slot, slot_settings
from xidstream.pipeline.postgres.range_copy import RangeCopy
from xidstream.pipeline.postgres.slot_account import slot_part
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.settings.config import Config

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("postgres_server", [18], indirect=True),
]

_PROGRAM: Final = """
import pathlib, secrets, subprocess, sys
import psycopg
admin, role, calls = sys.argv[1:]
with open(calls, "a") as file:
    print("called", file=file)
token = "token-" + secrets.token_hex(8)
with psycopg.connect(admin, autocommit=True) as connection:
    connection.execute(f"ALTER ROLE {role} PASSWORD '{token}'")
print(token)
"""
"""Each token takes the place of the one before, so that a connection with an older one is refused."""


class Tokens:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.calls = folder / "calls"
        self.calls.touch()
        program = folder / "new_token.py"
        program.write_text(_PROGRAM)
        role = f"by_token_{database.name}"
        database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        database.execute("CREATE PUBLICATION p FOR TABLE t")
        database.execute(f"GRANT SELECT ON t TO {role}")
        self.role = role
        self.config = Config(
            dsn=database.dsn(over_tcp=True, user=role),
            slot=f"s_{database.name}",
            publication=("p",),
            storage=str(folder / "storage"),
            password_command=(sys.executable, str(program), database.dsn(), role, str(self.calls)),
        )

    @property
    def login(self) -> Login:
        return login_of(self.config)

    @property
    def n_calls(self) -> int:
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def tokens(database: Database, tmp_path: Path) -> Iterator[Tokens]:
    tokens = Tokens(database, tmp_path)
    yield tokens
    database.execute(f"DROP OWNED BY {tokens.role}")
    database.execute(f"DROP ROLE {tokens.role}")


def test_every_session_gets_a_token_of_its_own(tokens: Tokens) -> None:
    login, slot = tokens.login, tokens.config.slot
    called = [0]

    def calls(work: Callable[[], Any]) -> int:
        work()
        called.append(tokens.n_calls)
        return called[-1] - called[-2]

    assert calls(lambda: create_slot(login, slot)) == 1
    assert calls(lambda: describe_slot(login, slot)) == 1
    opened = connect_slot(slot_settings(tokens.config), create=False)
    # The stream, the slot's state and the end of the WAL.
    assert calls(lambda: opened.start()) >= 3
    assert calls(lambda: opened.opened()) == 1
    assert calls(opened.connection.close) == 0
    tokens.database.execute("INSERT INTO t VALUES (1)")
    ((end,),) = tokens.database.execute("SELECT pg_current_wal_flush_lsn()::text")
    assert calls(lambda: advance_slot(login, slot, Lsn.parse(end))) == 1
    assert calls(lambda: slot_part(login, slot, Window(60.0))) == 1

    def one_beat() -> None:
        with heartbeat_connection(login) as connection:
            write_heartbeat(connection)

    assert calls(one_beat) == 1
    holder = TableHolder(login, ["p"])
    (source,) = survey(tokens.database.connection, ["p"])
    assert calls(lambda: holder.hold(source, wait_for_writers=False)) == 2
    holder.close()
    assert calls(RangeCopy(login).close) == 1
    failed = {f.check for f in findings_of(tokens.config) if f.status is Status.FAILED}
    assert failed == {"record"}, "the slot was read by something that has no storage"
    assert calls(lambda: drop_slot(login, slot)) >= 1


def test_the_commands_get_their_tokens_from_command_line_and_file(
    tokens: Tokens, tmp_path: Path, capsys: Printed
) -> None:
    config = tokens.config
    text = shlex.join(config.password_command)
    given = ["--dsn", config.dsn, "--slot", config.slot, "--password-command", text]
    assert xidstream("slot", "create", *given) == 0
    assert xidstream("check", *given, "--publication", "p", "--storage", config.storage) == 0
    assert xidstream("status", *given) == 0
    file = tmp_path / "shop.toml"
    words = ", ".join(f'"{word}"' for word in config.password_command)
    file.write_text(f'dsn = "{config.dsn}"\nslot = "{config.slot}"\npassword_command = [{words}]\n')
    file.chmod(0o600)
    assert xidstream("slot", "drop", "--config", str(file)) == 0
    printed = "".join(capsys.readouterr())
    assert "token-" not in printed and str(tokens.calls) not in printed


def test_a_program_that_fails_is_one_clear_line_with_its_status(tokens: Tokens, capsys: Printed) -> None:
    given = ["--dsn", tokens.config.dsn, "--slot", tokens.config.slot, "--password-command"]
    assert xidstream("slot", "create", *given, "/no/such/program hunter2") == 1
    assert xidstream("check", *given, "sh -c 'echo hunter2 >&2; exit 254'", "--publication", "p") == 3
    printed = "".join(capsys.readouterr())
    assert "password_command cannot be started: No such file or directory" in printed
    assert "password_command failed with exit status 254" in printed and "by hand" in printed
    assert "hunter2" not in printed and "/no/such" not in printed


def test_a_token_that_is_not_taken_is_refused_and_not_shown(tokens: Tokens) -> None:
    wrong = Login(tokens.config.dsn, ("echo", "hunter2"))
    with pytest.raises(LoginRefused, match="wrong or missing password") as raised:
        describe_slot(wrong, "s")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(PasswordCommandFailed), heartbeat_connection(Login(tokens.config.dsn, ("false",))):
        pass
    with heartbeats(wrong, 0.1):
        pass  # a reader goes on without a heartbeat
