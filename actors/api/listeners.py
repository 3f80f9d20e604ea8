"""Tells a query's listeners what happens: on a thread of their own, so that no listener is in the way of a batch.

A listener is what Spark's ``StreamingQueryListener`` is, or any object with its methods; it gets PySpark's own events.
``pipeline.account.query`` decides what is told. The thread looks at the last batches four times a second, from the
first listener on.

What a listener raises is logged, by its class and place, once for each of its methods: its message may quote a row.
The listener goes on to be called. At the end of the query the thread is waited for, ``LAST_WORDS_S`` at most, so that a
script that ends has told what it had to tell.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
)

from xidstream.pipeline.account.model import BatchPart
from xidstream.pipeline.account.query import ListenerEvent, QueryEvents, QueryName
from xidstream.pipeline.errors import UsageError

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.25
LAST_WORDS_S: Final = 5.0
_EVENTS: Final[dict[str, Any]] = {
    "onQueryStarted": QueryStartedEvent,
    "onQueryProgress": QueryProgressEvent,
    "onQueryIdle": QueryIdleEvent,
    "onQueryTerminated": QueryTerminatedEvent,
}
_OPTIONAL: Final = "onQueryIdle"  # Spark added it later, and calls it only where it is there


def check_listener(listener: Any) -> None:
    """Raises UsageError for what is no listener."""
    missing = [name for name in _EVENTS if name != _OPTIONAL and not callable(getattr(listener, name, None))]
    if missing:
        raise UsageError(
            f"a {type(listener).__name__} is no listener: it has no {' and no '.join(missing)}",
            remedy="derive its class from pyspark.sql.streaming.StreamingQueryListener",
        )


class Listeners:
    """The listeners of one query. ``first`` are there from the start, and hear that the query has started. ``batches``
    gives the last batches, and ``is_idle`` whether the query waits for data; both are called on the thread."""

    def __init__(
        self,
        query: QueryName,
        batches: Callable[[], Sequence[BatchPart]],
        is_idle: Callable[[], bool],
        first: Iterable[Any] = (),
    ) -> None:
        self._query = query
        self._batches = batches
        self._is_idle = is_idle
        self._lock = threading.Lock()
        """Guards ``_listeners`` and ``_thread``."""
        self._listeners = list(first)
        self._over = threading.Event()
        """Set when the query has ended: the thread then tells its last event."""
        self._error: BaseException | None = None
        """What the query ended with; None before, and where nothing failed."""
        self._logged: set[tuple[int, str]] = set()
        """The listener (its ``id``) and the method of each failure that was logged; the next is not."""
        self._thread: threading.Thread | None = None
        """Tells the listeners; begun with the first of them."""
        if self._listeners:
            self._begin(list(self._listeners))

    def add(self, listener: Any) -> None:
        """It hears of what comes from now on. After the end of the query it hears nothing."""
        check_listener(listener)
        with self._lock:
            self._listeners.append(listener)
            if self._thread is None and not self._over.is_set():
                self._begin([])

    def remove(self, listener: Any) -> None:
        """A listener that is not there is no error, as with Spark."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def end(self, error: BaseException | None) -> None:
        """The query has ended, by ``error`` if it failed. Returns when the listeners know, or have taken too long."""
        with self._lock:
            self._error = error
            self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LAST_WORDS_S)

    def _begin(self, first: list[Any]) -> None:
        batches = self._batches()
        n_known = batches[-1].number + 1 if batches else 0
        events = QueryEvents(self._query, time.monotonic(), n_known)
        self._thread = threading.Thread(
            target=self._run, args=(events, first), name="xidstream-listeners", daemon=True
        )
        self._thread.start()

    def _run(self, events: QueryEvents, first: list[Any]) -> None:
        self._tell(events.started(_now()), first)
        while True:
            is_over = self._over.wait(_LOOK_EVERY_S)
            try:
                self._look(events)
            except Exception:
                log.exception("the listeners of the query on slot %s miss an event", self._query.name)
            if is_over:
                break
        self._tell(events.terminated(self._error))

    def _look(self, events: QueryEvents) -> None:
        for event in events.look(time.monotonic(), _now(), self._batches(), self._is_idle):
            self._tell(event)

    def _tell(self, event: ListenerEvent, listeners: Sequence[Any] | None = None) -> None:
        if listeners is None:
            with self._lock:
                listeners = list(self._listeners)
        for listener in listeners:
            method = getattr(listener, event.method, None)
            if method is None:
                continue
            try:
                method(_EVENTS[event.method].fromJson(event.content))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a listener must not end what it listens to
                self._note(listener, event.method, error)

    def _note(self, listener: Any, method: str, error: BaseException) -> None:
        if (id(listener), method) in self._logged:
            return
        self._logged.add((id(listener), method))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        log.warning(
            "a listener of the query on slot %s raised %s in %s.%s, at %s:%s; it is told once, and the query goes on",
            self._query.name,
            type(error).__name__,
            type(listener).__name__,
            method,
            frame.filename,
            frame.lineno,
        )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
