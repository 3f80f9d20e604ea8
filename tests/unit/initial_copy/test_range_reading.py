"""The pace of a snapshot's reader, without a server or a clock. tests/postgres/test_snapshot_ranges.py has the rest."""

from __future__ import annotations

import pytest

from xidstream.pipeline.initial_copy.range_reading import ByteRateLimit


def test_without_a_limit_nobody_waits() -> None:
    pace = ByteRateLimit(0, 5.0)
    assert [pace.spent(1 << 40, 5.0) for _ in range(3)] == [0.0] * 3


def test_blocks_come_at_the_rate_however_long_each_took() -> None:
    pace, now_s = ByteRateLimit(1000, 100.0), 100.0
    for took_s in (0.5, 0.1, 0.9, 0.0, 0.9):
        now_s += took_s
        now_s += pace.spent(1000, now_s)
    assert now_s == pytest.approx(105.0)


def test_time_without_bytes_is_not_saved_up_for_a_burst() -> None:
    pace = ByteRateLimit(1000, 0.0)
    assert pace.spent(1000, 600.0) == 0.0
    assert pace.spent(1000, 600.0) == pytest.approx(1.0)
