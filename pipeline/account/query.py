"""A query of the Python interface in Spark's own words: its progress, its status, and the events for its listeners.

The shapes are those of Spark's ``StreamingQueryProgress``, ``StreamingQueryStatus`` and ``StreamingQueryListener``, so
that what watches other streaming queries can watch this one. They are made of the last batches that the batch loop
notes anyway (``batches``): a batch is Spark's trigger. A query that nobody listens to pays nothing.

``QueryEvents`` decides what listeners are told. It keeps no queue: it remembers the number of the batch that was told
last, and looks at the batches that are still known. So listeners that are slow miss batches, and cost no memory.

Callers: ``actors.api.streaming_query`` and ``actors.api.listeners``. Rejected: to make the progress of a batch when
it is done, with the reader's and the sequencer's numbers. That would ask two actors for each batch.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.account.model import BatchPart
from xidstream.pipeline.errors import XidstreamError

IDLE_EVERY_S: Final = 10.0
"""How long a query is without a batch before its listeners hear that it is idle, and hear it again: Spark's
``spark.sql.streaming.noDataProgressEventInterval``."""
_NAMESPACE: Final = uuid.UUID("4f1d5a4e-7a0c-5d0e-9a57-1b7c1f0d2b6a")


@dataclass(frozen=True)
class QueryName:
    """``id`` is the same in all runs of one slot with one storage, ``run_id`` is this query's own. ``sink``: for
    people, without secrets."""

    id: str
    run_id: str
    name: str
    sink: str

    @classmethod
    def of(cls, slot: str, storage: str, sink: str) -> QueryName:
        """A name for a query that begins. The storage is to a slot what the checkpoint is to Spark's query."""
        return cls(str(uuid.uuid5(_NAMESPACE, f"{storage}\n{slot}")), str(uuid.uuid4()), slot, sink)


@dataclass(frozen=True)
class ListenerEvent:
    """For one method of a listener: its name, and the event as Spark's JSON has it."""

    method: str
    content: dict[str, Any]


def progress_of(query: QueryName, batch: BatchPart, before: BatchPart | None) -> dict[str, Any]:
    """A batch as Spark's progress. ``before``: the batch before it, or None where that is not known any more."""
    ms = round(batch.seconds * 1000)
    arriving = 0.0
    if before is not None:
        apart_s = (_begun_at(batch) - _begun_at(before)).total_seconds()
        arriving = batch.n_rows / apart_s if apart_s > 0 else 0.0
    handled = batch.n_rows / batch.seconds if batch.seconds > 0 else 0.0
    rates = {
        "numInputRows": batch.n_rows,
        "inputRowsPerSecond": round(arriving, 3),
        "processedRowsPerSecond": round(handled, 3),
    }
    metrics = {"numTransactions": str(batch.n_transactions), "numBytes": str(batch.n_bytes)}
    if batch.lag_ms is not None:
        metrics["lagMs"] = f"{batch.lag_ms:.3f}"
    source = {
        "description": f"xidstream[{query.name}]",
        "startOffset": None if before is None else before.last_commit_lsn,
        "endOffset": batch.last_commit_lsn,
        "latestOffset": None,
        **rates,
        "metrics": metrics,
    }
    return {
        "id": query.id,
        "runId": query.run_id,
        "name": query.name,
        "timestamp": _text(_begun_at(batch)),
        "batchId": batch.number,
        "batchDuration": ms,
        **rates,
        "durationMs": {"triggerExecution": ms},
        "stateOperators": [],
        "sources": [source],
        "sink": {"description": query.sink, "numOutputRows": batch.n_rows},
    }


def recent_progress(query: QueryName, batches: Sequence[BatchPart], most: int) -> list[dict[str, Any]]:
    """The progress of the last ``most`` of ``batches``, oldest first."""
    first = max(0, len(batches) - most)
    return [progress_of(query, batches[i], batches[i - 1] if i else None) for i in range(first, len(batches))]


def status_of(
    *,
    state: str,
    waiting_for: Sequence[str],
    is_in_hand: bool,
    is_caught_up: bool,
    last_error: str | None,
) -> dict[str, Any]:
    """Spark's status of a query that has not ended. ``state``: as in ``RunPart``. ``last_error``: what ended the last
    epoch."""
    is_reading = state == "reading"
    if state == "restarting":
        message = f"Starting again: {last_error}" if last_error else "Starting again"
    elif not is_reading:
        message = f"Starting: waiting for {' and '.join(waiting_for)}" if waiting_for else "Starting"
    elif is_in_hand:
        message = "Processing new data"
    elif is_caught_up:
        message = "Waiting for data to arrive"
    else:
        message = "Getting new data"
    return {
        "message": message,
        "isDataAvailable": is_reading and (is_in_hand or not is_caught_up),
        "isTriggerActive": is_reading and is_in_hand,
    }


def ended_status(error: BaseException | None) -> dict[str, Any]:
    """Spark's status of a query that has ended; ``error``: what ended it."""
    message = "Stopped" if error is None else f"Terminated with exception: {safe_text(error)}"
    return {"message": message, "isDataAvailable": False, "isTriggerActive": False}


def safe_text(error: BaseException) -> str:
    """An error for people. What is not ours may quote a row: then it is the class alone."""
    return error.message if isinstance(error, XidstreamError) else type(error).__name__


class QueryEvents:
    """The events of one query for its listeners. ``now_s``: a monotonic clock's. ``n_known``: how many batches there
    have been: the next one is the first that is told."""

    def __init__(self, query: QueryName, now_s: float, n_known: int = 0) -> None:
        self._query = query
        self._next = n_known
        self._quiet_since_s = now_s

    def started(self, at: datetime.datetime) -> ListenerEvent:
        return ListenerEvent(
            "onQueryStarted", {**self._ids, "name": self._query.name, "timestamp": _text(at)}
        )

    def look(
        self, now_s: float, at: datetime.datetime, batches: Sequence[BatchPart], is_idle: Callable[[], bool]
    ) -> list[ListenerEvent]:
        """The events since the last call. ``is_idle``: whether the query waits for data; it is asked at most every
        ``IDLE_EVERY_S``."""
        events = []
        for i, batch in enumerate(batches):
            if batch.number >= self._next:
                before = batches[i - 1] if i else None
                progress = progress_of(self._query, batch, before)
                events.append(ListenerEvent("onQueryProgress", {"progress": progress}))
                self._next = batch.number + 1
        if events:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= IDLE_EVERY_S:
            self._quiet_since_s = now_s
            if is_idle():
                events.append(ListenerEvent("onQueryIdle", {**self._ids, "timestamp": _text(at)}))
        return events

    def terminated(self, error: BaseException | None) -> ListenerEvent:
        return ListenerEvent(
            "onQueryTerminated",
            {
                **self._ids,
                "exception": None if error is None else safe_text(error),
                "errorClassOnException": None if error is None else type(error).__name__,
            },
        )

    @property
    def _ids(self) -> dict[str, Any]:
        return {"id": self._query.id, "runId": self._query.run_id}


def _begun_at(batch: BatchPart) -> datetime.datetime:
    return batch.done_at - datetime.timedelta(seconds=batch.seconds)


def _text(at: datetime.datetime) -> str:
    """A time as Spark writes it: ISO 8601, UTC, with milliseconds."""
    return at.astimezone(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
