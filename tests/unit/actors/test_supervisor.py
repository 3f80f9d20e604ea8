"""When a run goes on after an epoch failed, how long it waits, and when it gives up: the epochs are the test's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

import xidstream.actors.supervision.retries
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.errors import (
    ComponentLost,
    ConnectionLost,
    LoginRefused,
    PasswordCommandFailed,
    PoisonedChange,
    SlotLost,
    StorageFault,
    XidstreamError,
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.restarts import GIVE_UP_AFTER_S, Restarts
from xidstream.pipeline.settings.config import Config

Epoch = Callable[["Scripted"], None]


class Clock:
    """Moved by what an epoch lasts and by the pauses after it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s


class Pauses(threading.Event):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.pauses.append(timeout)
        self._clock.now_s += timeout
        return self.is_set()


class Scripted(Supervisor):
    """The supervisor whose epochs are ``epochs``, one after the other, the last one for ever."""

    def __init__(self, clock: Clock, *epochs: Epoch) -> None:
        self.notices: list[str] = []
        super().__init__(Config(slot="s", publication=("p",)), pytest.fail, notify=self.notices.append)
        self.clock = clock
        self.n_epochs = 0
        self._epochs = list(epochs)
        self._stop = Pauses(clock)

    def _run_epoch(self) -> None:
        self._retries.begin()
        self.n_epochs += 1
        assert self.n_epochs < 2000, "the run goes on for ever"
        (self._epochs.pop(0) if len(self._epochs) > 1 else self._epochs[0])(self)


def fails(
    error: XidstreamError | None = None,
    *,
    lasts_s: float = 1.0,
    reads: bool = False,
    takes_batch: bool = False,
    slot: int = 0,
    sink: int = 0,
) -> Epoch:
    def epoch(supervisor: Scripted) -> None:
        supervisor._retries.restarts.reached("slot", Lsn(slot))
        if reads or takes_batch:
            supervisor._retries.delivering_since_s = supervisor.clock.now_s
        supervisor._retries.restarts.reached("sink", Lsn(sink))
        supervisor._retries.restarts.took_batch = takes_batch
        supervisor.clock.now_s += lasts_s
        raise error if error is not None else ComponentLost("a part was lost")

    return epoch


def ends(supervisor: Scripted) -> None:
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(xidstream.actors.supervision.retries.time, "monotonic", made.monotonic)
    return made


def given_up_after(supervisor: Scripted, error: type[XidstreamError] = ComponentLost) -> float:
    """Seconds."""
    began_s = supervisor.clock.now_s
    with pytest.raises(error):
        supervisor.run()
    return supervisor.clock.now_s - began_s


def test_a_run_that_ends_is_not_repeated(clock: Clock) -> None:
    supervisor = Scripted(clock, ends)
    supervisor.run()
    assert (supervisor.n_epochs, supervisor.notices, clock.pauses) == (1, [], [])


def test_what_never_worked_is_given_up_soon(clock: Clock) -> None:
    assert 20 <= given_up_after(Scripted(clock, fails())) < 40


def test_what_worked_once_is_tried_for_five_minutes_from_its_failure_on(clock: Clock) -> None:
    supervisor = Scripted(clock, fails(takes_batch=True, lasts_s=10_000), fails())
    assert GIVE_UP_AFTER_S <= given_up_after(supervisor) - 10_000 < GIVE_UP_AFTER_S + 20


def test_a_run_whose_epochs_all_work_goes_on_for_ever(clock: Clock) -> None:
    supervisor = Scripted(clock, *[fails(takes_batch=True)] * 1000, ends)
    supervisor.run()
    assert supervisor.n_epochs == 1001
    assert set(clock.pauses) == {0.5}


def test_pauses_grow_to_a_quarter_of_a_minute_and_begin_anew_behind_an_epoch_that_worked(
    clock: Clock,
) -> None:
    failing = [fails(takes_batch=True), *[fails()] * 7]
    Scripted(clock, *failing, fails(takes_batch=True), ends).run()
    assert clock.pauses == [0.5, 1, 2, 4, 8, 15, 15, 15, 0.5]


