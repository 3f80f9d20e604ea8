"""How often a position is recorded that nothing has moved but the server."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from xidstream.pipeline.commits.confirming import Confirming
from xidstream.pipeline.commits.record_pace import LOG_INTERVAL_S, Moved, RecordPace
from xidstream.pipeline.pg import Lsn


def test_positions_alone_are_recorded_once_a_second_and_what_the_sink_did_at_once() -> None:
    """Five records a second of a quiet publication, each of them three requests, were 12 million of each a month."""
    pace, now_s, n_records = RecordPace(), 1000.0, 0
    for tick in range(600):
        now_s = 1000 + tick / 10
        if pace.due_in_s(now_s, Moved.POSITION) == 0:
            pace.recorded(now_s)
            n_records += 1
    assert n_records == 60
    assert pace.due_in_s(now_s, Moved.POSITION) > 0
    assert pace.due_in_s(now_s, Moved.NOW) == 0


def test_what_a_function_has_is_recorded_at_once_and_a_logs_trickle_some_times_a_second() -> None:
    function, log = RecordPace(), RecordPace(remembers=True)
    assert log.due_in_s(1000.0, Moved.SINK) == 0, "what comes alone does not wait"
    for pace in (function, log):
        pace.recorded(1000.0)
    assert function.due_in_s(1000.01, Moved.SINK) == 0
    assert log.due_in_s(1000.01, Moved.SINK) == pytest.approx(LOG_INTERVAL_S - 0.01)
    assert log.due_in_s(1000.0 + LOG_INTERVAL_S, Moved.SINK) == 0
    assert log.due_in_s(1000.01, Moved.NOW) == 0
    assert function.due_in_s(1000.01, Moved.LITTLE) == 0
    assert log.due_in_s(1000.01, Moved.LITTLE) == log.due_in_s(1000.01, Moved.POSITION) > LOG_INTERVAL_S


def test_what_a_log_took_is_little_until_its_memory_may_be_waited_for() -> None:
    """Between two records ``press`` adds up what batches took."""
    version = SimpleNamespace(version=0)
    order: Any = SimpleNamespace(
        confirmed_lsn=Lsn(0),
        delivered_lsn=Lsn(0),
        done_ticket=-1,
        free_ticket=-1,
        journal=version,
        parking=version,
    )
    nothing: Any = None
    confirming = Confirming(
        order,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
        lambda n, name: nothing,
        sink_remembers=True,
        little_bytes=100,
    )
    assert confirming._due_in_s() is None
    confirming._pace.recorded(time.monotonic())
    order.done_ticket = 3
    confirming.press(60)
    due_in_s = confirming._due_in_s()
    assert due_in_s is not None and due_in_s > LOG_INTERVAL_S
    confirming.press(60)
    due_in_s = confirming._due_in_s()
    assert due_in_s is not None and due_in_s <= LOG_INTERVAL_S
