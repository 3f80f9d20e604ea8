"""``Driver``: the supervisor's interface to the holder of the Spark session, and a driver in the user's own process.

The command line keeps its session in an actor (``ActorDriver``). A PySpark script keeps its session in its own process
(``InProcessDriver``).
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from xidstream.actors.driver.batch_loop import BatchLoop
from xidstream.actors.driver.session_kind import has_ray_executors
from xidstream.actors.driver.spark_master import SparkMaster
from xidstream.actors.driver.trouble import trouble_of
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.account import BatchHistory
from xidstream.pipeline.account.batches import MOST_BATCHES
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost, SinkFailed
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
from xidstream.pipeline.sinks.sink import Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_T = TypeVar("_T")


class Driver(Protocol):
    """The supervisor's interface to the holder of the Spark session.

    ``replaceable``: whether another driver can be made when this one is lost or does not end.
    """

    replaceable: bool

    def start(self) -> ray.ObjectRef | None:
        """Begin to start the session. The reference is done when the session is ready. None: it is ready already."""
        ...

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        """Start the loop for one epoch. The previous loop has ended."""
        ...

    def result(self, timeout_s: float) -> bool:
        """Whether the loop has ended. Raises the error that ended it, or ComponentLost if it makes no progress."""
        ...

    def end(self, timeout_s: float) -> bool:
        """Ask the loop to end, and wait. Returns whether no loop is running."""
        ...

    def is_alive(self) -> bool:
        """Whether the session can still work, or is still starting."""
        ...

    def on_snapshots(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        """``actors.snapshots.sink_tables.OnSink``: ``call`` gets the sink's. It may go to another process."""
        ...

    def progress(self) -> SinkReport:
        """The counts alone, which cost nothing."""
        ...

    def account(self) -> SinkReport | None:
        """For the run's account. Never waits long: None where there is no answer."""
        ...

    def take_output(self) -> list[str]: ...

    def close(self) -> None: ...


class InProcessDriver:
    """Runs the loop on a thread of the user's process, with the user's session. It never ends the session.

    ``history`` has the last batches of all its loops, ``n_recent`` of them or more.
    """

    replaceable = False

    def __init__(
        self,
        spark: SparkSession,
        storage_uri: str,
        make: Callable[[SlotIdentity], Sink],
        n_recent: int = MOST_BATCHES,
    ) -> None:
        self.history = BatchHistory(max(n_recent, MOST_BATCHES))
        self._spark = spark
        self._session = DriverSession.given(spark)
        self._storage_uri = storage_uri
        self._make = make
        self._loop: BatchLoop | None = None
        self._future: Future[None] | None = None
        self._master = SparkMaster(str(spark.sparkContext.appName))
        # Another cluster manager may let a job wait for executors as long as it likes, and tells when they are lost.
        self._can_stall = has_ray_executors(spark)

    def start(self) -> ray.ObjectRef | None:
        return None

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        loop = BatchLoop(
            LoopSession(self._session),
            self._make(identity),
            sequencer,
            self._storage_uri,
            identity,
            self.progress(),
            self.history,
        )
        future: Future[None] = Future()
        self._loop, self._future = loop, future

        def run() -> None:
            try:
                loop.run()
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="xidstream-batches", daemon=True).start()

    def result(self, timeout_s: float) -> bool:
        assert self._future is not None and self._loop is not None
        if not concurrent.futures.wait([self._future], timeout_s).done:
            if self._can_stall and (trouble := trouble_of(self._master, self._loop)) is not None:
                raise SinkFailed(
                    trouble, remedy="end the script: its Spark session cannot be repaired from inside"
                )
            return False
        self._future.result()
        return True

    def end(self, timeout_s: float) -> bool:
        if self._loop is None or self._future is None:
            return True
        self._loop.stop()
        return bool(concurrent.futures.wait([self._future], timeout_s).done)

    def is_alive(self) -> bool:
        try:
            return not self._spark.sparkContext._jsc.sc().isStopped()
        except Exception:  # noqa: BLE001 - Py4J raises some error if the JVM is gone
            return False

    def on_snapshots(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        if self._loop is None:
            raise ComponentLost("the Spark driver writes to no sink at the moment")
        return self._loop.on_snapshots(call, after_end=after_end)

    def progress(self) -> SinkReport:
        return self._loop.progress if self._loop is not None else SinkReport()

    def account(self) -> SinkReport | None:
        # The session is the user's, and its JVM is not asked: the user's thread may be in it.
        return None if self._loop is None else self._loop.sink_report(None)

    def take_output(self) -> list[str]:
        return []

    def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()
