"""What a run that cannot start raises, and when it waits instead."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Callable

import pytest

import xidstream.actors.preflight
import xidstream.pipeline.preflight.checks
from xidstream.actors.cli.main import main
from xidstream.actors.preflight import findings_of, port_findings, require, require_ports
from xidstream.pipeline.errors import (
    ConnectionLost,
    ExitStatus,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.findings import Finding, Findings, Status
from xidstream.pipeline.postgres.admin import SlotState
from xidstream.pipeline.settings.config import Config

CONFIG = Config(slot="s", publication=("p",))
OK = Finding.ok("slot", "slot s is there")
IN_USE = Finding.failed("slot", "slot s is in use by process 1", "end that reader", SlotInUse)
NOT_REACHED = Finding.of_error("connection", ConnectionLost("no server listens there"))
LOST = Finding.failed("slot", "slot s is lost", "make it anew", SlotLost)
NO_PUBLICATION = Finding.failed("publication", "there is no publication p", "create it")

Script = Callable[..., list[float]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Give what each preflight finds, the last one for ever, and a clock that only sleeping moves. While a slot is in
    use it stays so for a second and a half."""

    def play(*rounds: list[Finding]) -> list[float]:
        left = list(rounds)
        slept: list[float] = []
        module = xidstream.actors.preflight
        monkeypatch.setattr(module, "findings_of", lambda *a, **k: left.pop(0) if len(left) > 1 else left[0])
        active = itertools.cycle([True, True, True, False])
        monkeypatch.setattr(
            module, "describe_slot", lambda *a: SlotState("s", exists=True, active=next(active))
        )
        monkeypatch.setattr(module.time, "monotonic", lambda: sum(slept))
        monkeypatch.setattr(module.time, "sleep", slept.append)
        return slept

    return play


def raised(config: Config = CONFIG, tell: Callable[[str], None] = print) -> XidstreamError:
    with pytest.raises(XidstreamError) as caught:
        require(config, tell=tell)
    return caught.value


def test_a_slot_that_becomes_free_is_waited_for_and_said_once(script: Script) -> None:
    slept = script([IN_USE], [IN_USE], [OK])
    told: list[str] = []
    require(CONFIG, tell=told.append)
    assert len(slept) == 6
    assert len(told) == 1
    assert "waiting" in told[0] and "process 1" in told[0]


def test_a_slot_that_stays_in_use_is_given_up_after_30_seconds(script: Script) -> None:
    slept = script([IN_USE])
    error = raised()
    assert (type(error), error.message) == (SlotInUse, IN_USE.statement)
    assert 30 <= sum(slept) < 31


def test_nobody_waits_where_something_else_is_missing_too(script: Script) -> None:
    slept = script([NO_PUBLICATION, IN_USE])
    assert type(raised()) is PreconditionMissing
    assert slept == []


def test_what_turns_up_while_waiting_is_raised(script: Script) -> None:
    script([IN_USE], [LOST])
    assert type(raised()) is SlotLost


def test_a_lost_slot_is_terminal_whatever_else_is_missing(script: Script) -> None:
    script([NO_PUBLICATION, LOST])
    told: list[str] = []
    error = raised(tell=told.append)
    assert type(error) is SlotLost
    assert error.policy.exit_status is ExitStatus.TERMINAL
    assert told == ["also: there is no publication p\n  remedy: create it"]


@pytest.mark.parametrize(
    "finding",
    [
        NO_PUBLICATION,
        Finding.of_error("connection", ConnectionLost("no server listens there")),
        Finding.failed("version", "PostgreSQL 9.6 has no pgoutput", "upgrade", Unsupported),
    ],
)
def test_what_a_person_must_set_up_ends_with_status_3(script: Script, finding: Finding) -> None:
    script([finding])
    error = raised()
    assert error.policy.exit_status is ExitStatus.PRECONDITION
    assert (error.message, error.remedy) == (finding.statement, finding.remedy)


def test_the_storages_credentials_are_not_in_its_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    module = xidstream.pipeline.preflight.checks
    monkeypatch.setattr(module, "server_findings", lambda *a, **k: [LOST, NOT_REACHED])
    monkeypatch.setattr(module.Storage, "probe", lambda *a: None)
    monkeypatch.setattr(module.Storage, "free_bytes", None)
    config = Config(slot="s", publication=("p",), storage="s3://KEY:hunter2@bucket/x?secret_key=hunter3")
    findings = {f.check: f for f in findings_of(config)}
    assert findings["storage"].statement == "storage s3://bucket/x can be written"
    assert "hunter" not in f"{findings['secrets'].statement} {findings['secrets'].remedy}"


def test_what_could_not_be_checked_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    module = xidstream.pipeline.preflight.checks
    monkeypatch.setattr(module, "server_findings", lambda *a, **k: [NOT_REACHED])
    unknown = {f.check: f for f in findings_of(CONFIG) if f.status is Status.NOT_CHECKED}
    assert unknown.keys() == {"storage", "record", "sink", "cluster"}
    assert "the server was not reached" in unknown["record"].statement
    assert "--storage" in str(unknown["storage"].remedy) and "--sink" in str(unknown["sink"].remedy)


def test_ports_that_are_taken_are_told_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """The run said so after Ray had started, and ``check`` never."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = dataclasses.replace(
            CONFIG, status_address=f"127.0.0.1:{port}", metrics_address=f"127.0.0.1:{port}"
        )
        assert {f.check for f in port_findings(config) if f.status is Status.FAILED} == {
            "status_address",
            "metrics_address",
        }
        with pytest.raises(PreconditionMissing) as caught:
            require_ports(config)
        assert f"127.0.0.1:{port}: Address already in use" in caught.value.message
        with pytest.raises(SystemExit) as ended:
            main(["check", "--slot", "s", "--publication", "p", "--status-address", f"127.0.0.1:{port}"])
        assert ended.value.code == 3
        assert "the status page cannot be served" in capsys.readouterr().out.replace("\n", " ")
    assert {f.status for f in port_findings(config)} == {Status.OK}
    require_ports(config)
    assert port_findings(dataclasses.replace(config, status_address="off", metrics_address="")) == []


def test_findings_are_readable_in_an_interactive_session() -> None:
    """``stream.check()`` was 22 objects on one line."""
    shown = repr(Findings([OK, IN_USE, Finding.not_checked("cluster", "what only Ray can tell")]))
    assert shown.splitlines() == [
        "ok    slot s is there",
        "FAIL  slot s is in use by process 1",
        "      end that reader",
        "?     not checked: what only Ray can tell",
    ]
