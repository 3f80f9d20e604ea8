"""What counts as waiting for the sink."""

from __future__ import annotations

from xidstream.pipeline.exchange import JOINED_UNIT_BYTES, SINGLE_UNITS, UNIT_BYTES
from xidstream.pipeline.stream.backlog import Backlog


def rows_alone() -> Backlog:
    """It counts what units take beside their rows as nothing."""
    return Backlog(held_limit_bytes=100, unit_bytes=0, joined_bytes=0)


def test_a_committed_transaction_counts_what_its_buffer_may_hold() -> None:
    backlog = rows_alone()
    backlog.end(0, 140)
    backlog.end(1, 30)
    assert backlog.n_bytes == 130


def test_credit_comes_back_with_the_contiguous_prefix() -> None:
    backlog = rows_alone()
    for ticket, n_bytes in enumerate((10, 20, 40)):
        backlog.owe(ticket, n_bytes)
    backlog.done(-1)
    assert backlog.n_bytes == 70
    backlog.done(1)
    assert backlog.n_bytes == 40
    backlog.done(5)
    assert backlog.n_bytes == 0


def test_a_unit_counts_with_what_it_takes_beside_its_rows() -> None:
    """14,000 commits of one row counted as 2 MB, and took 390."""
    backlog = Backlog(held_limit_bytes=100)
    for ticket in range(100):
        backlog.owe(ticket, 160)
    assert backlog.n_bytes == 100 * (UNIT_BYTES + 160)
    backlog.done(59)
    assert backlog.n_bytes == 40 * (UNIT_BYTES + 160)


def test_many_small_units_are_joined_and_count_with_less() -> None:
    backlog = Backlog(held_limit_bytes=100)
    n = 20_000
    for ticket in range(n):
        backlog.owe(ticket, 160)
    n_joined = n - SINGLE_UNITS
    assert backlog.n_bytes == n * 160 + SINGLE_UNITS * UNIT_BYTES + n_joined * JOINED_UNIT_BYTES


def test_what_takes_more_than_was_counted_counts_for_as_many_times_more() -> None:
    """A row of a thousand nulls is a thousand bytes as it is sent, and eight times that in Arrow."""
    backlog = rows_alone()
    for ticket in range(10):
        backlog.owe(ticket, 1000)
    backlog.measured(80_000)
    assert backlog.n_bytes == 80_000
    backlog.done(4)
    assert backlog.n_bytes == 40_000
    backlog.measured(1000)
    assert backlog.n_bytes == 5000, "what is on its way counts, too"
    backlog.done(9)
    backlog.measured(0)
    assert backlog.n_bytes == 0


def test_tickets_of_which_nothing_is_owed_count_nothing() -> None:
    backlog = rows_alone()
    owed = dict.fromkeys(range(0, 30000, 3), 10)
    for ticket, n_bytes in owed.items():
        backlog.owe(ticket, n_bytes)
        backlog.done(ticket - 3000)
        backlog.done(ticket - 5000)
        assert backlog.n_bytes == 10 * min(ticket // 3 + 1, 1000)
    assert len(backlog._owed) < 10_000, "what is done takes no memory"
    backlog.done(30_000)
    assert (backlog.n_bytes, len(backlog._owed)) == (0, 0)