def test_a_server_that_is_away_is_tried_again_within_seconds_however_long_it_is_away(clock: Clock) -> None:
    """A promoted standby waited for up to a quarter of a minute for its reader."""
    away = fails(ConnectionLost("no server listens there"))
    Scripted(clock, fails(takes_batch=True), *[away] * 6, fails(), ends).run()
    assert clock.pauses == [0.5, 1, 2, 4, 4, 4, 4, 15]


def test_an_epoch_that_lasted_worked_though_there_was_nothing_to_deliver(clock: Clock) -> None:
    supervisor = Scripted(clock, *[fails(reads=True, lasts_s=31)] * 100, ends)
    supervisor.run()
    assert supervisor.n_epochs == 101


@pytest.mark.parametrize(
    "attempt", [fails(lasts_s=31), fails(reads=True, lasts_s=29)], ids=["never-read", "short"]
)
def test_an_epoch_that_only_tried_for_long_did_not_work(clock: Clock, attempt: Epoch) -> None:
    supervisor = Scripted(clock, attempt)
    assert given_up_after(supervisor) < 80
    assert supervisor.n_epochs <= 3


def test_one_storage_fault_after_the_other_is_no_work_however_long_each_takes(clock: Clock) -> None:
    """A transaction larger than the disk fills it anew in every epoch."""
    filling = fails(StorageFault("no space left"), reads=True, lasts_s=100)
    supervisor = Scripted(clock, filling)
    assert given_up_after(supervisor, StorageFault) < 100 + GIVE_UP_AFTER_S + 115
    assert supervisor.n_epochs <= 5


def full(lasts_s: float, *, takes_batch: bool = False) -> Epoch:
    return fails(StorageFault("no space left"), reads=True, lasts_s=lasts_s, takes_batch=takes_batch)


def lost(lasts_s: float) -> Epoch:
    return fails(ConnectionLost("gone"), reads=True, lasts_s=lasts_s)


@pytest.mark.parametrize(
    "epochs",
    [[full(100), lost(1)], [full(1), lost(100)], [full(100, takes_batch=True)]],
    ids=["a-long-one-alone", "what-lasts-behind-one", "with-batches"],
)
def test_storage_faults_are_outlived_where_something_works_between_them(
    clock: Clock, epochs: list[Epoch]
) -> None:
    supervisor = Scripted(clock, *epochs * 20, ends)
    supervisor.run()
    assert supervisor.n_epochs == 20 * len(epochs) + 1


def lets_in(epoch: Epoch) -> Epoch:
    """The server lets the run in first."""

    def logged_in(supervisor: Scripted) -> None:
        supervisor._retries.restarts.has_logged_in = True
        epoch(supervisor)

    return logged_in


REFUSED = LoginRefused('wrong or missing password: FATAL:  password authentication failed for user "u"')
NO_PASSWORD = PasswordCommandFailed("password_command failed with exit status 255")


def test_a_login_that_is_refused_at_the_first_start_ends_the_run(clock: Clock) -> None:
    supervisor = Scripted(clock, fails(REFUSED))
    assert given_up_after(supervisor, LoginRefused) == 1
    assert supervisor.n_epochs == 1


def test_a_login_that_is_refused_while_a_password_is_changed_is_tried_again_and_told_once(
    clock: Clock,
) -> None:
    refused = [fails(REFUSED, lasts_s=0.1)] * 10
    supervisor = Scripted(clock, lets_in(fails(ConnectionLost("the server went away"))), *refused, ends)
    supervisor.run()
    assert supervisor.n_epochs == 12
    assert max(clock.pauses) == 4
    away, told = supervisor.notices
    assert (
        "went away" in away and told.startswith(REFUSED.message) and "tries it again for up to 300 s" in told
    )


@pytest.mark.parametrize("error", [REFUSED, NO_PASSWORD], ids=["refused", "no-password"])
def test_a_login_that_stays_refused_ends_the_run_after_five_minutes_though_no_epoch_worked(
    clock: Clock, error: XidstreamError
) -> None:
    supervisor = Scripted(clock, lets_in(fails(ConnectionLost("gone"), lasts_s=0)), fails(error, lasts_s=0))
    assert GIVE_UP_AFTER_S <= given_up_after(supervisor, type(error)) < GIVE_UP_AFTER_S + 10


