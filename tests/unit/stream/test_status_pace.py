"""What came, and whether the server is told now."""

from __future__ import annotations

from xidstream.pipeline.stream.status_pace import ANSWER_INTERVAL_S, StatusPace


def told(pace: StatusPace, now_s: float, *, taken: bool = True) -> bool:
    """As the reading thread does at each look."""
    if not pace.is_due(now_s):
        return False
    pace.sending()
    pace.sent(now_s, taken=taken)
    return True


def test_a_silent_link_has_a_status_at_once_and_then_in_each_interval() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    assert [s for s in range(26) if told(pace, float(s))] == [0, 10, 20]


def test_the_first_question_is_answered_at_once() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    assert told(pace, 0.0)
    pace.asked()
    assert told(pace, 1.0)


def test_a_server_that_asks_as_soon_as_it_is_answered_gets_ten_answers_a_second() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    n_answers = 0
    for millisecond in range(1000):
        pace.asked()
        n_answers += told(pace, millisecond / 1000)
    assert n_answers == round(1 / ANSWER_INTERVAL_S)


def test_a_question_that_was_put_off_is_answered_though_nothing_else_comes() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    assert told(pace, 0.0)
    pace.asked()
    assert not told(pace, ANSWER_INTERVAL_S / 2)
    assert told(pace, ANSWER_INTERVAL_S)
    assert not told(pace, 2 * ANSWER_INTERVAL_S)


def test_a_changed_position_is_told_at_once_however_lately_the_server_was_told() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    for millisecond in range(5):
        pace.changed()
        assert told(pace, millisecond / 1000)
    assert not told(pace, 0.006)


def test_a_position_that_changes_while_a_status_is_sent_is_told_with_the_next() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    pace.changed()
    pace.sending()
    pace.changed()
    pace.sent(0.0, taken=True)
    assert told(pace, 0.001)


def test_a_status_that_the_server_did_not_take_is_sent_at_the_next_look() -> None:
    pace = StatusPace(10.0, now_s=0.0)
    assert told(pace, 0.0, taken=False)
    assert told(pace, 0.002)
    assert not told(pace, 0.004)
