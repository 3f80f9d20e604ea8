"""What counts as waiting for the sink."""

from __future__ import annotations

from xidstream.pipeline.pg import Xid
from xidstream.pipeline.stream.backlog import Backlog


def test_open_transaction_counts_nothing_and_a_committed_one_what_its_buffer_may_hold() -> None:
    backlog = Backlog(held_limit_bytes=100)
    backlog.add_block(Xid(1), 70)
    backlog.add_block(Xid(1), 70)
    backlog.add_block(Xid(2), 30)
    assert backlog.n_bytes == 0
    backlog.end(0, Xid(1))
    backlog.end(1, Xid(2))
    assert backlog.n_bytes == 130


def test_credit_comes_back_with_the_contiguous_prefix() -> None:
    backlog = Backlog(held_limit_bytes=100)
    for ticket, n_bytes in enumerate((10, 20, 40)):
        backlog.owe(ticket, n_bytes)
    backlog.done(-1)
    assert backlog.n_bytes == 70
    backlog.done(1)
    assert backlog.n_bytes == 40
    backlog.done(5)
    assert backlog.n_bytes == 0


def test_rolled_back_transaction_leaves_nothing_to_count_when_its_xid_comes_again() -> None:
    backlog = Backlog(held_limit_bytes=100)
    backlog.add_block(Xid(1), 70)
    backlog.forget(Xid(1))
    backlog.end(0, Xid(1))
    assert backlog.n_bytes == 0


def test_committed_transaction_leaves_nothing_to_count_when_its_xid_comes_again() -> None:
    backlog = Backlog(held_limit_bytes=100)
    backlog.add_block(Xid(1), 70)
    backlog.end(0, Xid(1))
    backlog.done(0)
    backlog.add_block(Xid(1), 5)
    backlog.end(1, Xid(1))
    assert backlog.n_bytes == 5
