"""``run --log-format json``: every line on stderr is JSON, a run that is well is quiet, and the end names its error."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.actors.test_display import starting, status
from xidstream.actors.cli import run as run_module
from xidstream.actors.cli.event_lines import EventLines
from xidstream.actors.cli.run import _Run
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.events import Event, JsonLines
from xidstream.pipeline.settings.config import Config

READING = status(epoch="epoch-1")
STARTING = starting("the slot reader")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    events = [record.msg for record in caplog.records]
    caplog.clear()
    return [(event.name, dict(event.facts)) for event in events if isinstance(event, Event)]


def test_a_run_that_is_well_says_that_it_waits_and_reads_and_then_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = EventLines()
    with caplog.at_level(logging.INFO, "xidstream"):
        for _ in range(3):
            lines.show({"shop": STARTING})
        assert told(caplog) == [("waiting", {"slot": "shop"})]
        for _ in range(50):
            lines.show({"shop": READING})
        assert told(caplog) == [("reading", {"slot": "shop", "lsn": "0/10", "epoch": "epoch-1"})]
        lines.show({"shop": status(epoch="epoch-2")})
        assert told(caplog) == [("reading", {"slot": "shop", "lsn": "0/10", "epoch": "epoch-2"})]
        for _ in range(3):
            lines.show({"shop": status(epoch="epoch-2", waiting_for=("Spark",))})
        assert told(caplog) == [("waiting", {"slot": "shop"})]
        lines.tell("shop", Event("stalled", "stalled: …", part="sink"), "yellow", several=False)
        lines.line("stopped before anything was read", "yellow")
        assert told(caplog) == [("stalled", {"slot": "shop", "part": "sink"}), ("note", {})]


def test_a_request_to_stop_is_an_event_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stop = StopRequest()
    stop.is_quiet = stop.asked = True
    run = _Run([Config(slot="shop")], EventLines(), stop)
    with caplog.at_level(logging.INFO, "xidstream"):
        for _ in range(3):
            run._show({})
    assert told(caplog) == [("stopping", {})]


def test_a_ray_that_does_not_start_leaves_no_handler_beside_the_one_that_writes_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(**_: object) -> None:
        logging.getLogger().addHandler(logging.StreamHandler())  # as ray.init does first
        raise EnvironmentFault("Ray does not start")

    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    monkeypatch.setattr(run_module, "connect_ray", fails)
    try:
        with pytest.raises(EnvironmentFault):
            _Run([Config(slot="shop", log_format="json")], EventLines(), StopRequest())._connect_ray()
        assert [type(handler.formatter) for handler in root.handlers] == [JsonLines]
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(capture=False)


def test_the_command_line_writes_json_alone_and_the_last_line_has_the_error_and_its_remedy(
    tmp_path: Path,
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dsn = f"host=127.0.0.1 port={nobody.getsockname()[1]} user=u dbname=d password=hush"
        options = ["--slot", "s", "--publication", "p", "--storage", str(tmp_path), "--sink", "console"]
        ended = subprocess.run(
            [sys.executable, "-m", "actors", "run", "--dsn", dsn, *options, "--log-format", "json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.stdout == "" and "hush" not in ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["event"] for line in lines][-1] == "failed" and ended.returncode != 0, ended.stderr
    assert lines[-1]["level"] == "error" and lines[-1]["error"] and lines[-1]["remedy"]
    assert all({"time", "level", "logger", "event", "message"} <= set(line) for line in lines)
