"""Rates and latencies of what flows by."""

from __future__ import annotations

import numpy as np
import pytest

from xidstream.pipeline.account import BatchHistory, BatchInHand, Window
from xidstream.pipeline.account.batches import MOST_BATCHES, MOST_LATENCIES, MOST_LATENCIES_OF_A_BATCH


def test_a_rate_is_that_of_the_last_seconds_and_unknown_before_the_second_sample() -> None:
    window = Window(10.0)
    assert window.per_s is None
    window.note(0.0, 0, 1000)
    assert window.per_s is None
    for second in range(1, 31):
        window.note(float(second), 100 * second if second <= 20 else 2000, 1000)
    assert window.per_s == (0.0, 0.0), "it was quiet for ten seconds"


def test_a_count_that_fell_is_counted_anew() -> None:
    window = Window(10.0)
    window.note(0.0, 500)
    window.note(1.0, 600)
    window.note(2.0, 10)
    assert window.per_s is None
    window.note(3.0, 30)
    assert window.per_s == (20.0,)


def test_the_last_batches_their_durations_and_the_one_in_hand() -> None:
    history = BatchHistory()
    assert history.in_hand(0.0) is None and history.batches == () and history.latency is None
    for i in range(MOST_BATCHES + 5):
        history.begin(float(i), 1, i, 10)
        assert history.in_hand(i + 0.25) == BatchInHand(0.25, 1, i, 10)
        history.done(i + 0.5, 1_000_000 * i, "0/10", np.array([1_000_000 * i - 2_000]))
    assert [batch.n_rows for batch in history.batches] == list(range(5, MOST_BATCHES + 5))
    assert {batch.seconds for batch in history.batches} == {0.5}
    assert history.latency is not None and history.latency.p50_ms == 2.0
    history.begin(100.0, 1, 1, 1)
    history.dropped()
    assert history.in_hand(101.0) is None and len(history.batches) == MOST_BATCHES


def test_percentiles_are_of_the_last_transactions_and_a_clock_that_is_behind_makes_no_negative_latency() -> (
    None
):
    history = BatchHistory()
    now_us = 10_000_000
    for _ in range(3 * MOST_LATENCIES // MOST_LATENCIES_OF_A_BATCH):
        history.begin(0.0, 1, 1, 1)
        latencies_us = np.linspace(1_000, 100_000, 2 * MOST_LATENCIES_OF_A_BATCH).astype(np.int64)
        history.done(0.0, now_us, "0/10", now_us - latencies_us)
    latency = history.latency
    assert latency is not None and latency.n_transactions == MOST_LATENCIES
    assert latency.p50_ms == pytest.approx(75.26, abs=0.2), "of a batch the last half is kept"
    history = BatchHistory()
    history.begin(0.0, 1, 1, 1)
    history.done(0.0, now_us, "0/10", np.array([now_us + 5_000]))
    assert history.latency is not None and history.latency.p50_ms == 0.0
