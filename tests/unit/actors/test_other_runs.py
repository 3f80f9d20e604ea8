"""A second run of a slot on one machine is told who the first one is, before Ray starts."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xidstream.actors.cli.main import main
from xidstream.actors.preflight import findings_of, require
from xidstream.actors.supervision.other_runs import StartingRun, reading_here
from xidstream.pipeline.errors import SlotInUse, XidstreamError
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.settings.config import Config

_OTHER = """
import dataclasses, sys
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.actors.supervision import other_runs
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.settings.config import Config
import datetime
slot, storage, system_identifier, state = sys.argv[1:]
config = Config(slot=slot, publication=("p",), storage=storage)
if state == "starting":
    other_runs.StartingRun([config], has_sink=True)
else:
    part = other_runs._part(config, True)
    part = dataclasses.replace(part, state=state, waiting_for=(), system_identifier=system_identifier or None,
                               page="http://127.0.0.1:4711/")
    RunSocket(slot, lambda: to_json(Account(datetime.datetime.now(datetime.timezone.utc), part)))
print("ready", flush=True)
sys.stdin.read()
"""

Start = Callable[..., int]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Its server is nowhere."""
    slot = f"test_{secrets.token_hex(4)}"
    dsn = "host=127.0.0.1 port=1 dbname=x"
    return Config(dsn=dsn, slot=slot, publication=("p",), storage=str(tmp_path / "segments"), sink="console")


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(config, state=…)`` gives the process id of another run of the slot."""
    started: list[subprocess.Popen[str]] = []

    def run(config: Config, *, state: str = "reading", system_identifier: str = "") -> int:
        arguments = [config.slot, config.storage, system_identifier, state]
        other = subprocess.Popen(
            [sys.executable, "-c", _OTHER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(other)
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        return other.pid

    yield run
    for other in started:
        other.communicate()


def named(config: Config) -> Finding:
    found = reading_here(config)
    assert found is not None and found.raises is SlotInUse
    return found


def test_a_run_of_the_slot_is_named_with_its_process_its_beginning_and_its_page(
    config: Config, start: Start
) -> None:
    pid = start(config)
    found = named(config)
    assert f"process {pid} on this machine" in found.statement and "UTC" in found.statement
    assert "http://127.0.0.1:4711/" in found.statement
    assert f"kill {pid}" in str(found.remedy) and f"--slot {config.slot}" in str(found.remedy)


def test_check_and_a_second_run_say_so_at_once(
    config: Config, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = start(config)
    assert [f for f in findings_of(config) if f.raises is SlotInUse] == [named(config)]
    told: list[str] = []
    with pytest.raises(XidstreamError):
        require(config, tell=told.append, wait_s=0)
    assert any(f"process {pid}" in text for text in told)
    with pytest.raises(SystemExit):
        main(
            [
                "check",
                "--dsn",
                config.dsn,
                "--slot",
                config.slot,
                "--publication",
                "p",
                "--storage",
                config.storage,
            ]
        )
    assert f"process {pid} on this machine" in capsys.readouterr().out.replace("\n", " ")


def test_of_two_that_start_at_once_the_one_that_began_first_goes_on(config: Config, start: Start) -> None:
    """While both check and start Ray, neither has the slot. This process is older than any that it starts."""
    mine = StartingRun([config], has_sink=True)
    try:
        start(config, state="starting")
        assert reading_here(config) is None
    finally:
        mine.close()
        mine.close()
    later = f"""
from xidstream.actors.supervision.other_runs import reading_here
from xidstream.pipeline.settings.config import Config
print(reading_here(Config(slot={config.slot!r}, publication=("p",), storage={config.storage!r})).statement)
"""
    with_mine = StartingRun([config], has_sink=True)
    try:
        said = subprocess.run(
            [sys.executable, "-c", later], capture_output=True, text=True, check=True
        ).stdout
    finally:
        with_mine.close()
    assert f"process {os.getpid()} on this machine" in said


def test_a_run_of_another_servers_slot_or_another_storage_is_none_of_ours(
    config: Config, start: Start
) -> None:
    start(config, system_identifier="4711")
    assert reading_here(config) is None
    elsewhere = Config(slot=config.slot, publication=("p",), storage=f"{config.storage}2")
    start(elsewhere)
    assert reading_here(config) is None
