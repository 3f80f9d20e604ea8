"""The actors that a run's snapshots need: one holder and some readers, started when there is something to take.

A handle gives every caller the same living actor, and starts another in place of one that was lost. Each start lays the
password down once more (``runtime.secrets``). Used from several threads.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.runtime.secrets import ReaderSecrets, without_secrets
from xidstream.actors.snapshot_holder import SnapshotHolder
from xidstream.actors.snapshot_reader import SnapshotReader
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import RangeTask
from xidstream.pipeline.spark.snapshot_log import SnapshotTarget

HOLDER, READER = "snapshot holder", "snapshot reader"
HOLDER_CPUS = 0.05
_ANSWER_S = 2.0
_IDLE_S = 600.0
"""Nobody asks for more ranges at a time than there are readers. One waits where a reader is still busy with a range of
a table that was given up, or where all readers were ended."""


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
        self._all: list[tuple[Any, ReaderSecrets]] = []
        self._reading: dict[int, tuple[RangeTask, Any]] = {}
        """What each busy reader reads."""

    def hold(self, method: str, *arguments: Any) -> Any:
        """Call the holder. Raises ComponentLost where it died: its tables are lost, and the next call starts
        another."""
        return self._call_holder(self._living_holder(), method, *arguments)

    def _living_holder(self) -> Any:
        with self._lock:
            if self._holder is None:
                self._holder = self._start(SnapshotHolder, HOLDER_CPUS, self._config.snapshot_connections + 4)
            return self._holder

    def release(self, relid: int) -> None:
        """Let go of a table, if its holder lives. Raises ComponentLost."""
        holder = self._holder
        if holder is not None:
            self._call_holder(holder, "release", relid)

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
        holder: else the first one would read alone while the others load, which takes a second or two.
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
        # The last one that is put is taken first: the one whose process Ray started first.
        for each in [*[None] * (n_readers - len(readers)), *reversed(readers[:n_readers])]:
            self._idle.put(each)
        return n_readers

    def cancel_reads(self, relid: int) -> None:
        """Have those stop that read for a table's snapshot, which is given up. It waits for none of them."""
        with self._lock:
            given_up = [each for each in self._reading.values() if each[0].source.relation.relid == relid]
        for task, reader in given_up:
            reader.cancel.remote(task.snapshot_name)

    def read(self, task: RangeTask, bounds: SnapshotBounds, target: SnapshotTarget) -> Any:
        """Have an idle reader read. Raises ComponentLost where it died: the next call starts another in its place."""
        try:
            reader = self._idle.get(timeout=_IDLE_S)
        except queue.Empty:
            raise ComponentLost("the snapshot readers were ended") from None
        try:
            if reader is None:
                reader = self._start_reader()
            with self._lock:
                self._reading[id(task)] = (task, reader)
            bytes_per_s = self._config.snapshot_bytes_per_s // max(self._n_readers, 1)
            return ray.get(reader.read.remote(task, bounds, target, bytes_per_s))
        except Exception as error:
            fault = unwrap(error, READER)
            if isinstance(fault, ComponentLost):
                reader = None
            raise fault from error
        finally:
            with self._lock:
                self._reading.pop(id(task), None)
            self._idle.put(reader)

    def close(self) -> None:
        with self._lock:
            for actor, secrets in self._all:
                ray.kill(actor)
                secrets.remove()
            self._all, self._early, self._holder = [], [], None
            while not self._idle.empty():
                self._idle.get_nowait()
            self._n_readers = 0

    def _start_reader(self) -> Any:
        with self._lock:
            return self._start(SnapshotReader, self._config.buffer_cpus, 2)

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
