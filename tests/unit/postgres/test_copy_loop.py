"""The compiled loops, over a libpq of the test's own: PQgetCopyData, PQconsumeInput and PQfreemem as callbacks."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from tests.fake_libpq import Server
from tests.unit.decode.builder import begin, block, commit, delete, insert, logical, origin, truncate, update
from xidstream.pipeline.pgoutput.message_buffer import (
    IN_PLAIN,
    IN_ROWS,
    OUTSIDE,
    MessageBuffer,
    Outcome,
)
from xidstream.pipeline.pgoutput.spares import Spares


def framed(*messages: bytes) -> list[bytes]:
    payload, lengths = block(*messages)
    ends = np.cumsum(lengths)
    return [bytes(payload[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def in_mode(mode: int) -> MessageBuffer:
    gathered = MessageBuffer(Spares(0))
    gathered.make_room()
    gathered.mode = mode
    return gathered


ROWS = framed(*[insert([str(i)]) for i in range(50)])
KEEPALIVE = b"k" + bytes(17)


def test_rows_are_appended_as_they_came_until_there_are_no_more() -> None:
    server, gathered = Server(ROWS, arrivals=[20, 0]), in_mode(IN_ROWS)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    assert gathered.n_messages == 20
    server = Server(ROWS, arrivals=[20, 30])
    gathered = in_mode(IN_ROWS)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    payload, lengths = gathered.detach()
    assert bytes(payload) == b"".join(ROWS) and lengths.tolist() == [len(r) for r in ROWS]
    assert server.n_allocated == 0


def test_it_stops_where_the_limit_is_reached() -> None:
    server, gathered = Server(ROWS), in_mode(IN_ROWS)
    assert server.loop.gather(gathered, 3 * len(ROWS[0])) is Outcome.FULL
    assert gathered.n_messages == 3


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (IN_ROWS, framed(commit(0x200))[0]),
        (IN_ROWS, framed(begin(0x200, 700))[0]),
        (IN_PLAIN, framed(begin(0x200, 700))[0]),
        (IN_PLAIN, framed(logical("p", b"x"))[0]),
        (IN_PLAIN, framed(truncate([5]))[0]),
        (IN_PLAIN, framed(origin("upstream"))[0]),
        (IN_ROWS, framed(truncate([5]))[0]),
        (OUTSIDE, framed(logical("p", b"x", flags=0))[0]),
        (OUTSIDE, ROWS[0]),
        (OUTSIDE, framed(commit(0x200))[0]),
        (IN_ROWS, KEEPALIVE),
        (IN_ROWS, ROWS[0][:25]),  # a header without a message
        (IN_ROWS, b"w"),
        (IN_ROWS, framed(b"\xff")[0]),
        (IN_ROWS, b"x" + ROWS[0][1:]),
    ],
    ids=[
        "commit-in-rows",
        "begin-in-rows",
        "begin-in-plain",
        "message-in-plain",
        "truncate-in-plain",
        "origin-in-plain",
        "truncate-in-rows",
        "message-outside",
        "row-outside",
        "commit-outside",
        "keepalive",
        "header-alone",
        "one-byte",
        "unknown-type",
        "not-xlog-data",
    ],
)
def test_what_needs_a_look_is_given_out_and_nothing_is_appended(mode: int, message: bytes) -> None:
    server, gathered = Server([message, *ROWS]), in_mode(mode)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.MESSAGE
    assert server.loop.pop_message() == message
    assert (gathered.n_messages, gathered.n_bytes, gathered.mode, server.n_allocated) == (0, 0, mode, 0)


@pytest.mark.parametrize("mode", [IN_ROWS, IN_PLAIN], ids=["in-rows", "in-plain"])
def test_rows_of_every_kind_need_no_look(mode: int) -> None:
    rows = framed(insert(["1"]), update(["2"], key=["1"]), delete(key=["2"]))
    server, gathered = Server(rows), in_mode(mode)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    assert gathered.kinds(9) == b"IUD" and gathered.mode == mode


def test_a_row_without_room_is_given_out_and_append_makes_room() -> None:
    huge = framed(insert(["x" * 1_000_000]))[0]
    server, gathered = Server([ROWS[0], huge, *ROWS[1:]]), in_mode(IN_ROWS)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.MESSAGE
    gathered.append(server.loop.pop_message())
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    assert bytes(gathered.detach()[0]) == ROWS[0] + huge + b"".join(ROWS[1:])


def with_room_for(n_bytes: int) -> MessageBuffer:
    """So that exactly so many bytes fit before the payload is full."""
    gathered = in_mode(IN_ROWS)
    gathered.append(bytes(len(gathered.payload) - n_bytes))
    return gathered


def test_a_row_that_fills_the_payload_to_its_last_byte_has_room() -> None:
    server, gathered = Server(ROWS[:1]), with_room_for(len(ROWS[0]))
    payload = gathered.payload
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    assert gathered.payload is payload and bytes(payload[-len(ROWS[0]) :]) == ROWS[0]
    assert gathered.n_bytes == len(payload)


def test_a_row_that_lacks_one_byte_of_room_is_given_out() -> None:
    server, gathered = Server(ROWS[:1]), with_room_for(len(ROWS[0]) - 1)
    before = gathered.n_bytes
    assert server.loop.gather(gathered, 1 << 20) is Outcome.MESSAGE
    assert (gathered.n_messages, gathered.n_bytes) == (1, before)
    gathered.append(server.loop.pop_message())
    assert gathered.message(1) == ROWS[0] and gathered.n_bytes < len(gathered.payload)


def test_as_many_messages_as_there_are_lengths_have_room_and_no_more() -> None:
    gathered = in_mode(IN_ROWS)
    n_fit = len(gathered.lengths)
    server = Server(ROWS[:1] * (n_fit + 1))
    assert server.loop.gather(gathered, 1 << 20) is Outcome.MESSAGE
    assert gathered.n_messages == n_fit
    gathered.append(server.loop.pop_message())
    assert gathered.n_messages == n_fit + 1
    payload, lengths = gathered.detach()
    assert bytes(payload) == ROWS[0] * (n_fit + 1) and set(lengths.tolist()) == {len(ROWS[0])}


def test_small_transactions_pass_and_the_last_may_be_open() -> None:
    first = framed(begin(0x200, 700), insert(["1"]), commit(0x200))
    second = framed(begin(0x300, 701), insert(["2"]), insert(["3"]), commit(0x300))
    third = framed(begin(0x400, 702), insert(["4"]))
    server, gathered = Server([*first, *second, *third]), in_mode(OUTSIDE)
    assert server.loop.gather(gathered, 1 << 20) is Outcome.DRAINED
    assert gathered.mode == IN_PLAIN
    assert (gathered.n_transactions, gathered.whole_messages, gathered.n_messages) == (2, 7, 9)
    assert gathered.last_commit == second[-1]
    assert gathered.message(0) == first[0] and gathered.kinds(4) == b"BICB"
    payload, lengths = gathered.detach_whole()
    assert bytes(payload) == b"".join([*first, *second]) and len(lengths) == 7
    assert not payload.flags.writeable
    assert (gathered.mode, gathered.n_messages, gathered.n_transactions) == (IN_PLAIN, 2, 0)
    assert bytes(gathered.detach()[0]) == b"".join(third)


@pytest.mark.parametrize(("end", "outcome"), [(-1, Outcome.ENDED), (-2, Outcome.FAILED)])
def test_the_end_of_copy_and_a_failure_are_told_apart_and_rows_before_them_are_kept(
    end: int, outcome: Outcome
) -> None:
    server, gathered = Server(ROWS, end=end), in_mode(IN_ROWS)
    assert server.loop.gather(gathered, 1 << 20) is outcome
    assert gathered.n_messages == 50


def test_a_connection_that_fails_while_it_is_read_is_told() -> None:
    server, gathered = Server(ROWS, arrivals=[10, 0]), in_mode(IN_ROWS)
    server.fails = True
    assert server.loop.gather(gathered, 1 << 20) is Outcome.FAILED


def test_the_room_of_one_huge_row_is_not_kept_for_good() -> None:
    gathered = in_mode(IN_ROWS)
    gathered.append(framed(insert(["x" * 10_000_000]))[0])
    gathered.detach()
    gathered.append(ROWS[0])
    gathered.detach()
    assert len(gathered.payload) < 1_000_000


def test_messages_are_the_same_whoever_appends_them() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    messages = framed(*[insert(["x" * rng.randrange(300)]) for _ in range(2000)])
    looped, appended = in_mode(IN_ROWS), in_mode(IN_ROWS)
    server = Server(messages, arrivals=[rng.randrange(1, 200) for _ in range(400)])
    while looped.n_messages < len(messages):
        if server.loop.gather(looped, 1 << 30) is Outcome.MESSAGE:
            looped.append(server.loop.pop_message())
    for message in messages:
        appended.append(message)
    for one, other in zip(looped.detach(), appended.detach(), strict=True):
        assert np.array_equal(one, other)


COPIED = [b"%d\tsome text\n" % i for i in range(50)]


def room(n_bytes: int, n_rows: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    return np.zeros(n_bytes, np.uint8), np.zeros(n_rows, np.int32)


def test_rows_of_a_copy_are_gathered_to_its_end() -> None:
    loop, (payload, lengths) = (server := Server(COPIED, end=-1)).rows, room(1 << 20, 100)
    assert loop.gather(payload, lengths, 1 << 20) is Outcome.ENDED
    assert loop.n_rows == 50 and bytes(payload[: loop.n_bytes]) == b"".join(COPIED)
    assert lengths[:50].tolist() == [len(row) for row in COPIED]
    assert server.n_allocated == 0


@pytest.mark.parametrize(("n_bytes", "n_rows", "limit"), [(40, 100, 1000), (1000, 3, 1000), (1000, 100, 31)])
def test_every_row_comes_once_however_little_room_there_is(n_bytes: int, n_rows: int, limit: int) -> None:
    loop, (payload, lengths) = (server := Server(COPIED, end=-1)).rows, room(n_bytes, n_rows)
    got: list[bytes] = []
    outcome = Outcome.FULL
    while outcome is not Outcome.ENDED:
        outcome = loop.gather(payload, lengths, limit)
        ends = np.cumsum(lengths[: loop.n_rows])
        got += [bytes(payload[end - n : end]) for end, n in zip(ends, lengths, strict=False)]
        assert loop.n_rows or outcome is Outcome.ENDED
    assert got == COPIED and server.n_allocated == 0


def test_rows_that_come_in_pieces_are_gathered_behind_one_another_and_then_anew() -> None:
    server = Server(COPIED, arrivals=[10, 0, 20, 20], end=-1)
    loop, (payload, lengths) = server.rows, room(1 << 20, 100)
    seen = []
    while (outcome := loop.gather(payload, lengths, len(b"".join(COPIED[:45])))) is Outcome.DRAINED:
        seen.append(loop.n_rows)
    # Each look takes what has come, until nothing has.
    assert seen == [10] and outcome is Outcome.FULL and loop.n_rows == 45
    assert bytes(payload[: loop.n_bytes]) == b"".join(COPIED[:45])
    assert loop.gather(payload, lengths, 1 << 20) is Outcome.ENDED and loop.n_rows == 5
    assert bytes(payload[: loop.n_bytes]) == b"".join(COPIED[45:]) and server.n_allocated == 0


def test_a_connection_that_breaks_while_rows_are_waited_for_is_told_of() -> None:
    server = Server(COPIED, arrivals=[10])
    payload, lengths = room(1 << 20, 100)
    assert server.rows.gather(payload, lengths, 1 << 20) is Outcome.DRAINED and server.rows.n_rows == 10
    server.fails = True
    assert server.rows.gather(payload, lengths, 1 << 20) is Outcome.FAILED


def test_a_row_without_room_waits_and_says_how_much_it_needs() -> None:
    server = Server([COPIED[0], b"x" * 500 + b"\n", COPIED[1]], end=-1)
    loop, (payload, lengths) = server.rows, room(100, 10)
    assert loop.gather(payload, lengths, 100) is Outcome.MESSAGE
    assert (loop.n_rows, loop.waiting_bytes) == (1, 501)
    assert loop.gather(payload, lengths, 100) is Outcome.MESSAGE and loop.n_rows == 0
    payload, lengths = room(501, 10)
    assert loop.gather(payload, lengths, 100) is Outcome.FULL
    assert (loop.n_rows, loop.n_bytes, loop.waiting_bytes) == (1, 501, 0)
    assert loop.gather(payload, lengths, 100) is Outcome.ENDED and loop.n_rows == 1
    assert server.n_allocated == 0


def test_a_row_that_waits_is_freed_when_nobody_asks_for_it() -> None:
    server = Server([b"x" * 500])
    server.rows.gather(*room(100, 10), 100)
    assert server.n_allocated == 1
    server.rows.drop_waiting()
    server.rows.drop_waiting()
    assert (server.n_allocated, server.rows.waiting_bytes) == (0, 0)


def test_a_copy_that_fails_keeps_the_rows_before_it() -> None:
    loop, (payload, lengths) = Server(COPIED, end=-2).rows, room(1 << 20, 100)
    assert loop.gather(payload, lengths, 1 << 20) is Outcome.FAILED
    assert loop.n_rows == 50
