"""``xidstream status`` finds a run by its slot: what it prints, and what it says where there is none."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator

import pytest

from tests.unit.account.accounts import FULL, RUN
from xidstream.actors.cli.main import main
from xidstream.actors.cli.status import Asking
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.settings.config import Config


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """A run's account, and the socket that gives it. No variable names a server."""
    for variable in ("PGHOST", "PGSERVICE", "PGDATABASE", "PGUSER", "PGPORT", "PGHOSTADDR", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    slot = f"test_{secrets.token_hex(4)}"
    account = dataclasses.replace(FULL, run=dataclasses.replace(RUN, slot=slot))
    socket = RunSocket(slot, lambda: to_json(account))
    yield account
    socket.close()


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    return int(ended.value.code or 0)


def test_a_run_is_shown_by_its_slot_alone_and_its_json_is_a_line(
    served: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run is not None
    assert status("--slot", served.run.slot) == 0
    out = capsys.readouterr().out
    assert f"slot {served.run.slot}" in out and "xid 749" in out and "\x1b" not in out
    assert status("--slot", served.run.slot, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == json.loads(to_json(served))


def test_where_no_run_is_found_the_server_is_needed_and_named_as_what_is_missing(
    served: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("--slot", "test_nobody_has_it") == 2
    error = capsys.readouterr().err
    assert "no run of slot test_nobody_has_it was found; dsn is missing" in error and "--dsn" in error


def test_watch_needs_a_terminal_and_is_another_way_than_json(
    served: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run is not None
    assert status("--slot", served.run.slot, "--watch") == 2
    assert "--watch needs a terminal" in capsys.readouterr().err
    assert status("--slot", served.run.slot, "--watch", "--json") == 2


def test_the_run_of_another_servers_slot_of_the_same_name_is_passed_over(
    served: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.run is not None
    config, answer = Config(slot=served.run.slot, dsn="dbname=x"), to_json(served)
    starting = to_json(
        dataclasses.replace(served, run=dataclasses.replace(served.run, system_identifier=None))
    )
    asking = Asking(lambda slot: [answer, starting])
    for server, found in (
        (served.run.system_identifier, [answer, starting]),
        ("1", [starting]),
        (None, [answer, starting]),
    ):
        monkeypatch.setattr(asking, "_server", lambda config, server=server: server)
        assert asking.runs(config) == found


def test_without_options_the_runs_of_this_machine_are_listed(
    served: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answered that slot is missing."""
    assert served.run is not None
    assert status() == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith(served.run.slot)]
    assert str(served.run.pid) in line and "2026-11-22 22:57:03" in line and str(served.run.page) in line
    assert status("--json") == 0
    accounts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(to_json(served)) in accounts
