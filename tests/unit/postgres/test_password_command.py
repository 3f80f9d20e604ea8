"""The password command: what it is given, what is taken from it, and that nothing of it is ever told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from xidstream.actors.cli.options import build_config
from xidstream.pipeline.errors import Action, ConfigError, ExitStatus, PasswordCommandFailed
from xidstream.pipeline.postgres.login import Login, login_of
from xidstream.pipeline.postgres.password_command import password_from
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.settings_file import load_toml

SECRET = "hunter2"


def python(code: str) -> tuple[str, ...]:
    """A program whose arguments have a secret."""
    return (sys.executable, "-c", code, SECRET)


@pytest.mark.parametrize("end", ["", "\\n", "\\r\\n"])
def test_what_it_writes_is_the_password_without_the_end_of_the_line(end: str) -> None:
    assert password_from(python(f"print(' a b\\'c\\\\\\\\d ', end='{end}')")) == " a b'c\\\\d "


def test_it_has_our_environment_and_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", "from the environment")
    code = "import os, sys; print(os.environ['TOKEN_OF_THIS_TEST'] + sys.stdin.read())"
    assert password_from(python(code)) == "from the environment"


def test_what_it_says_on_stderr_is_neither_taken_nor_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert password_from(python("import sys; print('warning', file=sys.stderr); print('token')")) == "token"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ((f"/no/such/{SECRET}",), "cannot be started: No such file or directory"),
        (("/",), "cannot be started: Permission denied"),
        (("a\0b",), "cannot be started: not a program's name"),
        (
            python("import sys; print('hunter2'); print('hunter2', file=sys.stderr); sys.exit(7)"),
            "exit status 7",
        ),
        (python("import os; os.kill(os.getpid(), 9)"), "signal 9"),
        (python(""), "wrote nothing"),
        (python("print()"), "wrote nothing"),
        (python("print('hunter2'); print('hunter2')"), "more than one line"),
        (python("print('hunter2\\0')"), "more than one line"),
        (python("import sys; sys.stdout.buffer.write(b'hunter2\\xff')"), "not UTF-8"),
        (python("print('hunter2' * 20_000)"), "more than 64 KiB"),
        (python("while True: print('hunter2' * 1000)"), "more than 64 KiB"),
    ],
)
def test_each_way_to_fail_is_told_and_nothing_of_program_and_output(
    command: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PasswordCommandFailed, match=told) as raised:
        password_from(command)
    error = raised.value
    shown = [
        str(error),
        repr(error),
        error.remedy,
        str(error.facts),
        repr(error.__cause__),
        *capfd.readouterr(),
    ]
    assert SECRET not in "".join(shown)
    assert error.__suppress_context__ or error.__context__ is None
    assert pickle.loads(pickle.dumps(error)).message == error.message
    assert (error.policy.action, error.policy.exit_status) == (Action.RETRY, ExitStatus.FAILED)


def test_one_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """Its child has the pipe, too, and would keep whoever waits for its end."""
    mark = f"60.{tmp_path.name.encode().hex()[:8]}"
    command = ("/bin/sh", "-c", f"sleep {int(mark[3:], 16) % 1000 + 3600} & sleep 3600")
    with pytest.raises(PasswordCommandFailed, match=r"did not end within 0\.5 s"):
        password_from(command, timeout_s=0.5)

    def running() -> list[str]:
        return subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()

    # A process that was killed is there until the kernel has ended it.
    wait_until(lambda: f"sleep {int(mark[3:], 16) % 1000 + 3600}" not in running(), 20)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ()),
        (
            "aws rds generate-db-auth-token --username 'a b'",
            ("aws", "rds", "generate-db-auth-token", "--username", "a b"),
        ),
        ("printf $HOME | cat", ("printf", "$HOME", "|", "cat")),
        (["az", "account", "two words"], ("az", "account", "two words")),
        ((), ()),
    ],
)
def test_a_string_is_split_without_a_shell_and_a_list_is_taken_as_it_is(
    given: Any, expected: tuple[str, ...]
) -> None:
    assert Config(password_command=given).password_command == expected


def test_it_is_a_setting_of_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text('slot = "shop"\npassword_command = ["gcloud", "sql", "generate-login-token"]\n')
    assert Config.of(load_toml(file)).password_command == ("gcloud", "sql", "generate-login-token")
    config = build_config(file, {"password_command": "vault read -field=password x"})
    assert login_of(config).password_command == ("vault", "read", "-field=password", "x")
    assert Config.of(load_toml(file)) == Config.load(file)


@pytest.mark.parametrize("given", [f"sh -c '{SECRET}", 7, [SECRET, 7], {"program": SECRET}, ["", SECRET]])
def test_what_is_no_command_is_refused_without_quoting_it(given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.of({"password_command": given})
    assert "password_command" in str(raised.value) and SECRET not in str(raised.value) + raised.value.remedy


def test_no_repr_has_it() -> None:
    config = Config(dsn="host=db", slot="s", publication=("p",), password_command=(SECRET,))
    settings = SlotSettings("host=db", "s", ("p",), password_command=(SECRET,))
    assert SECRET not in repr(config) + repr(settings) + repr(settings.login) + repr(login_of(config))


def test_a_password_in_the_dsn_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="the dsn has a password"):
        Login(f"host=db password={SECRET}", ("true",))
    with pytest.raises(ConfigError):
        SlotSettings(f"postgresql://me:{SECRET}@db/x", "s", ("p",), password_command=("true",))
