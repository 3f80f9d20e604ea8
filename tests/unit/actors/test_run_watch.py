"""What a watched run says of stalls: when one begins, when it is over, and nothing while the run starts again."""

from __future__ import annotations

import dataclasses
import datetime
import threading

import pytest

from tests.unit.account.accounts import FULL, SEQUENCER, SLOT, WELL, run
from tests.waiting import wait_until
from xidstream.actors.supervision import run_accounts
from xidstream.actors.supervision.run_accounts import RunAccounts, RunParts
from xidstream.actors.supervision.run_watch import RunWatch, stall_event
from xidstream.pipeline.account import Account, SlotPart
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.events import Event
from xidstream.pipeline.settings.config import Config

STALLED = dataclasses.replace(WELL, stalls=FULL.stalls)


class Scripted(RunAccounts):
    """Its accounts are the test's. ``n_asked``: how often the server was asked; it answers when it may."""

    def __init__(self, *accounts: Account) -> None:
        super().__init__(Config(slot="shop"), lambda: RunParts("reading", "e", None, None, None))
        self._script = list(accounts)
        self.n_asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def glance(self) -> Account:
        return self._script.pop(0)

    def slot(self) -> tuple[SlotPart | None, str | None]:
        self.n_asked += 1
        assert self.may_answer.wait(60)
        return SLOT, None


def watched(*accounts: Account) -> tuple[list[str], Scripted]:
    notices: list[str] = []
    scripted = Scripted(*accounts)
    watch = RunWatch(scripted, notices.append)
    for _ in accounts:
        watch._look()
    return notices, scripted


def test_a_stall_is_told_when_it_begins_and_when_it_is_over_and_once() -> None:
    notices, _ = watched(WELL, STALLED, STALLED, STALLED, WELL, WELL)
    assert [notice.partition(":")[0] for notice in notices] == ["stalled", "no longer stalled"]
    assert isinstance(notices[0], Event) and notices[0].facts["waits_for"] == "sink"


def test_a_run_that_starts_again_is_told_of_by_its_error_and_not_as_a_stall() -> None:
    notices, _ = watched(run(STALLED, state="restarting"), run(STALLED, state="starting"))
    assert notices == []


def test_the_server_is_asked_once_in_half_a_minute() -> None:
    _, scripted = watched(*[WELL] * 6)
    assert scripted.n_asked == 1


def test_a_slot_that_is_not_there_yet_is_not_asked_for_and_the_server_is_not_said_to_be_silent() -> None:
    """Its creation may wait for minutes, for transactions that were open: the alert fired."""
    _, scripted = watched(*[run(WELL, system_identifier=None, state="starting")] * 3)
    assert scripted.n_asked == 0


def test_a_server_that_does_not_answer_keeps_no_stall_from_being_told_and_is_said_not_to_answer() -> None:
    notices: list[str] = []
    scripted = Scripted(WELL, STALLED, WELL)
    scripted.may_answer.clear()
    watch = RunWatch(scripted, notices.append)
    try:
        for _ in range(3):
            watch._look()
        assert len(notices) == 2 and scripted.n_asked == 1
        began_s = watch._asked_s
        assert watch._slot_part(began_s + 40) == (None, None), "not asked again, and not given up yet"
        assert watch._slot_part(began_s + 80) == (None, "the server has not answered for 80 s")
    finally:
        scripted.may_answer.set()
    wait_until(lambda: watch._slot_part(began_s + 20) == (SLOT, None))


def test_a_question_that_fails_is_logged_and_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Scripted):
        def slot(self) -> tuple[SlotPart | None, str | None]:
            raise RuntimeError("defect")

    watch = RunWatch(Failing(WELL), lambda text: None)
    watch._look()
    wait_until(
        lambda: (
            watch._slot == (None, "the server could not be asked for the slot: the run's log has the error")
        )
    )
    assert "the server cannot be asked for the slot" in caplog.text


def test_a_stall_names_the_commit_that_waits() -> None:
    (stall,) = FULL.stalls
    waiting = dataclasses.replace(SEQUENCER, head_commit_lsn="0/1100000")
    assert stall_event(stall, waiting).facts["lsn"] == "0/1100000"
    assert "lsn" not in stall_event(stall, None).facts


def test_who_asks_while_an_earlier_question_hangs_is_told_so_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def hang(*_: object) -> SlotPart:
        asked.set()
        assert may_answer.wait(60)
        return SLOT

    monkeypatch.setattr(run_accounts, "slot_part", hang)
    monkeypatch.setattr(run_accounts, "_SLOT_WAIT_S", 0.05)
    accounts = RunAccounts(Config(slot="shop"), lambda: RunParts("reading", "e", None, None, None))
    first = threading.Thread(target=accounts.slot)
    first.start()
    assert asked.wait(10)
    assert accounts.slot() == (None, "the server has not answered an earlier question yet")
    may_answer.set()
    first.join()
    assert accounts.slot() == (SLOT, None)


def test_ages_are_right_when_the_clock_is_set_while_a_run_goes_on() -> None:
    """It showed a run that began in the future, and counted errors of an hour ago as recent ones."""
    offset = datetime.timedelta()

    def now() -> datetime.datetime:
        real = datetime.datetime.now(datetime.timezone.utc)
        return real + offset

    accounts = RunAccounts(
        Config(slot="shop"), lambda: RunParts("restarting", "e", None, None, None), now=now
    )
    accounts.failed(StorageFault("the disk is full"), 1.0)
    for hours in (-1, 12):
        offset = datetime.timedelta(hours=hours)
        account = accounts.glance()
        assert account.run is not None and account.last_error is not None
        ages = [account.at - at for at in (account.run.started_at, account.last_error.at)]
        assert all(datetime.timedelta() <= age < datetime.timedelta(minutes=1) for age in ages)
        assert [stall.for_s < 60 for stall in account.stalls] == [True]
