"""The pipeline that the demo shows: a supervisor on a thread of its own, and a view of its state while it works.

The demo's main thread writes to PostgreSQL and waits until rows arrive. Every wait gives up after ``_TIMEOUT_S``. If
the supervisor has failed, the wait raises its error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from xidstream.actors.demo.watched_delta import Arrival, WatchedDelta
from xidstream.actors.supervision.drivers import InProcessDriver
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account.model import OpenPart
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.settings.config import Config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIMEOUT_S = 120


class LiveStream:
    """Runs from ``__enter__``, which returns when the slot is open and the sink is made, until ``__exit__``."""

    def __init__(
        self, config: Config, spark: SparkSession, delta_uri: str, notify: Callable[[str], None]
    ) -> None:
        self._delta_uri = delta_uri
        self._sinks: list[WatchedDelta] = []
        self._failure: BaseException | None = None
        driver = InProcessDriver(spark, config.storage, self._make_sink)
        self._supervisor = Supervisor(config, lambda: driver, notify=notify)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveStream:
        self._thread.start()
        try:
            self.wait_until(lambda: self._supervisor.status().opened is not None and bool(self._sinks))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    # -- the state ---------------------------------------------------------------------------------------

    @property
    def arrivals(self) -> list[Arrival]:
        """The batches that are in Delta, in commit order."""
        return self._sinks[0].arrivals

    @property
    def n_rows_delivered(self) -> int:
        return sum(arrival.n_rows for arrival in self.arrivals)

    def open_transactions(self) -> tuple[OpenPart, ...]:
        """The largest transactions that are open in the buffers."""
        return self._supervisor.status().account.open

    def n_open_rows(self) -> int:
        """How many rows of open transactions are decoded."""
        reader = self._supervisor.status().account.reader
        return 0 if reader is None else reader.n_open_rows

    # -- waiting -----------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not condition():
            self._raise_failure()
            if time.monotonic() > deadline_s:
                raise XidstreamError("the demo made no progress: `xidstream --debug demo` shows more")
            time.sleep(0.02)

    def wait_until_steady(self, show: Callable[[int], None]) -> None:
        """Until rows of open transactions are there and have not become more for a second; shows their number."""
        last, since_s = -1, time.monotonic()
        deadline_s = since_s + _TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._raise_failure()
            n_rows = self.n_open_rows()
            show(n_rows)
            if n_rows != last:
                last, since_s = n_rows, time.monotonic()
            elif n_rows and time.monotonic() - since_s > 1.0:
                return
            time.sleep(0.1)
        raise XidstreamError("the demo's rows did not arrive in time")

    # -- inside ------------------------------------------------------------------------------------------

    def _make_sink(self, identity: SlotIdentity) -> WatchedDelta:
        self._sinks.append(WatchedDelta(self._delta_uri, identity))
        return self._sinks[-1]

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        self._supervisor.stop()
        self._thread.join(_TIMEOUT_S)
