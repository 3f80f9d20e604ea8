"""A running query of the Python interface; its names are those of PySpark's ``StreamingQuery``.

It runs the supervisor on a thread. What it tells of the run is asked for when a script wants to know it:
``pipeline.account.query`` gives it Spark's shapes. Listeners have a thread of their own (``api.listeners``).

``ChangeStream.start`` makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from xidstream.actors.api.listeners import Listeners
from xidstream.actors.api.progress_json import journal_json, snapshots_json
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.actors.status.page import StatusPage
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account.batches import MOST_BATCHES, BatchHistory
from xidstream.pipeline.account.query import QueryName, ended_status, recent_progress, status_of

_POLL_S: Final = 0.25


class StreamingQuery:
    """A running query; the methods are Spark's."""

    def __init__(
        self,
        supervisor: Supervisor,
        name: QueryName | None = None,
        history: BatchHistory | None = None,
        n_recent: int = MOST_BATCHES,
        page: StatusPage | None = None,
        listeners: Iterable[Any] = (),
    ) -> None:
        self._supervisor = supervisor
        self._name = name or QueryName.of("", "", "")
        self._history = history or BatchHistory()
        self._n_recent = n_recent
        self._page = page
        self._exception: BaseException | None = None
        """What the run ended with; None while it runs, and where nothing failed."""
        self._ended = threading.Event()
        """Set when the run has ended and its exception is there."""
        self._listeners = Listeners(
            self._name,
            lambda: self._history.batches,
            lambda: self._supervisor.status().run.is_caught_up,
            listeners,
        )
        self._thread = threading.Thread(target=self._run, name="xidstream-query", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "active" if self.isActive else "failed" if self._exception is not None else "ended"
        sink = self._supervisor.status().sink
        return (
            f"StreamingQuery(slot {self._name.name!r}, {state}, {sink.n_transactions:,} transactions and "
            f"{sink.n_rows:,} rows up to {sink.last_commit_lsn or '0/0'})"
        )

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether it still runs."""
        return not self._ended.is_set()

    @property
    def id(self) -> str:
        """An id that all queries share on one slot with one storage, as Spark's is for one checkpoint."""
        return self._name.id

    @property
    def runId(self) -> str:  # noqa: N802
        """This query's own."""
        return self._name.run_id

    @property
    def name(self) -> str:
        """The slot's name."""
        return self._name.name

    @property
    def status(self) -> dict[str, Any]:
        """``message``, for people; ``isDataAvailable``, whether committed rows are on their way to the sink;
        ``isTriggerActive``, whether the sink has a batch in hand."""
        if not self.isActive:
            return ended_status(self._exception)
        status = self._supervisor.status()
        run, error = status.run, status.account.last_error
        return status_of(
            state=run.state,
            waiting_for=run.waiting_for,
            is_in_hand=self._history.is_in_hand,
            is_caught_up=run.is_caught_up,
            last_error=None if error is None else error.message,
        )

    @property
    def recentProgress(self) -> list[dict[str, Any]]:  # noqa: N802
        """The last batches that the sink has, oldest first, each as Spark's progress of a trigger.

        ``batchId``, from 0 since the start; ``timestamp``, when it began; ``numInputRows``, ``inputRowsPerSecond``,
        ``processedRowsPerSecond``, ``durationMs``. Its one source has ``startOffset`` and ``endOffset``, commit LSNs,
        and as ``metrics`` ``numTransactions``, ``numBytes``, and ``lagMs`` from COMMIT of the last transaction until
        the sink had it. As many as ``spark.sql.streaming.numRecentProgressUpdates`` says, 100 by default.
        """
        return recent_progress(self._name, self._history.batches, self._n_recent)

    @property
    def lastProgress(self) -> dict[str, Any]:  # noqa: N802
        """Numbers for people and monitoring. LSNs are text, as PostgreSQL prints them.

        ``epoch``; ``batches``, ``transactions``, ``rows`` that the sink has had since the start; ``lastCommitLsn`` and
        ``lagMs`` of the last batch; ``caughtUp``, whether all transactions that the server has sent are in the
        sink, and confirmed; ``deliveredLsn``, up to which the sink has all; ``confirmedLsn``, up to which the server
        was told that all is durable, in the sink or in the journal; ``journal``: what lies between, with ``files``,
        ``bytes``, ``transactions``, ``firstCommitLsn``, ``firstCommitTimestamp`` and ``isFull``, or None where there is
        nothing; ``preparedTransactions``;
        ``receivedBytes``; ``openTransactions`` and ``openRows`` that are streamed and not committed yet; ``paused``,
        whether reading waits for memory; ``waitingForSinkBytes`` and ``inFlightBytes``. ``snapshots``: ``tables`` in
        hand or waiting, each with ``table``, ``state``, ``ranges``, ``rangesRead``, ``rows``, ``bytes`` and
        ``bytesRead``; ``finished``, ``rows`` and ``bytesRead`` of this query; ``bytesPerS`` of the last minute and
        ``secondsLeft``; ``heldWalBytes`` that the server keeps for the slot meanwhile. What is not known at the moment
        is None. After the first batch it has all keys of the newest ``recentProgress`` as well.
        """
        status = self._supervisor.status()
        account, run, sink = status.account, status.run, status.sink
        sequencer, reader = account.sequencer, account.reader
        return {
            **(recent_progress(self._name, self._history.batches, 1) or [{}])[0],
            "snapshots": None if account.snapshots is None else snapshots_json(account.snapshots),
            "epoch": run.epoch,
            "batches": sink.n_batches,
            "transactions": sink.n_transactions,
            "rows": sink.n_rows,
            "lastCommitLsn": sink.last_commit_lsn or "0/0",
            "lagMs": sink.last_lag_ms,
            "caughtUp": run.is_caught_up,
            "deliveredLsn": sequencer.delivered_lsn if sequencer else None,
            "confirmedLsn": sequencer.confirmed_lsn if sequencer else None,
            "journal": journal_json(status),
            "preparedTransactions": sequencer.n_prepared if sequencer else None,
            "receivedBytes": reader.n_bytes if reader else None,
            "openTransactions": reader.n_open if reader else None,
            "openRows": reader.n_open_rows if reader else None,
            "paused": reader.paused_by is not None if reader else None,
            "waitingForSinkBytes": reader.backlog_bytes if reader else None,
            "inFlightBytes": reader.in_flight_bytes if reader else None,
        }

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802
        """Wait, at most ``timeout`` seconds; True when the query has ended. Raises what ended it."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        with waiting("waiting for the query to read its slot"):
            while self.isActive and self._supervisor.status().opened is None:
                left_s = _POLL_S if deadline_s is None else min(_POLL_S, deadline_s - time.monotonic())
                if left_s <= 0:
                    return False
                self._thread.join(left_s)
        self._thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if self.isActive:
            return False
        if self._exception is not None:
            raise self._exception
        return True

    def stop(self) -> None:
        """End it cleanly: the current batch is finished, and what else has committed goes to the journal. Returns when
        it has ended."""
        self._supervisor.stop()
        self._thread.join()

    def addListener(self, listener: Any) -> None:  # noqa: N802
        """Add a listener to this query, as ``ChangeStream.addListener`` does. It hears only what comes from now on, and
        no ``onQueryStarted``."""
        self._listeners.add(listener)

    def removeListener(self, listener: Any) -> None:  # noqa: N802
        """It hears nothing more."""
        self._listeners.remove(listener)

    def exception(self) -> BaseException | None:
        """What ended the query; None while it runs, and after an end without failure."""
        return self._exception

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            self._exception = error
        finally:
            self._ended.set()
            if self._page is not None:
                self._page.close()
            self._listeners.end(self._exception)
