"""A query in Spark's words: the progress of batches, the status, and what listeners are told, and when."""

from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pytest
from pyspark.sql.streaming.listener import StreamingQueryProgress

from xidstream.pipeline.account.batches import BatchHistory
from xidstream.pipeline.account.model import BatchPart
from xidstream.pipeline.account.query import (
    IDLE_EVERY_S,
    ListenerEvent,
    QueryEvents,
    QueryName,
    ended_status,
    progress_of,
    recent_progress,
    status_of,
)
from xidstream.pipeline.errors import SlotLost

QUERY = QueryName.of("shop", "s3://bucket/xidstream", "delta:s3://bucket/tables")
AT = datetime.datetime(2026, 11, 23, 1, 2, 3, 4000, tzinfo=datetime.timezone.utc)


def batch(number: int, n_rows: int = 100, lag_ms: float | None = 12.5) -> BatchPart:
    """It ends ``number`` seconds after ``AT``, and has taken half a second."""
    done_at = AT + datetime.timedelta(seconds=number)
    return BatchPart(done_at, 0.5, 3, n_rows, 4096, f"0/{number + 1:X}0", number, lag_ms)


def test_the_id_is_the_slots_and_the_run_id_each_querys_own() -> None:
    again = QueryName.of("shop", "s3://bucket/xidstream", "console")
    assert again.id == QUERY.id and again.run_id != QUERY.run_id
    assert QueryName.of("shop", "s3://other", "console").id != QUERY.id


def test_a_batch_is_read_by_pysparks_own_progress() -> None:
    content = progress_of(QUERY, batch(1), batch(0))
    progress = StreamingQueryProgress.fromJson(json.loads(json.dumps(content)))
    assert (str(progress.id), str(progress.runId), progress.name) == (QUERY.id, QUERY.run_id, "shop")
    assert progress.timestamp == "2026-11-23T01:02:03.504Z", "when the batch began"
    assert (progress.batchId, progress.batchDuration, progress.durationMs) == (
        1,
        500,
        {"triggerExecution": 500},
    )
    assert (progress.numInputRows, progress.inputRowsPerSecond, progress.processedRowsPerSecond) == (
        100,
        100.0,
        200.0,
    )
    (source,) = progress.sources
    assert (source.startOffset, source.endOffset) == ("0/10", "0/20")
    assert source.metrics == {"numTransactions": "3", "numBytes": "4096", "lagMs": "12.500"}
    assert (progress.sink.description, progress.sink.numOutputRows) == ("delta:s3://bucket/tables", 100)


def test_without_a_batch_before_it_no_rate_of_arrival_and_no_start_are_made_up() -> None:
    content = progress_of(QUERY, batch(0, lag_ms=None), None)
    assert content["inputRowsPerSecond"] == 0.0 and content["sources"][0]["startOffset"] is None
    assert "lagMs" not in content["sources"][0]["metrics"]


def test_recent_progress_is_bounded_and_of_the_last_batches_in_order() -> None:
    history = BatchHistory(n_kept=5)
    for number in range(8):
        history.begin(float(number), 1, number, 10)
        history.done(number + 0.5, 1_000_000 * number, "0/10", np.array([1_000_000 * number - 2_500]))
    recent = recent_progress(QUERY, history.batches, 3)
    assert [progress["batchId"] for progress in recent] == [5, 6, 7]
    assert recent[0]["sources"][0]["metrics"]["lagMs"] == "2.500"
    assert recent[0]["inputRowsPerSecond"] == 5.0, "the batch before the first one is known"
    assert len(recent_progress(QUERY, history.batches, 100)) == 5


@pytest.mark.parametrize(
    ("known", "message", "is_available", "is_active"),
    [
        ({"state": "starting"}, "Starting", False, False),
        (
            {"state": "starting", "waiting_for": ("the slot reader", "the storage")},
            "Starting: waiting for the slot reader and the storage",
            False,
            False,
        ),
        ({"is_caught_up": True}, "Waiting for data to arrive", False, False),
        ({}, "Getting new data", True, False),
        ({"is_in_hand": True}, "Processing new data", True, True),
        # A batch of the last epoch may still be in hand: it is not this epoch's.
        (
            {"state": "restarting", "is_in_hand": True, "last_error": "the storage is full"},
            "Starting again: the storage is full",
            False,
            False,
        ),
    ],
)
def test_the_status_says_what_the_query_does(
    known: dict[str, Any], message: str, is_available: bool, is_active: bool
) -> None:
    reading: dict[str, Any] = {
        "state": "reading",
        "waiting_for": (),
        "is_in_hand": False,
        "is_caught_up": False,
        "last_error": None,
    }
    assert status_of(**{**reading, **known}) == {
        "message": message,
        "isDataAvailable": is_available,
        "isTriggerActive": is_active,
    }


def test_the_status_after_the_end_says_why_and_quotes_no_row() -> None:
    assert ended_status(None)["message"] == "Stopped"
    assert (
        ended_status(SlotLost("the slot is gone"))["message"] == "Terminated with exception: the slot is gone"
    )
    assert ended_status(ValueError("geheim"))["message"] == "Terminated with exception: ValueError"


def told(events: list[ListenerEvent]) -> list[int | str]:
    """Of a progress its batch, of all else the method."""
    return [e.content["progress"]["batchId"] if "progress" in e.content else e.method for e in events]


def test_each_batch_is_told_once_and_those_before_the_first_listener_are_not() -> None:
    events = QueryEvents(QUERY, 0.0, n_known=2)
    batches = [batch(0), batch(1), batch(2)]
    assert told(events.look(1.0, AT, batches, bool)) == [2]
    assert told(events.look(2.0, AT, batches, bool)) == []
    assert told(events.look(3.0, AT, [*batches, batch(3), batch(4)], bool)) == [3, 4]


def test_batches_that_fell_out_of_the_history_are_missed_and_no_more() -> None:
    events = QueryEvents(QUERY, 0.0)
    assert told(events.look(1.0, AT, [batch(0)], bool)) == [0]
    assert told(events.look(2.0, AT, [batch(7), batch(8)], bool)) == [7, 8]


def test_a_query_that_waits_for_data_is_idle_each_ten_seconds_and_one_that_works_is_not() -> None:
    events, asked = QueryEvents(QUERY, 0.0), []

    def is_idle() -> bool:
        asked.append(True)
        return len(asked) > 1

    for tenth in range(int(10 * IDLE_EVERY_S)):
        assert events.look(tenth / 10, AT, [], is_idle) == []
    assert not asked, "asking costs calls of actors"
    assert told(events.look(IDLE_EVERY_S, AT, [], is_idle)) == [], "it has work"
    assert told(events.look(2 * IDLE_EVERY_S, AT, [], is_idle)) == ["onQueryIdle"]
    assert told(events.look(2 * IDLE_EVERY_S + 1, AT, [batch(0)], is_idle)) == [0]
    assert told(events.look(3 * IDLE_EVERY_S, AT, [batch(0)], is_idle)) == []
    assert len(asked) == 2
