"""How fast snapshots are read, and how long that still takes."""

from __future__ import annotations

from xidstream.pipeline.account.snapshots import SnapshotProgress, TableProgress
from xidstream.pipeline.initial_copy.progress import ReadingRate


def rate_after(*samples: tuple[float, int]) -> float | None:
    rate = ReadingRate()
    for now_s, n_bytes in samples:
        rate.note(now_s, n_bytes)
    return rate.bytes_per_s


def test_the_rate_is_that_of_the_last_minute() -> None:
    assert rate_after((5.0, 100)) is None
    assert rate_after((0.0, 0), (1.0, 0), (10.0, 1000)) == 100.0
    fast_then_slow = [(float(s), 1000 * min(s, 100) + 10 * max(s - 100, 0)) for s in range(301)]
    assert rate_after(*fast_then_slow) == 10.0
    assert rate_after((0.0, 0), (1.0, 500), (400.0, 500), (470.0, 500)) == 0.0


def test_a_table_that_is_read_again_begins_the_rate_anew() -> None:
    assert rate_after((0.0, 0), (10.0, 5000), (11.0, 1000)) is None
    assert rate_after((0.0, 0), (10.0, 5000), (11.0, 1000), (21.0, 2000)) == 100.0


def test_time_left_is_known_while_something_is_read_and_something_is_left() -> None:
    table = TableProgress("public.t", "reading", 10, 4, 1000, 1000, 400, 0)
    assert SnapshotProgress((table,), 1, 5, 500, bytes_per_s=100.0).seconds_left == 6.0
    for rate in (None, 0.0):
        assert SnapshotProgress((table,), 1, 5, 500, bytes_per_s=rate).seconds_left is None
    assert SnapshotProgress((), 1, 5, 500, bytes_per_s=100.0).seconds_left is None
