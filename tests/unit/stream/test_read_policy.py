"""What the reader does next: the clock and the sums are the test's."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.config import MIB, Config
from xidstream.pipeline.stream.linger import FLOOD_BYTES, FLOOD_LINGERS
from xidstream.pipeline.stream.read_policy import (
    FLOWING_LOOK_INTERVAL_S,
    IDLE_WAIT_S,
    LOOK_INTERVAL_S,
    NAPS_S,
    POSITION_INTERVAL_S,
    SOCKET_NAPS_S,
    Action,
    AwaitCredit,
    Credit,
    Gathered,
    Listen,
    Nap,
    ReadPolicy,
    ReadStep,
    Wait,
)
from xidstream.pipeline.stream.status_pace import ANSWER_INTERVAL_S

LSN = Lsn(1 << 32)
NOTHING = Gathered(whole_bytes=0, has_open_rows=False, cut_bytes=0, sent_bytes=0)
LIMIT_BYTES = 64 * MIB
BACKLOG_BYTES = 128 * MIB


class Reader:
    """The shell, with a clock that only moves when it rests. ``done`` is what it was told to do, and when."""

    def __init__(self, *, is_local: bool = False, status_interval_s: float = 10.0, **settings: Any) -> None:
        config = Config(slot="s", **settings)
        self.now_s = 100.0
        self.policy = ReadPolicy(config, self.now_s, status_interval_s=status_interval_s, is_local=is_local)
        self.gathered = NOTHING
        self.done: list[tuple[float, Action]] = []
        self.server_sends = False

    def turn(self, *, drained: bool = True, flowing: bool = False) -> tuple[Action, ...]:
        """One read that took no time, and what follows it."""
        actions = self.policy.rest(self.now_s, drained=drained, flowing=flowing)
        if actions is None:
            actions = self.policy.look(self.now_s, self.gathered, drained=drained, flowing=flowing)
        self.perform(actions)
        return actions

    def perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self.done.append((self.now_s, action))
            if isinstance(action, (Nap, Wait, AwaitCredit)):
                self.now_s += action.seconds
            elif isinstance(action, Listen):
                self.now_s += 0.0 if self.server_sends else action.seconds
                self.policy.listened(self.now_s, heard=self.server_sends)
            elif action in (ReadStep.SEND_STATUS, ReadStep.ASK_POSITION):
                self.policy.sending_status()
                self.policy.status_sent(self.now_s, taken=True)

    def times_of(self, step: ReadStep) -> list[float]:
        return [at_s - 100.0 for at_s, action in self.done if action is step]

    def idle_until(self, until_s: float) -> None:
        while self.now_s < 100.0 + until_s:
            self.turn()


# -- credit


@pytest.mark.parametrize(
    ("credit", "is_over"),
    [
        (Credit(0, 0, 0, 0), False),
        (Credit(LIMIT_BYTES, 0, 0, 0), False),
        (Credit(LIMIT_BYTES // 2, LIMIT_BYTES // 2, 0, BACKLOG_BYTES), False),
        (Credit(LIMIT_BYTES // 2, LIMIT_BYTES // 2 + 1, 0, 0), True),
        (Credit(0, 0, 0, BACKLOG_BYTES + 1), True),
        (Credit(0, MIB, MIB, BACKLOG_BYTES - MIB + 1), True),
    ],
    ids=[
        "nothing",
        "at the limit",
        "both at their limits",
        "over memory",
        "over backlog",
        "queued may have ended",
    ],
)
def test_reading_stops_where_the_bytes_under_way_are_over_a_limit(credit: Credit, is_over: bool) -> None:
    reader = Reader(reader_memory_bytes=LIMIT_BYTES, backlog_bytes=BACKLOG_BYTES)
    assert reader.policy.is_over_credit(credit) is is_over


def test_a_pause_stops_the_reading_and_not_the_status() -> None:
    reader = Reader()
    while reader.now_s < 125:
        reader.perform(reader.policy.pause(reader.now_s, in_flight_bytes=MIB))
    assert reader.times_of(ReadStep.SEND_STATUS) == pytest.approx([0, 10, 20], abs=2 * IDLE_WAIT_S)
    kinds = {type(action) for _, action in reader.done}
    assert kinds == {ReadStep, AwaitCredit}, "no read, and no wait for the socket"


def test_a_position_that_may_be_confirmed_in_a_pause_is_told_at_once() -> None:
    reader = Reader()
    reader.perform(reader.policy.pause(reader.now_s, in_flight_bytes=MIB))
    assert reader.policy.pause(reader.now_s, in_flight_bytes=MIB) == (AwaitCredit(IDLE_WAIT_S),)
    reader.policy.position_changed()
    assert ReadStep.SEND_STATUS in reader.policy.pause(reader.now_s, in_flight_bytes=MIB)


def test_what_is_over_the_limit_with_nothing_in_flight_is_cut() -> None:
    reader = Reader()
    cuts = {ReadStep.CUT_WHOLE, ReadStep.CUT_OPEN}
    assert not cuts & set(reader.policy.pause(reader.now_s, in_flight_bytes=1))
    assert cuts <= set(reader.policy.pause(reader.now_s, in_flight_bytes=0))


# -- rests and looks


@pytest.mark.parametrize(("is_local", "naps_s"), [(False, NAPS_S), (True, SOCKET_NAPS_S)])
def test_naps_double_up_to_a_bound_while_rows_flow_and_begin_anew_when_they_do_not(
    is_local: bool, naps_s: tuple[float, float]
) -> None:
    reader = Reader(is_local=is_local)
    first_s, longest_s = naps_s

    reader.server_sends = True

    def naps(n: int) -> list[float]:
        before = len(reader.done)
        while sum(isinstance(a, Nap) for _, a in reader.done[before:]) < n:
            reader.turn(flowing=True)
        return [a.seconds for _, a in reader.done[before:] if isinstance(a, Nap)]

    assert naps(8) == [min(first_s * 2**i, longest_s) for i in range(8)]
    reader.turn(flowing=False)
    assert naps(2) == [min(first_s * 2**i, longest_s) for i in range(2)]


def test_a_read_that_left_something_in_the_socket_is_followed_by_the_next_at_once() -> None:
    reader = Reader()
    reader.turn(drained=False, flowing=True)
    for _ in range(100):
        assert reader.turn(drained=False, flowing=True) == ()


def test_looks_come_by_the_clock_however_often_the_socket_is_read() -> None:
    reader = Reader()
    n_looks = 0
    for millisecond in range(1000):
        now_s = 100 + millisecond / 1000
        if reader.policy.rest(now_s, drained=False, flowing=True) is None:
            reader.policy.look(now_s, NOTHING, drained=False, flowing=True)
            n_looks += 1
    assert 90 <= n_looks <= 1 / FLOWING_LOOK_INTERVAL_S


def test_an_idle_reader_waits_for_the_socket() -> None:
    reader = Reader()
    assert reader.turn()[-1] == Listen(IDLE_WAIT_S)
    reader.server_sends = True
    assert reader.turn()[-1] == Listen(IDLE_WAIT_S)
    (wait,) = reader.turn()
    assert isinstance(wait, Wait) and 0 < wait.seconds <= LOOK_INTERVAL_S, "a look was just now"


# -- lingering


def test_a_single_transaction_is_cut_after_its_linger_though_nothing_else_comes() -> None:
    reader = Reader(linger_ms=10)
    reader.gathered = Gathered(90, False, 0, 0)
    assert reader.turn()[-1] == Listen(0.01), "no longer than the transaction may wait"
    reader.now_s += 0.001  # a clock is no exact sum of waits
    actions = reader.turn()
    assert ReadStep.CUT_WHOLE in actions
    assert actions[-1] == Listen(IDLE_WAIT_S), "nothing whole is left"


def test_a_flood_is_cut_when_its_long_linger_is_over_and_at_once_when_the_socket_is_quiet() -> None:
    reader = Reader(linger_ms=10)
    reader.gathered = Gathered(FLOOD_BYTES, False, 0, 0)
    while not reader.times_of(ReadStep.CUT_WHOLE):
        reader.turn(drained=False, flowing=True)
        reader.now_s += 0.001
    assert reader.times_of(ReadStep.CUT_WHOLE)[0] == pytest.approx(
        FLOOD_LINGERS * 0.01, abs=FLOWING_LOOK_INTERVAL_S
    )
    reader.done.clear()
    reader.turn(drained=False, flowing=True)
    reader.now_s += FLOWING_LOOK_INTERVAL_S
    began_s = reader.now_s - 100
    while not reader.times_of(ReadStep.CUT_WHOLE):
        reader.turn()
    assert reader.times_of(ReadStep.CUT_WHOLE)[0] - began_s < 0.03, "the end of a burst"


def test_behind_blocks_that_are_not_sent_small_ones_wait_for_company() -> None:
    reader = Reader(linger_ms=10)
    reader.gathered = Gathered(90, False, cut_bytes=1000, sent_bytes=0)
    reader.idle_until(0.05)
    assert not reader.times_of(ReadStep.CUT_WHOLE)
    reader.gathered = Gathered(90, False, cut_bytes=1000, sent_bytes=1000)
    reader.turn()
    assert reader.times_of(ReadStep.CUT_WHOLE)


def test_rows_of_open_transactions_are_cut_after_their_own_linger() -> None:
    reader = Reader(stream_linger_ms=2000)
    reader.gathered = Gathered(0, True, 0, 0)
    reader.idle_until(4.5)
    assert reader.times_of(ReadStep.CUT_OPEN) == pytest.approx([2, 4.1], abs=2 * IDLE_WAIT_S)


# -- the server


def test_an_idle_server_is_asked_where_it_is_in_each_status_interval() -> None:
    reader = Reader(status_interval_s=10.0, receive_timeout_ms=0)
    reader.idle_until(25)
    assert reader.times_of(ReadStep.ASK_POSITION) == pytest.approx([0, 10, 20], abs=2 * IDLE_WAIT_S)


def test_a_server_that_writes_much_is_asked_all_the_time_until_it_rests_again() -> None:
    """One second of it was 83 MB that the server had decoded, and that was not confirmed."""
    reader = Reader(status_interval_s=10.0, receive_timeout_ms=0)
    lsn = LSN
    for tenth in range(400):
        lsn = Lsn(lsn + (10_000_000 if tenth < 200 else 100_000 if tenth < 250 else 0))
        reader.perform(reader.policy.keepalive(reader.now_s, lsn, reply_requested=False))
        reader.idle_until((tenth + 1) / 10)
    asked = [int(at_s // 10) for at_s in reader.times_of(ReadStep.ASK_POSITION)]
    assert [asked.count(ten) for ten in range(4)] == [
        pytest.approx(27, abs=5),
        pytest.approx(27, abs=5),
        pytest.approx(5, abs=2),
        1,
    ]


def test_a_run_that_waits_for_a_position_asks_for_it_four_times_a_second() -> None:
    reader = Reader(available_now=True, receive_timeout_ms=0)
    reader.idle_until(1)
    assert len(reader.times_of(ReadStep.ASK_POSITION)) == pytest.approx(1 / POSITION_INTERVAL_S, abs=1)


def test_a_server_that_is_silent_though_it_was_asked_counts_as_lost() -> None:
    reader = Reader(receive_timeout_ms=60_000)
    with pytest.raises(ConnectionLost, match="the server was silent for 60 s"):
        reader.idle_until(100)
    assert reader.now_s - 100 == pytest.approx(60, abs=0.1)


def test_a_server_that_answers_is_never_lost_though_nothing_happens() -> None:
    reader = Reader(receive_timeout_ms=60_000)
    for _ in range(20):
        reader.idle_until(reader.now_s - 100 + 20)
        reader.turn(flowing=True)


def test_without_a_timeout_a_silent_server_is_waited_for() -> None:
    reader = Reader(receive_timeout_ms=0)
    reader.idle_until(1000)


def test_in_a_pause_nobody_listens_and_so_silence_means_nothing() -> None:
    reader = Reader(receive_timeout_ms=60_000)
    reader.idle_until(59)
    reader.perform(reader.policy.pause(reader.now_s, in_flight_bytes=MIB))
    reader.idle_until(100)
    with pytest.raises(ConnectionLost):
        reader.idle_until(200)


# -- keepalives


def test_of_many_keepalives_a_few_positions_a_second_are_passed_on() -> None:
    reader = Reader()
    n_passed = 0
    for millisecond in range(1000):
        actions = reader.policy.keepalive(100 + millisecond / 1000, LSN, reply_requested=False)
        n_passed += ReadStep.PASS_POSITION in actions
        assert ReadStep.SEND_STATUS not in actions
    assert n_passed == 2 / POSITION_INTERVAL_S


def test_a_keepalive_that_asks_is_answered_at_a_bounded_rate() -> None:
    reader = Reader()
    for _ in range(1000):
        reader.perform(reader.policy.keepalive(reader.now_s, LSN, reply_requested=True))
        reader.now_s += 0.001
    assert len(reader.times_of(ReadStep.SEND_STATUS)) == pytest.approx(1 / ANSWER_INTERVAL_S, abs=1)


def test_the_position_of_a_keepalive_is_passed_on_before_it_is_answered() -> None:
    reader = Reader()
    assert reader.policy.keepalive(100, LSN, reply_requested=True) == (
        ReadStep.PASS_POSITION,
        ReadStep.SEND_STATUS,
    )
