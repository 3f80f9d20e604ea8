"""When gathered messages are cut: the clock is the test's."""

from __future__ import annotations

import pytest

from xidstream.pipeline.stream.linger import FLOOD_BYTES, FLOOD_LINGERS, Linger


@pytest.fixture
def linger() -> Linger:
    return Linger(linger_s=0.01, stream_linger_s=0.2)


def test_a_single_transaction_waits_once_for_company(linger: Linger) -> None:
    assert not linger.whole_is_due(100.0, 90, quiet=False)
    assert not linger.whole_is_due(100.009, 180, quiet=False)
    assert linger.whole_is_due(100.011, 270, quiet=False)
    assert not linger.whole_is_due(100.012, 90, quiet=False), "the next one waits anew"


def test_a_flood_waits_for_a_block_worth_its_price(linger: Linger) -> None:
    assert not linger.whole_is_due(100.0, 90, quiet=False)
    assert not linger.whole_is_due(100.011, FLOOD_BYTES, quiet=False)
    assert not linger.whole_is_due(100.09, 50 * FLOOD_BYTES, quiet=False)
    assert linger.whole_is_due(100.001 + 0.01 * FLOOD_LINGERS, 60 * FLOOD_BYTES, quiet=False)


def test_the_end_of_a_burst_waits_no_longer_than_a_single_transaction(linger: Linger) -> None:
    assert not linger.whole_is_due(100.0, 2 * FLOOD_BYTES, quiet=False)
    assert not linger.whole_is_due(100.005, 2 * FLOOD_BYTES, quiet=True)
    assert linger.whole_is_due(100.011, 2 * FLOOD_BYTES, quiet=True)


def test_behind_blocks_that_wait_to_be_sent_small_ones_wait_for_company(linger: Linger) -> None:
    assert not linger.whole_is_due(100.0, 90, quiet=False, cut_bytes=100, sent_bytes=50)
    assert not linger.whole_is_due(100.05, 180, quiet=True, cut_bytes=100, sent_bytes=99)
    assert linger.whole_is_due(100.051, 180, quiet=False, cut_bytes=100, sent_bytes=100), "the way is free"
    assert not linger.whole_is_due(100.06, 90, quiet=False, cut_bytes=200, sent_bytes=100)
    assert linger.whole_is_due(
        100.061 + 0.01 * FLOOD_LINGERS, 900, quiet=False, cut_bytes=200, sent_bytes=100
    )


def test_what_was_cut_later_holds_no_small_transaction_back(linger: Linger) -> None:
    """A giant's blocks, one after the other: the queue is never empty, and yet moves on."""
    assert not linger.whole_is_due(100.0, 90, quiet=False, cut_bytes=100, sent_bytes=0)
    assert not linger.whole_is_due(100.009, 90, quiet=False, cut_bytes=500, sent_bytes=100)
    assert linger.whole_is_due(100.011, 90, quiet=False, cut_bytes=900, sent_bytes=400)


def test_what_a_full_block_took_along_does_not_age_what_comes_after(linger: Linger) -> None:
    assert not linger.whole_is_due(100.0, 90, quiet=False)
    assert not linger.whole_is_due(100.005, 0, quiet=False)
    assert not linger.whole_is_due(100.012, 90, quiet=False)
    assert linger.whole_is_due(100.023, 90, quiet=False)


def test_without_a_linger_all_is_cut_at_once() -> None:
    linger = Linger(linger_s=0, stream_linger_s=0)
    assert linger.whole_is_due(100.0, 90, quiet=False)
    assert linger.whole_is_due(100.1, 90, quiet=False, cut_bytes=100, sent_bytes=0)
    assert linger.open_is_due(100.0, True)


def test_rows_of_an_open_transaction_wait_their_own_time(linger: Linger) -> None:
    assert not linger.open_is_due(100.0, True)
    assert not linger.open_is_due(100.19, True)
    assert linger.open_is_due(100.21, True)
    assert not linger.open_is_due(100.22, True)
    assert not linger.open_is_due(100.3, False)
    assert not linger.open_is_due(100.6, True)
