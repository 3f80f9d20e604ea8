"""What a run that cannot start raises, and when it waits instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import xidstream.actors.cli.checks
from xidstream.actors.cli.checks import fail_on_findings, findings_of
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import (
    ConnectionLost,
    ExitStatus,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.slot.findings import Finding

CONFIG = Config(slot="s", publication=("p",))
OK = Finding.ok("slot", "slot s is there")
IN_USE = Finding.failed("slot", "slot s is in use by process 1", "end that reader", SlotInUse)
LOST = Finding.failed("slot", "slot s is lost", "make it anew", SlotLost)
NO_PUBLICATION = Finding.failed("publication", "there is no publication p", "create it")

Script = Callable[..., list[float]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Give what each preflight finds, the last one for ever, and a clock that only sleeping moves."""

    def play(*rounds: list[Finding]) -> list[float]:
        left = list(rounds)
        slept: list[float] = []
        clock = xidstream.actors.cli.checks.time
        monkeypatch.setattr(
            xidstream.actors.cli.checks,
            "preflight",
            lambda *a, **k: left.pop(0) if len(left) > 1 else left[0],
        )
        monkeypatch.setattr(clock, "monotonic", lambda: sum(slept))
        monkeypatch.setattr(clock, "sleep", slept.append)
        return slept

    return play


def raised(config: Config = CONFIG) -> XidstreamError:
    with pytest.raises(XidstreamError) as caught:
        fail_on_findings(config)
    return caught.value


def test_a_slot_that_becomes_free_is_waited_for_and_said_once(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = script([IN_USE], [IN_USE], [IN_USE], [OK])
    fail_on_findings(CONFIG)
    assert len(slept) == 3
    told = capsys.readouterr().err
    assert told.count("waiting") == 1
    assert "process 1" in told


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


def test_a_lost_slot_is_terminal_whatever_else_is_missing(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script([NO_PUBLICATION, LOST])
    error = raised()
    assert type(error) is SlotLost
    assert error.policy.exit_status is ExitStatus.TERMINAL
    assert "also missing: there is no publication p" in capsys.readouterr().err


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


def test_the_storages_credentials_are_not_in_its_finding(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script([OK])
    for method in ("write_bytes", "delete"):
        monkeypatch.setattr(xidstream.actors.cli.checks.Storage, method, lambda *a: None)
    config = Config(slot="s", publication=("p",), storage="s3://KEY:hunter2@bucket/x?secret_key=hunter3")
    findings = findings_of(config)
    (found,) = [f for f in findings if f.check == "storage"]
    assert found.statement == "storage s3://bucket/x can be written"
    (refused,) = [f for f in findings if f.check == "secrets"]
    assert "hunter" not in f"{refused.statement} {refused.remedy}"
