"""Who holds the Spark session: an actor of its own, or the user's process.

From the command line it is an actor, because a JVM that died cannot be started again in the same process: a new
actor can, without ending the run. A PySpark script has its session in its own process and uses
``InProcessDriver``; the supervisor sees the same calls (``Driver``).

Several slots of one run share the actor and its session, each with a batch loop of its own on a thread of its own;
``actors.shared_session`` says who starts and ends it. Their Spark jobs are told apart by job groups.

What the sink prints (``console``, or a user's function) is taken from the actor's standard output line by line and
fetched by the command line, so that it appears there without Ray's prefixes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import io
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import ray
from py4j.protocol import Py4JError

from actors.batch_loop import STALLED_AFTER_S, BatchLoop, LoopProgress
from actors.faults import unwrap
from actors.spark_master import SparkMaster
from pipeline.config import Config
from pipeline.errors import ComponentLost, SinkFailed
from pipeline.handoff import SlotIdentity
from pipeline.spark.sink import Sink, make_sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_LINES = 10_000
_ANSWER_S = 10.0
_END_S = 15.0
_CANCEL_INTERVAL_S = 0.5
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


class _Lines(io.TextIOBase):
    """A standard output that keeps whole lines for whoever asks; threads do not break into each other's."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            thread = threading.get_ident()
            *whole, self._parts[thread] = (self._parts.get(thread, "") + text).split("\n")
            self._lines.extend(whole)
        return len(text)

    def take(self) -> list[str]:
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines


class SparkDriver:
    """The actor, of one slot or several. ``run`` blocks one thread for each; the others answer."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self._configs = configs
        self._loops: dict[str, BatchLoop] = {}
        self._names: dict[str, str] = {}
        self._lines = _Lines()

    def start(self) -> None:
        from actors.sessions import start_spark

        slot, config = next(iter(self._configs.items()))
        name = f"xidstream-{slot}"
        self._spark = start_spark(config, name)
        self._master = SparkMaster(name)
        # For good: it is the process's, and several loops may end and begin at any time.
        sys.stdout = self._lines

    def run(self, slot: str, name: str, sequencer: Any, identity: SlotIdentity) -> None:
        """``name`` is the loop's alone, and that of its Spark jobs' group."""
        config = self._configs[slot]
        self._spark.sparkContext.setJobGroup(name, f"slot {slot}")
        loop = BatchLoop(
            self._spark, make_sink(config.sink, identity), sequencer, config.storage, self.progress(slot)
        )
        # In this order: what ends the loop before must never find this one under the old name.
        self._names[slot] = name
        self._loops[slot] = loop
        loop.run()

    def end(self, slot: str, name: str) -> None:
        """End this loop and no later one: a call may be slow, and the next epoch's loop be there already."""
        if self._names.get(slot) == name and slot in self._loops:
            self._loops[slot].stop()
            with contextlib.suppress(Py4JError, OSError):  # a lost JVM, and its jobs with it
                self._spark.sparkContext.cancelJobGroup(name)

    def is_alive(self) -> bool:
        """Raises what Py4J raises when the JVM is gone."""
        return not self._master.is_lost() and not self._spark.sparkContext._jsc.sc().isStopped()

    def trouble(self, slot: str) -> str | None:
        """Why the batch in hand will never end, where that is known."""
        return _trouble(self._master, self._loops.get(slot))

    def progress(self, slot: str) -> LoopProgress:
        return self._loops[slot].progress if slot in self._loops else LoopProgress()

    def take_output(self) -> list[str]:
        """Of all slots."""
        return self._lines.take()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        from actors.sessions import stop_spark

        stop_spark()


class ActorDriver:
    """The supervisor's handle on one slot's loop in a SparkDriver actor.

    ``is_shared`` tells whether other slots use the actor; ``leave(healthy)`` is called by ``close``: whether it is
    still of use to them.
    """

    replaceable = True

    def __init__(
        self,
        actor: Any,
        started: ray.ObjectRef,
        slot: str,
        is_shared: Callable[[], bool],
        leave: Callable[[bool], None],
    ) -> None:
        self._actor = actor
        self._started = started
        self._slot = slot
        self._is_shared = is_shared
        self._leave = leave
        self._name = ""
        self._running: ray.ObjectRef | None = None
        self._watch: ray.ObjectRef | None = None
        self._lost = False

    def start(self) -> ray.ObjectRef | None:
        return self._started

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        self._name = f"{self._slot}-{secrets.token_hex(4)}"
        self._running = self._actor.run.remote(self._slot, self._name, sequencer, identity)

    def result(self, timeout_s: float) -> bool:
        assert self._running is not None
        done, _ = ray.wait([self._running], timeout=timeout_s)
        if done:
            self._get(self._running, None)
            return True
        if self._watch is None:
            self._watch = self._actor.trouble.remote(self._slot)
        elif ray.wait([self._watch], timeout=0)[0]:
            watch, self._watch = self._watch, None
            trouble = self._get(watch, None)
            if trouble is not None:
                self._lost = True
                raise ComponentLost(trouble)
        return False

    def end(self, timeout_s: float) -> bool:
        if self._running is None:
            return True
        if self._lost:
            # Its job waits for ever: only the end of the process ends it.
            ray.kill(self._actor)
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._lost:
                # Again and again: a table whose turn comes only now starts a job after the others were cancelled.
                self._actor.end.remote(self._slot, self._name)
            left_s = deadline - time.monotonic()
            if ray.wait([self._running], timeout=max(0.0, min(left_s, _CANCEL_INTERVAL_S)))[0]:
                return True
            if left_s <= 0:
                return False

    def is_alive(self) -> bool:
        if not ray.wait([self._started], timeout=0)[0]:
            return True
        try:
            return not self._lost and bool(ray.get(self._actor.is_alive.remote(), timeout=_ANSWER_S))
        except Exception:  # noqa: BLE001 - whatever it says, it is not alive
            return False

    def progress(self) -> LoopProgress:
        progress: LoopProgress = self._get(self._actor.progress.remote(self._slot), _ANSWER_S)
        return progress

    def take_output(self) -> list[str]:
        return list(self._get(self._actor.take_output.remote(), _ANSWER_S))

    def pid(self) -> int:
        return int(self._get(self._actor.pid.remote(), _ANSWER_S))

    def close(self) -> None:
        # An actor that nobody else uses ends anyway; else the loop is given the time to end by itself.
        ended = self.end(_END_S if self._is_shared() else 0)
        self._leave(ended and self.is_alive())

    def _get(self, ref: ray.ObjectRef, timeout_s: float | None) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ComponentLost("the Spark driver does not answer") from None
        except Exception as error:
            raise unwrap(error, "Spark driver") from error


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
            if (trouble := _trouble(self._master, self._loop)) is not None:
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


def _trouble(master: SparkMaster, loop: BatchLoop | None) -> str | None:
    if master.is_lost():
        return _MASTER_LOST
    return _STALLED if loop is not None and loop.is_stalled() else None
