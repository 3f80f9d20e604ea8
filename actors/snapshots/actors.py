"""The actors that a run's snapshots need: one holder and some readers, started when there is something to take.

A handle gives every caller the same living actor, and starts another in place of one that was lost. Each start lays the
password down once more (``runtime.secrets``). Used from several threads.

A reader is given a range only when its process runs. Ray keeps an actor that no node has CPUs for waiting, for ever,
and a range in its hands would hold up the whole table. So the readers that run read everything, and those that have no
process for long are told of (``missing_readers``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.runtime.secrets import ReaderSecrets, without_secrets
from xidstream.actors.snapshots.snapshot_holder import SnapshotHolder
from xidstream.actors.snapshots.snapshot_reader import SnapshotReader
from xidstream.pipeline.errors import ComponentLost, XidstreamError
from xidstream.pipeline.initial_copy.readers import HOLDER_CPUS, bytes_per_s_of_each, most_readers
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import RangeTask

HOLDER, READER = "snapshot holder", "snapshot reader"
_ANSWER_S = 2.0
_IDLE_S = 600.0
"""Nobody asks for more ranges at a time than there are readers. One waits where a reader is still busy with a range of
a table that was given up, where readers have no process yet, or where all readers were ended."""
LOADING_S = 5.0
"""The longest time that the first table waits for readers to load. Then those that run begin without the others."""
_POLL_S = 0.02
LATE_S = 30.0
"""A reader that has had no process for so long is reported. Starting one takes some seconds, on a busy machine ten."""


class SnapshotActors:
    """``config`` has its secrets. ``close`` ends all actors."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._holder: Any = None
        self._early: list[Any] = []
        """Readers that start, while it is not known yet for how many the server has room."""
        self._n_readers = 0
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        """Readers that run, and None for each that may be started. What was put last is taken first, so that no other
        reader is started as long as one is idle."""
        self._starting: dict[Any, float] = {}
        """Readers that have no process yet: since when (monotonic)."""
        self._all: list[tuple[Any, ReaderSecrets]] = []
        self._reading: dict[int, tuple[RangeTask, Any]] = {}
        """The range that each busy reader reads."""

    def hold(self, method: str, *arguments: Any) -> Any:
        """Call the holder. Raises ComponentLost where it died: its tables are lost, and the next call starts
        another."""
        return self._call_holder(self._living_holder(), method, *arguments)

    def _living_holder(self) -> Any:
        with self._lock:
            if self._holder is None:
                self._holder = self._start(
                    SnapshotHolder, HOLDER_CPUS, most_readers(self._config.snapshot_connections) + 4
                )
            return self._holder

    def release(self, *relids: int) -> None:
        """Let go of tables, if their holder lives. Raises ComponentLost."""
        holder = self._holder
        if holder is not None:
            self._call_holder(holder, "release", *relids)

    def waiting_for(self) -> list[str]:
        """For whom tables wait, in words; nothing where there is no holder, or it does not answer at once."""
        holder = self._holder
        if holder is None:
            return []
        try:
            waiting: list[str] = ray.get(holder.waiting_for.remote(), timeout=_ANSWER_S)
            return waiting
        except ray.exceptions.RayError:
            return []

    def _call_holder(self, holder: Any, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(holder, method).remote(*arguments))
        except Exception as error:
            fault = unwrap(error, HOLDER)
            if isinstance(fault, ComponentLost):
                with self._lock:
                    if self._holder is holder:
                        self._holder = None
            raise fault from error

    def start_readers(self, n_most: int, n_ranges: int) -> int:
        """Have as many as the server has room for, ``n_most`` at most. Returns how many.

        No more are started at once than there are ranges; the others when they are needed. They start beside the
        holder. This returns when all of them run, or after ``LOADING_S``. So no table is locked while they load, and
        none loads on the cores that another one reads with.
        """
        self._living_holder()  # its process first: the readers wait for it
        with self._lock:
            while len(self._early) < min(n_most, n_ranges):
                self._early.append(self._start(SnapshotReader, self._config.buffer_cpus, 2))
        # Each has a table's holder beside it.
        n_readers = max(1, int(self.hold("room_for", 2 * n_most)) // 2)
        with self._lock:
            readers, self._early = self._early, []
            for reader in readers[n_readers:]:
                self._end(reader)
            self._n_readers = n_readers
        for _ in range(n_readers - len(readers)):
            self._idle.put(None)
        for reader in readers[:n_readers]:
            self._await_process(reader)
        self._await_loaded()
        return n_readers

    def _await_loaded(self) -> None:
        """Wait until all that start run, for ``LOADING_S`` at most."""
        deadline_s = time.monotonic() + LOADING_S
        while self._starting and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def missing_readers(self) -> str | None:
        """In words: the readers that Ray has not started for ``LATE_S``. None where there are none."""
        now_s = time.monotonic()
        n_late = sum(now_s - since_s >= LATE_S for since_s in list(self._starting.values()))
        if not n_late:
            return None
        others = "the others read" if n_late < self._n_readers else "no table is read"
        has = "has" if n_late == 1 else "have"
        return (
            f"{n_late} of {self._n_readers} snapshot readers {has} no process yet, and {others} meanwhile: Ray needs "
            f"{self._config.buffer_cpus:g} free CPUs for each"
        )

    def cancel_reads(self, relid: int) -> None:
        """Have those stop that read for a table's snapshot, which is given up. It waits for none of them."""
        with self._lock:
            given_up = [each for each in self._reading.values() if each[0].source.relation.relid == relid]
        for task, reader in given_up:
            reader.cancel.remote(task.snapshot_name)

    def read(
        self, tasks: Sequence[RangeTask], bounds: SnapshotBounds, outputs: Sequence[SnapshotOutput]
    ) -> list[tuple[tuple[WrittenFile, ...], int] | XidstreamError]:
        """Have an idle reader read these ranges, which have one snapshot (``SnapshotReader.read``).

        Raises ComponentLost where it died: the next call starts another in its place. One range may be cancelled.
        Several are of small tables, and nobody cancels them: it takes no second."""
        alone = tasks[0] if len(tasks) == 1 else None
        reader = self._next_reader()
        try:
            if alone is not None:
                with self._lock:
                    self._reading[id(alone)] = (alone, reader)
            bytes_per_s = bytes_per_s_of_each(self._config.snapshot_bytes_per_s, self._n_readers)
            found: list[Any] = ray.get(reader.read.remote(tasks, bounds, outputs, bytes_per_s))
            return found
        except Exception as error:
            fault = unwrap(error, READER)
            if isinstance(fault, ComponentLost):
                reader = None
            raise fault from error
        finally:
            with self._lock:
                self._reading.pop(id(alone), None)  # of None there is none
            self._idle.put(reader)

    def _next_reader(self) -> Any:
        """One that runs and is idle, whichever is so first. Starts those that may be started."""
        try:
            while True:
                reader = self._idle.get(timeout=_IDLE_S)
                if reader is not None:
                    return reader
                with self._lock:
                    started = self._start(SnapshotReader, self._config.buffer_cpus, 2)
                self._await_process(started)
        except queue.Empty:
            missing = self.missing_readers()
            raise ComponentLost(missing or "the snapshot readers were ended") from None

    def _await_process(self, reader: Any) -> None:
        """Have the reader idle as soon as its process runs. One that fails then is idle, too: its next call tells."""

        def put(_: Any) -> None:
            # Without ``_lock``: this is Ray's thread, and whoever has the lock may wait for it, in ``ray.kill``.
            if self._starting.pop(reader, None) is not None:
                self._idle.put(reader)

        self._starting[reader] = time.monotonic()
        reader.__ray_ready__.remote().future().add_done_callback(put)

    def close(self) -> None:
        with self._lock:
            for actor, secrets in self._all:
                ray.kill(actor)
                secrets.remove()
            self._all, self._early, self._holder = [], [], None
            self._starting.clear()
            while not self._idle.empty():
                self._idle.get_nowait()
            self._n_readers = 0

    def _start(self, kind: type, n_cpus: float, n_threads: int) -> Any:
        secrets = ReaderSecrets(self._config)
        actor: Any = (
            ray.remote(kind)
            .options(num_cpus=n_cpus, max_concurrency=n_threads)
            .remote(without_secrets(self._config), secrets.lay_down())
        )
        self._all.append((actor, secrets))
        return actor

    def _end(self, ended: Any) -> None:
        for actor, secrets in [each for each in self._all if each[0] is ended]:
            ray.kill(actor)
            secrets.remove()  # it may not have read them yet
            self._all.remove((actor, secrets))
