"""Listeners of a query: they hear of it in order, and what they do or raise does not touch it."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming import StreamingQueryListener

from xidstream import ChangeStream
from xidstream.actors.api import listeners
from xidstream.actors.api.listeners import Listeners
from xidstream.pipeline.account.model import BatchPart
from xidstream.pipeline.account.query import QueryName
from xidstream.pipeline.errors import SlotLost, UsageError

QUERY = QueryName.of("shop", "/tmp/x", "console")
AT = datetime.datetime(2026, 11, 23, tzinfo=datetime.timezone.utc)


class Heard(StreamingQueryListener):
    """What a user writes."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self.events.append(("started", event.name))

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self.events.append(("progress", event.progress.batchId))

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self.events.append(("terminated", event.exception, event.errorClassOnException))


class Raises(Heard):
    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        super().onQueryProgress(event)
        raise ValueError("geheim")


class Query:
    """Batches as the test has them done."""

    def __init__(self, *first: Any) -> None:
        self.batches: tuple[BatchPart, ...] = ()
        self.listeners = Listeners(QUERY, lambda: self.batches, bool, first)

    def done(self) -> None:
        number = len(self.batches)
        self.batches = (*self.batches, BatchPart(AT, 0.5, 1, 10, 100, "0/10", number, 1.0))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_listener_hears_start_batches_and_end_in_order() -> None:
    heard = Heard()
    query = Query(heard)
    query.done()
    query.done()
    query.listeners.end(SlotLost("the slot is gone"))
    assert heard.events == [
        ("started", "shop"),
        ("progress", 0),
        ("progress", 1),
        ("terminated", "the slot is gone", "SlotLost"),
    ]


def test_a_look_that_fails_is_logged_and_the_listener_still_hears_of_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> tuple[BatchPart, ...]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("defect")
        return ()

    heard = Heard()
    Listeners(QUERY, fails, bool, [heard]).end(None)
    assert heard.events == [("started", "shop"), ("terminated", None, None)]
    assert "miss an event" in caplog.text


def test_one_that_comes_later_hears_the_rest_and_one_that_is_removed_nothing_more() -> None:
    first, later = Heard(), Heard()
    query = Query()
    query.done()
    query.listeners.add(first)
    query.done()
    until(lambda: ("progress", 1) in first.events)
    query.listeners.add(later)
    query.listeners.remove(first)
    query.done()
    query.listeners.end(None)
    assert first.events == [("progress", 1)]
    assert later.events == [("progress", 2), ("terminated", None, None)]


def test_what_a_listener_raises_is_told_once_without_its_text_and_the_others_hear_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raises, heard = Raises(), Heard()
    query = Query(raises, heard)
    for _ in range(3):
        query.done()
    query.listeners.end(None)
    assert raises.events == heard.events
    assert [event[0] for event in heard.events] == ["started", *3 * ["progress"], "terminated"]
    (record,) = caplog.records
    message = record.getMessage()
    assert "raised ValueError in Raises.onQueryProgress" in message and "test_listeners.py:" in message
    assert "geheim" not in caplog.text


def test_a_listener_that_never_returns_does_not_keep_the_query_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "LAST_WORDS_S", 0.1)
    release = threading.Event()

    class Hangs(Heard):
        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            release.wait(60)
            super().onQueryProgress(event)

    hangs = Hangs()
    query = Query(hangs)
    query.done()
    query.listeners.end(None)
    assert hangs.events in ([], [("started", "shop")])
    release.set()
    until(lambda: ("terminated", None, None) in hangs.events)


def test_what_has_no_listeners_methods_is_refused_at_once() -> None:
    with pytest.raises(
        UsageError, match="a list is no listener: it has no onQueryStarted and no onQueryProgress"
    ):
        Query().listeners.add([])
    settings = {"dsn": "dbname=shop", "slot": "shop", "publication": "shop", "storage": "/tmp/shop"}
    with pytest.raises(UsageError, match="a function is no listener"):
        ChangeStream(settings).addListener(until)


def test_a_stream_keeps_its_listeners_whatever_is_said_of_it_afterwards() -> None:
    settings = {"dsn": "dbname=shop", "slot": "shop", "publication": "shop", "storage": "/tmp/shop"}
    heard = Heard()
    stream = ChangeStream(settings)
    listened = stream.addListener(heard).foreachBatch(print).trigger(availableNow=True)
    assert listened._listeners == (heard,) and stream._listeners == ()
