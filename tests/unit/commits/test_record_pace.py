"""How often a position is recorded that nothing has moved but the server."""

from __future__ import annotations

from xidstream.pipeline.commits.record_pace import RecordPace


def test_positions_alone_are_recorded_once_a_second_and_what_the_sink_did_at_once() -> None:
    """Five records a second of a quiet publication, each of them three requests, were 12 million of each a month."""
    pace, now_s, n_records = RecordPace(), 1000.0, 0
    for tick in range(600):
        now_s = 1000 + tick / 10
        if pace.due_in_s(now_s, is_position_alone=True) == 0:
            pace.recorded(now_s)
            n_records += 1
    assert n_records == 60
    assert pace.due_in_s(now_s, is_position_alone=True) > 0
    assert pace.due_in_s(now_s, is_position_alone=False) == 0
