"""The Spark session in an actor of its own, and the supervisor's handle on one slot's loop in it.

From the command line the session is an actor's, because a JVM that died cannot be started again in the same process: a
new actor can, without ending the run.

Several slots of one run share the actor and its session, each with a batch loop of its own on a thread of its own;
``actors.shared_session`` says who starts and ends it. Their Spark jobs are told apart by job groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from py4j.protocol import Py4JError

from xidstream.actors.batch_loop import BatchLoop, LoopProgress
from xidstream.actors.faults import unwrap
from xidstream.actors.printed_lines import PrintedLines
from xidstream.actors.spark_driver import trouble_of
from xidstream.actors.spark_master import SparkMaster
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.handoff import SlotIdentity
from xidstream.pipeline.spark.sink import make_sink

_ANSWER_S = 10.0
_END_S = 15.0
_CANCEL_INTERVAL_S = 0.5


class SparkDriver:
    """The actor, of one slot or several. ``run`` blocks one thread for each; the others answer."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self._configs = configs
        self._loops: dict[str, BatchLoop] = {}
        self._names: dict[str, str] = {}
        self._lines = PrintedLines()

    def start(self) -> None:
        from xidstream.actors.sessions import start_spark

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
        return trouble_of(self._master, self._loops.get(slot))

    def progress(self, slot: str) -> LoopProgress:
        return self._loops[slot].progress if slot in self._loops else LoopProgress()

    def take_output(self) -> list[str]:
        """Of all slots."""
        return self._lines.take()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        from xidstream.actors.sessions import stop_spark

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
