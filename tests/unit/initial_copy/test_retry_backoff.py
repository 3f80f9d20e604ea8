"""How long a table rests whose snapshot failed."""

from __future__ import annotations

from xidstream.pipeline.initial_copy.retry_backoff import RetryBackoff


def test_each_rest_is_twice_the_last_one_up_to_a_bound_until_the_table_is_taken() -> None:
    resting = RetryBackoff(first_s=1.0, longest_s=5.0)
    assert [resting.rest(7, now_s=0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    resting.forget(7)
    assert resting.rest(7, now_s=0.0) == 1.0


def test_a_table_is_woken_once_when_its_rest_is_over_and_not_when_it_was_taken_meanwhile() -> None:
    resting = RetryBackoff(first_s=1.0)
    resting.rest(7, now_s=10.0)
    resting.rest(8, now_s=10.5)
    assert resting.wake(10.9) == []
    assert resting.wake(11.0) == [7]
    assert resting.wake(11.0) == []
    resting.forget(8)
    assert resting.wake(99.0) == []
