"""Names that a newcomer types: each is answered, none with "no such command" alone."""

from __future__ import annotations

import secrets

import pytest

from tests.unit.account.accounts import FULL, RUN
from xidstream.actors.cli.main import main
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.pipeline.account.codec import to_json


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("words", [["-V"], ["--version"], ["version"]])
def test_the_version_is_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(*words) == 0
    assert capsys.readouterr().out.startswith("xidstream, version ")


def test_help_of_a_command_is_what_its_flag_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["run"], ["slot", "create"]):
        assert typed("help", *words) == 0
        by_name = capsys.readouterr().out
        assert typed(*words, "--help") == 0
        assert by_name == capsys.readouterr().out and "Usage: xidstream" in by_name
    assert typed("help", "slot", "nothing") == 2
    assert "there is no command 'nothing'" in capsys.readouterr().err


def test_start_and_stop_say_how_a_run_is_started_and_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("start", "--slot", "shop") == 2
    assert "`xidstream run`" in capsys.readouterr().err
    slot = f"test_{secrets.token_hex(4)}"
    served = RunSocket(slot, lambda: to_json(FULL))
    try:
        assert typed("stop", "--slot", "shop") == 2
    finally:
        served.close()
    said = capsys.readouterr().err
    assert "Ctrl-C" in said and (f"`kill {RUN.pid}`" in said or "`xidstream status` shows" in said)


def test_the_list_of_commands_has_what_there_is_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--help") == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "status" in commands and "version" not in commands and "stop" not in commands