def test_a_password_command_that_fails_at_the_first_start_is_given_up_soon(clock: Clock) -> None:
    assert 20 <= given_up_after(Scripted(clock, fails(NO_PASSWORD)), PasswordCommandFailed) < 40


@pytest.mark.parametrize("where", ["slot", "sink"])
def test_what_an_epoch_finds_further_than_the_one_before_says_that_that_one_worked(
    clock: Clock, where: str
) -> None:
    """The driver that could have told died; each epoch sees the earlier one's batch."""
    supervisor = Scripted(clock, *[fails(**{where: lsn}) for lsn in range(1, 101)], ends)  # type: ignore[arg-type]
    supervisor.run()
    assert supervisor.n_epochs == 101


@pytest.mark.parametrize("where", ["slot", "sink"])
def test_what_stands_where_it_stood_says_nothing(clock: Clock, where: str) -> None:
    supervisor = Scripted(clock, *[fails(**{where: lsn}) for lsn in (9, 8, 9, 9)])  # type: ignore[arg-type]
    assert given_up_after(supervisor) < 40


def test_where_the_slot_is_and_where_the_sink_is_are_not_compared(clock: Clock) -> None:
    assert given_up_after(Scripted(clock, fails(slot=9, sink=12))) < 40


def test_a_sink_that_says_nothing_before_its_loop_opens_it_did_not_move() -> None:
    """0/0 and then where it stands is no progress."""
    restarts = Restarts()
    for lsn in (INVALID_LSN, INVALID_LSN, Lsn(9)):
        restarts.reached("sink", lsn)
    assert not restarts._earlier_worked
    restarts.reached("sink", INVALID_LSN)
    restarts.reached("sink", Lsn(9))
    assert not restarts._earlier_worked
    restarts.reached("sink", Lsn(10))
    assert restarts._earlier_worked


@pytest.mark.parametrize("error", [SlotLost("lost"), PoisonedChange("bad")])
def test_what_repeating_cannot_help_is_raised_at_once_whatever_worked_before(
    clock: Clock, error: XidstreamError
) -> None:
    supervisor = Scripted(clock, fails(takes_batch=True), fails(error))
    with pytest.raises(type(error)):
        supervisor.run()
    assert supervisor.n_epochs == 2


def test_a_part_that_fails_while_the_run_is_being_stopped_ends_it_without_an_error(clock: Clock) -> None:
    def stopped(supervisor: Scripted) -> None:
        supervisor.stop()
        raise ComponentLost("the batch in hand did not end")

    supervisor = Scripted(clock, stopped)
    supervisor.run()
    assert supervisor.n_epochs == 1
    (notice,) = supervisor.notices
    assert notice == "the batch in hand did not end; changes that were not confirmed will come again"


def test_each_new_epoch_is_told_with_its_cause_and_its_pause(clock: Clock) -> None:
    supervisor = Scripted(clock, fails(), fails(ConnectionLost("gone")), ends)
    supervisor.run()
    assert supervisor.notices == ["a part was lost; starting again in 0.5 s", "gone; starting again in 1.0 s"]


def test_a_stop_during_the_pause_begins_no_further_epoch(clock: Clock) -> None:
    supervisor = Scripted(clock, fails())
    notify = supervisor._notify

    def stop_too(notice: str) -> None:
        notify(notice)
        supervisor.stop()

    supervisor._retries._notify = stop_too
    supervisor.run()
    assert supervisor.n_epochs == 1


class PrintingDriver:
    """A driver whose sink has printed something that nobody has fetched yet."""

    replaceable = True

    def __init__(self) -> None:
        self.n_closed = 0
        self._lines = ["the last line"]

    def take_output(self) -> list[str]:
        assert not self.n_closed
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        self.n_closed += 1


@pytest.mark.parametrize("end", [ends, fails(SlotLost("lost"))], ids=["in-order", "by-an-error"])
def test_the_driver_is_closed_at_the_end_and_what_its_sink_printed_last_is_kept(
    clock: Clock, end: Epoch
) -> None:
    driver = PrintingDriver()
    supervisor = Scripted(clock, end)
    supervisor._run_driver._driver = driver  # type: ignore[assignment]
    with contextlib.suppress(SlotLost):
        supervisor.run()
    assert driver.n_closed == 1
    assert supervisor.take_output() == ["the last line"]
    assert supervisor.take_output() == []
