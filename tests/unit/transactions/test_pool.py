"""How many buffers there are, who holds what, and that nobody waits for a buffer that is not there yet."""

from __future__ import annotations

import random

import pytest

from xidstream.pipeline.pg import Xid
from xidstream.pipeline.stream.ledger import TransactionLedger, TransactionRecord
from xidstream.pipeline.transactions.buffer_quota import BufferQuota
from xidstream.pipeline.transactions.pool import BufferPoolPolicy, Move, PoolFull

_LEDGER = TransactionLedger()


def tx(xid: int) -> TransactionRecord:
    """The record of this transaction, the same one all through a test."""
    return _LEDGER.of(Xid(xid))


@pytest.fixture(autouse=True)
def no_transaction_is_open() -> None:
    for record in _LEDGER.records():
        _LEDGER.remove(record.xid)


def started(minimum: int, maximum: int, *, idle_after_s: float = 30) -> BufferPoolPolicy:
    """With its floor placed."""
    pool = BufferPoolPolicy(minimum, maximum, idle_after_s)
    for number in pool.ask(0):
        pool.placed(number, 0)
    return pool


def test_a_transaction_shares_until_the_buffer_that_it_made_wanted_is_placed_and_then_moves_there() -> None:
    pool = started(1, 4)
    assert [pool.assign(tx(x)) for x in (1, 2, 3)] == [0, 0, 0]
    assert pool.ask(0) == [1, 2] and pool.ask(0) == []
    assert pool.moves() == [] and pool.assign(tx(2)) == 0
    pool.placed(2, 60)
    assert pool.moves() == [Move(tx(3), 0, 2)] and pool.moves() == []
    assert tx(3).buffer == 2
    pool.placed(1, 61)
    assert pool.moves() == [Move(tx(2), 0, 1)]
    assert [tx(x).buffer for x in (1, 2, 3)] == [0, 1, 2]


def test_no_more_buffers_are_asked_for_than_transactions_are_open_nor_than_the_cap() -> None:
    pool = started(1, 3)
    assert pool.ask(0) == []
    pool.assign(tx(1))
    assert pool.ask(0) == [], "the floor's is enough"
    for xid in range(2, 17):
        pool.assign(tx(xid))
    assert pool.ask(0) == [1, 2] and pool.n_needed == 16
    pool.allow(5)
    assert pool.ask(0) == [3, 4]


def test_a_transaction_that_was_over_before_the_pool_looked_asks_for_nothing() -> None:
    pool = started(1, 4)
    for xid in (1, 2, 3):
        pool.assign(tx(xid))
    for xid in (2, 3):
        pool.end(tx(xid), 0)
    assert pool.ask(0) == []


def test_a_buffer_that_gets_free_takes_over_from_one_that_is_shared() -> None:
    pool = started(2, 2)
    assert [pool.assign(tx(x)) for x in (1, 2, 3)] == [0, 1, 0]
    pool.end(tx(2), 0)
    assert pool.moves() == [Move(tx(3), 0, 1)], "though rows of 2 are not in the sink yet"
    pool.done(0, 1)
    pool.end(tx(3), 1)
    assert pool.moves() == [], "one alone stays where it is"
    assert pool.remove_idle(100) == []


def test_plain_blocks_go_to_the_floor_while_it_is_free_and_never_to_what_is_not_placed() -> None:
    pool = started(3, 5)
    pool.assign(tx(1))
    assert {pool.for_plain_block(ticket) for ticket in range(6)} == {1, 2}
    for xid in (2, 3, 4, 5):
        pool.assign(tx(xid))
    assert pool.ask(0) == [3, 4]
    assert {pool.for_plain_block(ticket) for ticket in range(6)} == {0, 1, 2}
    pool.placed(4, 1)
    assert {pool.for_plain_block(ticket) for ticket in range(6)} == {4}


def test_what_is_idle_is_given_back_but_for_the_floor_and_what_still_has_rows() -> None:
    pool = started(1, 4)
    for xid in range(4):
        pool.assign(tx(xid))
    for number in pool.ask(0):
        pool.placed(number, 1)
    assert len(pool.moves()) == 3
    for xid in range(3):
        pool.end(tx(xid), xid)
    pool.done(2, 10)
    pool.end(tx(3), 3)
    holder = tx(3).buffer
    assert pool.remove_idle(39) == []
    assert pool.remove_idle(41) == sorted({1, 2, 3} - {holder})
    pool.done(3, 42)
    assert pool.remove_idle(71) == []
    assert pool.remove_idle(72) == [holder]
    assert tuple(pool._buffers) == (0,)


