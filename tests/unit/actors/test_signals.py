"""What a run makes of SIGINT and SIGTERM, sent by this process to itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray

from xidstream.actors.runtime.signals import StopRequest

BOTH = (signal.SIGINT, signal.SIGTERM)
each_first = pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1]], ids=["SIGINT", "SIGTERM"])


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in BOTH}
    stop = StopRequest()
    stop.listen()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


def test_a_request_that_somebody_else_tells_of_writes_nothing_itself(
    request_to_stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each line of a run that logs JSON is JSON."""
    request_to_stop.is_quiet = True
    send(signal.SIGTERM)
    assert request_to_stop.asked
    assert capfd.readouterr() == ("", "")


@each_first
def test_the_first_signal_asks_and_the_second_ends(
    request_to_stop: StopRequest,
    first: signal.Signals,
    second: signal.Signals,
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    request_to_stop.tell(lambda: told.append("early"))
    assert not request_to_stop.asked
    send(first)
    assert request_to_stop.asked and told == ["early"]
    assert "a second signal ends the run at once" in capfd.readouterr().err
    request_to_stop.tell(lambda: told.append("late"))
    assert told == ["early", "late"]
    with pytest.raises(KeyboardInterrupt):
        send(second)


@each_first
def test_ray_is_started_whole_and_keeps_neither_signal(
    request_to_stop: StopRequest, first: signal.Signals, second: signal.Signals
) -> None:
    set_by_ray = ray._private.utils.set_sigterm_handler
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), request_to_stop.held():
        ray._private.utils.set_sigterm_handler(lambda *_: os._exit(1))
        send(first)
        send(second)
        # As Ray's C++ does, which asks nobody.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        steps.append("started")
    assert steps == ["started"] and request_to_stop.asked
    assert ray._private.utils.set_sigterm_handler is set_by_ray
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_nothing_interrupts_what_is_done_after_the_run(request_to_stop: StopRequest) -> None:
    request_to_stop.deafen()
    for number in (*BOTH, *BOTH):
        send(number)
    assert not request_to_stop.asked
