"""Ages by a wall clock that is set while a process runs, or is wrong when it begins. Both clocks are given."""

from __future__ import annotations

import math

import pytest

from xidstream.pipeline.log_tables.watched_clock import WatchedClock, steady_s

HOUR = 3600.0
DAY = 24 * HOUR
START = 1_790_000_000.0
AGE = 12 * HOUR


class Clocks:
    """``pass_s``: time passes. ``set_s``: somebody sets the wall clock."""

    def __init__(self, at_s: float = START) -> None:
        self.wall_s = at_s
        self.steady_s = 5_000.0

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds

    def set_s(self, seconds: float) -> None:
        self.wall_s += seconds

    def watched(self) -> WatchedClock:
        return WatchedClock(lambda: self.wall_s, lambda: self.steady_s)


def oldest_gone(clock: WatchedClock, clocks: Clocks, before_s: float | None, age_s: float = AGE) -> float:
    """The latest stamp of what counts as so old."""
    return clocks.wall_s - age_s - clock.ahead_s(age_s, before_s)


def test_clock_that_goes_well_adds_nothing() -> None:
    clocks = Clocks()
    clock = clocks.watched()
    for _ in range(100):
        clocks.pass_s(HOUR)
        assert clock.ahead_s(AGE, START - 60) == 0
        assert clock.is_trusted(HOUR, START - 60)


@pytest.mark.parametrize("jump_s", [12 * HOUR, 10 * 365 * DAY])
def test_jump_forward_removes_nothing_sooner_and_is_over_when_the_age_has_passed(jump_s: float) -> None:
    clocks = Clocks()
    clock = clocks.watched()
    clocks.pass_s(20 * HOUR)
    replaced_s = clocks.wall_s
    clock.look()
    clocks.pass_s(300)
    clocks.set_s(jump_s)
    passed = 300.0
    while oldest_gone(clock, clocks, START) < replaced_s:
        clocks.pass_s(60)
        passed += 60
    assert passed == pytest.approx(AGE, abs=61)
    clocks.pass_s(AGE)
    assert clock.ahead_s(AGE, START) == 0


def test_what_is_stamped_behind_the_jump_goes_at_its_age_too() -> None:
    clocks = Clocks()
    clock = clocks.watched()
    clocks.pass_s(AGE)
    clocks.set_s(DAY)
    clock.look()
    replaced_s = clocks.wall_s
    clocks.pass_s(AGE - 1)
    assert oldest_gone(clock, clocks, START) < replaced_s
    clocks.pass_s(2)
    assert oldest_gone(clock, clocks, START) >= replaced_s


@pytest.mark.parametrize("looks_between", [True, False])
def test_clock_that_is_set_back_by_an_hour_removes_nothing_sooner(looks_between: bool) -> None:
    clocks = Clocks()
    clock = clocks.watched()
    clocks.pass_s(AGE)
    clock.look()
    clocks.set_s(-HOUR)
    clocks.pass_s(1)
    if looks_between:
        clock.look()
    replaced_s = clocks.wall_s
    clocks.pass_s(1)
    clock.look()
    clocks.pass_s(HOUR)
    clocks.set_s(HOUR)
    clocks.pass_s(AGE - HOUR - 2)
    assert oldest_gone(clock, clocks, START) < replaced_s
    clocks.pass_s(2 * HOUR)
    assert oldest_gone(clock, clocks, START) >= replaced_s


def test_process_that_begins_with_a_clock_half_a_day_ahead_removes_what_is_half_a_day_old() -> None:
    """The last commit of before was made two minutes ago, and says so by the right time."""
    clocks = Clocks(START + 12 * HOUR)
    clock = clocks.watched()
    replaced_s, last_s = START - 600, START - 120
    assert oldest_gone(clock, clocks, last_s) < replaced_s
    assert not clock.is_trusted(HOUR, last_s)
    clocks.pass_s(10 * HOUR)
    assert oldest_gone(clock, clocks, last_s) < replaced_s
    clocks.pass_s(2 * HOUR)
    assert oldest_gone(clock, clocks, last_s) >= replaced_s
    assert clock.is_trusted(HOUR, last_s)


def test_restart_after_a_short_pause_changes_nothing_and_after_a_long_one_puts_off() -> None:
    clocks = Clocks()
    clock = clocks.watched()
    assert clock.ahead_s(AGE, START - HOUR) == 0
    assert clock.ahead_s(AGE, START - 3 * DAY) == 3 * DAY - HOUR
    clocks.pass_s(AGE)
    assert clock.ahead_s(AGE, START - 3 * DAY) == 0


def test_runs_of_minutes_a_day_remove_what_the_run_before_the_last_one_replaced() -> None:
    clocks = Clocks()
    stamps = []
    for _ in range(4):
        clock = clocks.watched()
        before_s = stamps[-1] if stamps else clock.began_at_s
        clocks.pass_s(60)
        gone = [stamp for stamp in stamps if stamp <= oldest_gone(clock, clocks, before_s)]
        assert gone == stamps[:-1]
        stamps.append(clocks.wall_s)
        clocks.pass_s(DAY)


def test_where_nothing_is_known_of_before_nothing_goes_until_the_process_is_as_old() -> None:
    clocks = Clocks()
    clock = clocks.watched()
    assert math.isinf(clock.ahead_s(AGE, None))
    clocks.pass_s(AGE)
    assert clock.ahead_s(AGE, None) == 0


def test_process_that_begins_in_1970_removes_again_when_its_clock_was_set_for_as_long() -> None:
    clocks = Clocks(0.0)
    clock = clocks.watched()
    clocks.pass_s(60)
    clock.look()
    clocks.set_s(START)
    replaced_s = clocks.wall_s
    assert oldest_gone(clock, clocks, START - DAY) < replaced_s
    clocks.pass_s(AGE + 61)
    assert oldest_gone(clock, clocks, START - DAY) >= replaced_s


def test_steady_seconds_go_on() -> None:
    assert steady_s() <= steady_s()
