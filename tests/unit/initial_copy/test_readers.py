"""How many readers of snapshots work at a time."""

from __future__ import annotations

import pytest

from xidstream.pipeline.initial_copy.readers import bytes_per_s_of_each, most_readers, readers_here


@pytest.mark.parametrize(
    ("setting", "own_cpus", "n"),
    [
        (None, None, 4),
        (None, 1, 2),
        (None, 2, 2),
        (None, 3, 3),
        (None, 16, 4),
        (1, 2, 1),
        (8, 2, 8),
        (8, None, 8),
    ],
)
def test_one_machine_has_no_more_readers_than_cpus_unless_the_setting_says_it(
    setting: int | None, own_cpus: int | None, n: int
) -> None:
    assert readers_here(setting, own_cpus) == n
    assert most_readers(setting) >= n


def test_a_limit_that_is_given_limits_however_many_readers_share_it() -> None:
    assert bytes_per_s_of_each(1 << 20, 4) == 256 << 10
    assert bytes_per_s_of_each(3, 4) == 1, "0 would be no limit at all"
    assert bytes_per_s_of_each(0, 4) == bytes_per_s_of_each(0, 0) == 0