def test_a_buffer_with_a_plain_block_that_is_not_in_the_sink_is_kept() -> None:
    pool = started(1, 2)
    pool.assign(tx(1))
    pool.assign(tx(2))
    assert pool.ask(0) == [1]
    pool.placed(1, 0)
    pool.end(tx(2), 0)
    assert pool.for_plain_block(1) == 1, "the floor's buffer has a transaction"
    pool.done(0, 10)
    assert pool.remove_idle(100) == []
    pool.done(1, 100)
    assert pool.remove_idle(100) == [1]


def test_a_transaction_that_was_rolled_back_leaves_its_buffer_though_the_sink_holds_nothing() -> None:
    pool = started(1, 2)
    pool.assign(tx(1))
    pool.end(tx(1), -1)
    pool.done(-1, 1)
    assert pool._buffers[0].n_held == 0


def test_a_buffer_asked_for_in_vain_is_wanted_while_transactions_share_and_then_given_back() -> None:
    pool = started(1, 4)
    pool.assign(tx(1))
    pool.assign(tx(2))
    assert pool.ask(0) == [1]
    assert pool.remove_idle(1000) == []
    pool.end(tx(2), 0)
    pool.done(0, 1000)
    assert pool.remove_idle(1029) == []
    assert pool.remove_idle(1030) == [1]
    pool.placed(1, 1031)  # it came up at the very moment
    assert tuple(pool._buffers) == (0,)


def test_a_buffer_that_may_never_be_idle_is_still_waited_for() -> None:
    pool = started(1, 2, idle_after_s=0)
    pool.assign(tx(1))
    pool.assign(tx(2))
    assert pool.ask(0) == [1] and pool.remove_idle(0) == []
    pool.placed(1, 1)
    assert pool.moves() == [Move(tx(2), 0, 1)] and pool.remove_idle(1) == []


def test_pool_that_may_hold_nothing_says_so() -> None:
    with pytest.raises(PoolFull):
        BufferPoolPolicy(minimum=0, maximum=0, idle_after_s=1).assign(tx(1))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_open_transaction_is_in_one_placed_buffer(seed: int) -> None:
    chance = random.Random(seed)
    pool = started(2, 6, idle_after_s=5)
    asked: list[int] = []
    where: dict[TransactionRecord, int] = {}
    gone: set[int] = set()
    next_xid = 1
    for step in range(600):
        now_s = step * 0.5
        for _ in range(chance.randrange(3)):
            where[tx(next_xid)] = pool.assign(tx(next_xid))
            next_xid += 1
        asked += pool.ask(now_s)
        if asked and chance.random() < 0.3:
            pool.placed(asked.pop(chance.randrange(len(asked))), now_s)
        for record in [x for x in where if chance.random() < (0.1 if step % 200 < 120 else 0.6)]:
            pool.end(record, step)
            del where[record]
        pool.done(step - chance.randrange(3), now_s)
        for move in pool.moves():
            assert where[move.record] == move.source and move.target not in gone, seed
            where[move.record] = move.target
        gone |= set(removed := pool.remove_idle(now_s))
        asked = [n for n in asked if n not in removed]
        assert len(pool._buffers) <= 6 and {0, 1} <= set(pool._buffers), seed
        assert all(x.buffer == n and n not in gone and n not in asked for x, n in where.items()), seed
    for record in where:
        pool.end(record, 600)
    pool.done(600, 1000)
    pool.remove_idle(2000)
    assert tuple(pool._buffers) == (0, 1), seed


def test_slots_share_what_the_cap_leaves_above_their_floors_first_come_first_served() -> None:
    quota = BufferQuota(maximum=6, floors=2)
    assert quota.want("a", 1, 16) == 5
    assert quota.want("b", 1, 3) == 1
    assert quota.want("a", 1, 3) == 3
    assert quota.want("b", 1, 3) == 3
    quota.release("a")
    assert quota.want("b", 1, 16) == 6 - 1
    assert quota.want("c", 1, 1) == 1, "the floor of the slot's next life"


def test_what_a_dead_reader_had_asked_for_on_its_last_breath_is_not_lent_for_ever() -> None:
    """Its question may arrive after the supervisor's release; nobody would give that share back."""
    quota = BufferQuota(maximum=6, floors=2)
    quota.release("a")
    assert quota.want("a", 1, 16) == 1
    assert quota.want("b", 1, 16) == 5


def test_what_ended_is_forgotten_when_the_sink_has_it_whatever_else_is_open() -> None:
    pool = started(1, 1)
    pool.assign(tx(1))
    for xid in range(2, 1000):
        pool.assign(tx(xid))
        pool.end(tx(xid), -1 if xid % 3 == 0 else xid)
        pool.done(xid - 10, 1)
    assert pool._buffers[0].n_held < 20 and len(pool._ended) < 20, (
        "the open one, and what the sink does not have"
    )
    assert tx(1).buffer == 0
