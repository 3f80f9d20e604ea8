"""Who holds the Spark session: what the supervisor needs of it, and the user's own process as one.

From the command line it is an actor (``actors.driver_actor``). A PySpark script has its session in its own process and
uses ``InProcessDriver``; the supervisor sees the same calls (``Driver``).
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import ray

from xidstream.actors.batch_loop import STALLED_AFTER_S, BatchLoop, LoopProgress
from xidstream.actors.spark_master import SparkMaster
from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.handoff import SlotIdentity
from xidstream.pipeline.spark.sink import Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STALLED = (
    f"a Spark job waited {STALLED_AFTER_S:.0f} s without a running task: RayDP's master or executors are lost"
)
_MASTER_LOST = "RayDP's master is lost: its Spark session can start no executor any more"


class Driver(Protocol):
    """What the supervisor needs of whoever holds the Spark session.

    ``replaceable``: whether another can be made when this one is lost or does not end.
    """

    replaceable: bool

    def start(self) -> ray.ObjectRef | None:
        """Begin to start the session; the reference is done when it is ready. None: it is."""
        ...

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        """Start the loop for one epoch; the one before has ended."""
        ...

    def result(self, timeout_s: float) -> bool:
        """Whether the loop has ended; raises what ended it, and ComponentLost for one that makes no progress."""
        ...

    def end(self, timeout_s: float) -> bool:
        """Ask the loop to end, and wait: whether none is running."""
        ...

    def is_alive(self) -> bool:
        """Whether the session can still work, or is still starting."""
        ...

    def progress(self) -> LoopProgress: ...

    def take_output(self) -> list[str]: ...

    def close(self) -> None: ...


class InProcessDriver:
    """The loop on a thread of the user's process, with the user's session; the session is never ended here."""

    replaceable = False

    def __init__(self, spark: SparkSession, storage_uri: str, make: Callable[[SlotIdentity], Sink]) -> None:
        self._spark = spark
        self._storage_uri = storage_uri
        self._make = make
        self._loop: BatchLoop | None = None
        self._future: Future[None] | None = None
        self._master = SparkMaster(str(spark.sparkContext.appName))

    def start(self) -> ray.ObjectRef | None:
        return None

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        loop = BatchLoop(self._spark, self._make(identity), sequencer, self._storage_uri, self.progress())
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
            if (trouble := trouble_of(self._master, self._loop)) is not None:
                raise SinkFailed(
                    trouble, remedy="end the script: its Spark session cannot be mended from inside"
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
        except Exception:  # noqa: BLE001 - Py4J's way of saying that the JVM is gone
            return False

    def progress(self) -> LoopProgress:
        return self._loop.progress if self._loop is not None else LoopProgress()

    def take_output(self) -> list[str]:
        return []

    def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()


def trouble_of(master: SparkMaster, loop: BatchLoop | None) -> str | None:
    """Why the batch in hand will never end, where that is known."""
    if master.is_lost():
        return _MASTER_LOST
    return _STALLED if loop is not None and loop.is_stalled() else None
