"""The sending thread: in order, with credit, and never silent about what failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_until
from xidstream.actors.reader.sending_thread import _EVENT_BYTES, _JOINED_BYTES, SendingThread
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.stream import Aborted, Block, StreamEvent, TransactionBlock, UsedRelations


class Sender:
    """What ``actors.reader.sender`` does, without Ray."""

    def __init__(self) -> None:
        self.sent: list[StreamEvent] = []
        self.n_calls = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None
        self.done_ticket = -2
        self.backlog_bytes = 0
        self.end_lsn = INVALID_LSN

    def send(self, events: Sequence[StreamEvent]) -> None:
        self.entered.set()
        assert self.may_go_on.wait(10)
        self.sent += events
        self.n_calls += 1

    def collect(self, done_ticket: int) -> None:
        if self.error is not None:
            raise self.error
        self.done_ticket = done_ticket


class Pool:
    def __init__(self) -> None:
        self.in_flight_bytes = self.n_calls = 0
        self.done_ticket = -1
        self.n_idle = 0
        self.fleet = self

    def adapt(self) -> None: ...

    def check_alive(self, now_s: float) -> None: ...

    def done(self, done_ticket: int) -> None:
        self.done_ticket = done_ticket

    def stop_idle(self) -> None:
        self.n_idle += 1


class Running:
    def __init__(self) -> None:
        self.sender, self.pool = Sender(), Pool()
        sender: Any = self.sender
        pool: Any = self.pool
        self.sending = SendingThread(sender, pool)
        self.sending.start()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.sender.may_go_on.set()
    made.sending.close()
    assert not made.sending._thread.is_alive()


def block(n_bytes: int = 100) -> TransactionBlock:
    content = Block(np.zeros(n_bytes, np.uint8), np.array([n_bytes], np.int32), UsedRelations({}))
    return TransactionBlock(Xid(700), content, True, Lsn(1))


def failure_of(sending: SendingThread) -> BaseException:
    caught: list[BaseException] = []

    def has_failed() -> bool:
        try:
            sending.check()
        except BaseException as error:
            caught.append(error)
        return bool(caught)

    wait_until(has_failed)
    return caught[0]


def test_cuts_come_in_the_order_in_which_they_were_submitted(running: Running) -> None:
    events: list[StreamEvent] = [block() if i % 3 else Aborted(Xid(700 + i)) for i in range(200)]
    for i in range(0, 200, 4):
        running.sending.submit(events[i : i + 4])
    wait_until(lambda: len(running.sender.sent) == 200)
    assert all(a is b for a, b in zip(running.sender.sent, events, strict=True))


def test_whoever_submits_does_not_wait_for_ray_and_what_waits_counts_as_in_flight(running: Running) -> None:
    running.sender.may_go_on.clear()
    running.pool.in_flight_bytes = 1000
    for _ in range(5):
        running.sending.submit([block(), block(50), Aborted(Xid(700))])
    assert running.sending.queued_bytes == 5 * (150 + 3 * _EVENT_BYTES), "ends without rows count, too"
    assert running.sending.in_flight_bytes == 1000 + running.sending.queued_bytes
    running.sender.may_go_on.set()
    wait_until(lambda: running.sending.in_flight_bytes == 1000)


def test_what_waits_is_sent_together_up_to_a_bound(running: Running) -> None:
    running.sender.may_go_on.clear()
    running.sending.submit([block()])
    assert running.sender.entered.wait(10)  # it has left the queue alone; an empty queue would not tell that
    half_bytes = _JOINED_BYTES // 2
    for n_bytes in (half_bytes, half_bytes, 100, 100):
        running.sending.submit([block(n_bytes)])
    running.sender.may_go_on.set()
    wait_until(lambda: len(running.sender.sent) == 5)
    assert running.sender.n_calls == 3, "the first, two that reach the bound, two that do not"


@pytest.mark.parametrize("when", ["collecting", "sending"])
def test_what_failed_is_raised_where_the_stream_is_read_and_nothing_more_is_sent(
    running: Running, when: str
) -> None:
    error = ComponentLost("a buffer died")
    if when == "sending":

        def send(events: Sequence[StreamEvent]) -> None:
            raise error

        running.sender.send = send  # type: ignore[method-assign]
    else:
        running.sender.error = error
    running.sending.submit([block()])
    assert failure_of(running.sending) is error
    running.sender.sent.clear()
    running.sending.submit([block()])
    running.sending._thread.join(5)
    assert not running.sending._thread.is_alive() and not running.sender.sent


def test_what_the_sink_holds_is_told_though_nothing_flows(running: Running) -> None:
    running.sending.done_ticket = 41
    wait_until(lambda: running.sender.done_ticket == 41)
    wait_until(lambda: running.pool.n_idle > 1)


def test_what_the_sink_holds_is_let_go_of_though_something_always_flows(running: Running) -> None:
    """It was let go of in idle moments alone, and grew under a load that had none."""
    running.sending.free_ticket = 41
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            running.sending.submit([block()])

    thread = threading.Thread(target=load)
    thread.start()
    wait_until(lambda: running.sender.n_calls > 10)
    n_idle = running.pool.n_idle
    wait_until(lambda: running.pool.done_ticket == 41)
    stop.set()
    thread.join()
    assert running.pool.n_idle == n_idle, "it never was idle"


def test_each_call_to_a_buffer_counts_with_what_it_takes_beside_its_rows(running: Running) -> None:
    """400,000 blocks of one row are 64 MB of rows, and some gigabytes of calls."""
    running.pool.n_calls, running.pool.in_flight_bytes = 1000, 160_000
    assert running.sending.in_flight_bytes == 160_000
    assert running.sending.credit_bytes == 160_000 + 1000 * _EVENT_BYTES


def test_after_the_end_nothing_is_sent(running: Running) -> None:
    running.sender.may_go_on.clear()
    running.sending.submit([block()])
    assert running.sender.entered.wait(10)  # it has left the queue alone; an empty queue would not tell that
    running.sending.submit([block()])
    closing = threading.Thread(target=running.sending.close)
    closing.start()
    wait_until(lambda: running.sending._failure is not None)
    running.sender.may_go_on.set()
    closing.join(10)
    assert len(running.sender.sent) == 1


def test_a_pause_ends_with_the_next_look_and_with_a_failure(running: Running) -> None:
    started_s = time.monotonic()
    running.sending.await_look(30)
    running.sender.error = ComponentLost("a buffer died")
    failure_of(running.sending)
    running.sending.await_look(30)
    assert time.monotonic() - started_s < 20


def test_looks_are_as_far_apart_as_nothing_waits_for_them(running: Running) -> None:
    """Each look of a trickle asked Ray for what was in flight, a hundred times a second."""
    sending, pool, sender = running.sending, running.pool, running.sender
    pool.in_flight_bytes = sender.backlog_bytes = 100
    trickle_s = sending._interval_s()
    pool.in_flight_bytes = 1 << 20
    assert sending._interval_s() < trickle_s, "somebody may wait for so much credit"
    pool.in_flight_bytes = 0
    assert sending._interval_s() == trickle_s
    sender.backlog_bytes = 1 << 20
    assert sending._interval_s() < trickle_s, "what the sink takes gives credit, too"
