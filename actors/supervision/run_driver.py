"""The run's one Spark driver: made, replaced when it is lost, and closed at the end.

It outlives epochs, because a session takes many seconds to start. Two batch loops never run at once: ``ensure`` returns
only when the last loop has ended, or its driver was ended by force.

The next epoch takes the slot after that. Rejected: to read on while the last loop's batch still hangs. Nothing can be
confirmed before the storage is taken over, and the take-over removes segments of the ended epoch, which that batch may
still read.

The supervisor's thread makes, replaces and closes it. Other threads ask for its progress and its output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import ray

from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import StopRequested
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost, XidstreamError
from xidstream.pipeline.events import Event

_END_S = 15.0


class RunDriver:
    """``make`` makes a driver. ``stop`` is the run's event, and ``notify`` tells people."""

    def __init__(
        self, make: Callable[[], Driver], stop: threading.Event, notify: Callable[[str], None]
    ) -> None:
        self._make = make
        self._stop = stop
        self._notify = notify
        self._driver: Driver | None = None
        self._last_output: list[str] = []
        self.starting: ray.ObjectRef | None = None
        """Done when the session is ready; None when it is, or where there is no driver."""

    @property
    def ready(self) -> Driver | None:
        """The driver whose session is ready."""
        return None if self.starting is not None else self._driver

    def ensure(self) -> Driver:
        """A driver with a living session and no running loop. The session may still be starting."""
        driver = self._driver
        is_announced = False
        while driver is not None and not driver.end(_END_S):
            if driver.replaceable:
                break
            if self._stop.is_set():
                raise StopRequested
            if not is_announced:
                is_announced = True
                self._notify(Event("waiting", "waiting for the batch in hand to end before starting again"))
        if driver is not None and driver.end(0) and driver.is_alive():
            return driver
        if driver is not None:
            if not driver.replaceable:
                raise ComponentLost("the Spark session of this process has ended")
            self._driver = None
            driver.close()
        driver = self._make()
        self.starting = driver.start()
        self._driver = driver
        return driver

    def is_alive(self) -> bool:
        return self._driver is not None and self._driver.is_alive()

    def progress(self) -> SinkReport:
        driver = self.ready
        try:
            return SinkReport() if driver is None else driver.progress()
        except XidstreamError:
            return SinkReport()

    def take_output(self) -> list[str]:
        """The lines that the sink printed since the last call."""
        before, self._last_output = self._last_output, []
        driver = self.ready
        try:
            return before if driver is None else before + driver.take_output()
        except XidstreamError:
            return before

    def close(self) -> None:
        driver = self._driver
        if driver is not None:
            self._last_output = self.take_output()
            self._driver = None
            driver.close()
