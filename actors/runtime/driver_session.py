"""The Spark session of a process that runs batch loops: given, started with the process, or started when it is needed.

A sink of Delta tables hardly needs Spark. Segments get a name in the table, and small parts are written by the driver's
own process. So a run on one machine that writes to Delta has no JVM until something asks for the session: a part that
is too large for the driver, segments that do not fit the table, a repair. Whoever asks waits for it, some seconds.
``spark_driver`` says who has it from the start.

A session that did not start is not tried again in this process, because PySpark keeps what a failed start has left.
Whoever asks gets the same error, and the supervisor makes another driver (``supervision.run_driver``).

Rejected: to end the session after a while without a job. PySpark, Ray's Java library and the loops' threads each hold
a JVM that was started once; the process would have to be replaced, in the middle of its batches.

``DriverSession`` is the process's. Each batch loop has a ``LoopSession`` of it. Any thread may call them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class DriverSession:
    """``make`` starts the session. It is called once at the most, by the first thread that asks; others wait."""

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spark: SparkSession | None = None
        self._failure: Exception | None = None

    @classmethod
    def given(cls, spark: SparkSession) -> DriverSession:
        """One that is there already."""
        session = cls(lambda: spark)
        session.get()
        return session

    @property
    def started(self) -> SparkSession | None:
        """None before anybody has asked for it, and while it starts. Never waits."""
        return self._spark

    @property
    def has_failed(self) -> bool:
        """Whether it did not start, so that this process will have none."""
        return self._failure is not None

    def get(self) -> SparkSession:
        """Raises what ``make`` raises, also in later calls."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._spark is None:
                try:
                    self._spark = self._make()
                except Exception as error:
                    self._failure = error
                    raise
            return self._spark


class LoopSession:
    """One batch loop's. Its Spark jobs are of ``group``, whichever thread starts them, so that they can be cancelled
    together; None: of no group. ``about`` describes them in Spark's user interface."""

    def __init__(self, session: DriverSession, group: str | None = None, about: str = "") -> None:
        self._session = session
        self._group = group
        self._about = about
        self._thread = threading.local()

    @property
    def started(self) -> SparkSession | None:
        """The session, or None: see ``DriverSession.started``."""
        return self._session.started

    def get(self) -> SparkSession:
        """Raises as ``DriverSession.get``, and what Py4J raises where the JVM is gone."""
        spark = self._session.get()
        # Once a thread: a user's function may have a group of its own.
        if self._group is not None and not hasattr(self._thread, "is_grouped"):
            spark.sparkContext.setJobGroup(self._group, self._about)
            self._thread.is_grouped = True
        return spark

    def cancel_jobs(self) -> None:
        """Raises what Py4J raises where the JVM is gone."""
        if self.started is not None and self._group is not None:
            self.started.sparkContext.cancelJobGroup(self._group)
