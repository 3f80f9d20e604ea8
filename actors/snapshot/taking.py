"""Leads the snapshots of one slot's tables, on a thread of the run's process, beside the epochs of its stream.

A shell around ``Course`` (what is next) and ``SnapshotBook`` (what is wanted): it looks at catalog, sink and storage
now and then, executes the course's actions on threads, and reports what came of them. It holds no row, and nothing that
cannot be had again: finished tables are in the sink, and everything else is taken anew by the next run.

The stream's epochs may end and begin meanwhile, and the Spark driver be replaced: a commit that fails is asked for
again until the sink answers, because the rows are on disk, and all else goes on.

Rejected: an actor of its own for this, whose death would cost the tables in hand and save nothing, because a run that
has ended has nobody who would commit them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from xidstream.actors.snapshot.actors import SnapshotActors
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import Action as Policy
from xidstream.pipeline.errors import ComponentLost, XidstreamError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.course import (
    Again,
    Commit,
    Committed,
    Course,
    Dropped,
    Event,
    Failed,
    Held,
    Hold,
    RangeRead,
    Read,
    ReaderLost,
    Release,
)
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.progress import SnapshotProgress, progress_of
from xidstream.pipeline.snapshot.tables import PublishedSource, plan_ranges
from xidstream.pipeline.spark.snapshot_log import GenerationLine, SnapshotTarget
from xidstream.pipeline.stages.snapshot_book import SnapshotBook

log = logging.getLogger(__name__)

_LOOK_S = 10.0
_POLL_S = 0.5
_LONGEST_REST_S = 60.0

CallSink = Callable[..., Any]
"""``(method, *arguments)`` of the sink's ``SnapshotLog``. Raises ComponentLost while there is no loop that claimed
it."""


@dataclass(frozen=True)
class _Told:
    """From a thread: a commit went through."""

    event: Committed
    generation: Generation
    n_rows: int
    n_bytes: int


class SnapshotTaking:
    """``survey``: the published tables; None while nobody can ask. ``notify`` tells people."""

    def __init__(
        self,
        config: Config,
        book: SnapshotBook,
        survey: Callable[[], tuple[PublishedSource, ...] | None],
        call_sink: CallSink,
        notify: Callable[[str], None],
    ) -> None:
        self._config = config
        self._book = book
        self._survey = survey
        self._call_sink = call_sink
        self._notify = notify
        self._actors = SnapshotActors(config)
        self._events: queue.SimpleQueue[Event | _Told] = queue.SimpleQueue()
        self._course: Course | None = None
        self._lines: list[GenerationLine] | None = None
        self._targets: dict[tuple[int, int], SnapshotTarget] = {}
        self._rests: dict[int, tuple[float, float]] = {}
        self._stop = threading.Event()
        self._finished = (0, 0, 0)
        self.valid_from = Lsn(0)
        """The greatest of the generations that this run took."""
        self.is_complete = False
        """Whether every table that is wanted has its snapshot, as of the last look."""
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="xidstream-snapshots", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and give up what is in hand."""
        self._stop.set()
        self._actors.close()
        self._thread.join()

    def progress(self) -> SnapshotProgress:
        course = self._course
        return progress_of([] if course is None else list(course.tables.values()), *self._finished)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        threads = 2 * self._config.snapshot_connections + 2
        pool = ThreadPoolExecutor(threads, thread_name_prefix="xidstream-snapshot")
        look_s = 0.0
        try:
            while not self._stop.is_set() and self.failure is None:
                if time.monotonic() >= look_s:
                    self._try_to_look(pool)
                    look_s = time.monotonic() + _LOOK_S
                self._wake_resting(pool)
                try:
                    event = self._events.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                self._handle(event, pool)
                if self._course is not None and not self._course.tables:
                    look_s = 0.0
        except BaseException as error:  # noqa: BLE001 - the supervisor raises it
            self.failure = error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._actors.close()

    def _try_to_look(self, pool: ThreadPoolExecutor) -> None:
        try:
            self._look(pool)
        except XidstreamError as error:
            if error.policy.action is Policy.STOP:
                raise
            log.info("snapshots: %s; asking again in %.0f s", error.message, _LOOK_S)

    def _look(self, pool: ThreadPoolExecutor) -> None:
        if self._lines is None:
            lines = list(self._call_sink("lines"))
            for generation in self._book.unfinished(lines):
                if self._call_sink("commit", generation, None):
                    self._book.finish(generation)
                else:
                    self._book.give_up(generation)
            self._lines = list(self._call_sink("lines"))
        sources = self._survey()
        if sources is None:
            return
        needs = self._book.needs(sources, self._lines)
        for line, reason in needs.ended:
            self._call_sink("end", line, reason)
            self._lines = [each for each in self._lines if each != line]
            self._notify(f"the snapshot of table {line.table} does not stand any more: {reason}")
        if needs.wanted and self._course is None:
            n_readers = int(self._actors.hold("room_for", self._config.snapshot_connections))
            self._actors.start_readers(n_readers)
            self._course = Course(n_readers)
        for relid in needs.unwanted:
            self._handle(Dropped(relid), pool)
        for wanted in needs.wanted:
            self._handle(wanted, pool)
        self.is_complete = not needs.wanted and not (self._course is not None and self._course.tables)
        if self.is_complete and self._course is not None:
            # Their connections and processes are not kept for a table that may be added some day.
            self._course = None
            self._actors.close()

    def _handle(self, event: Event | _Told, pool: ThreadPoolExecutor) -> None:
        if self._course is None:
            return
        if isinstance(event, _Told):
            self._note_finished(event)
            event = event.event
        if isinstance(event, Failed):
            paused_s = min(2 * self._rests.get(event.relid, (0.0, 0.5))[1], _LONGEST_REST_S)
            self._rests[event.relid] = (time.monotonic() + paused_s, paused_s)
        for action in self._course.handle(event):
            if isinstance(action, Hold):
                pool.submit(self._watched, self._hold, action)
            elif isinstance(action, Read):
                pool.submit(self._watched, self._read, action)
            elif isinstance(action, Commit):
                pool.submit(self._watched, self._commit, action)
            else:
                pool.submit(self._release, action)

    def _note_finished(self, told: _Told) -> None:
        assert self._lines is not None
        generation = told.generation
        n_finished, n_rows, n_bytes = self._finished
        self._finished = (n_finished + 1, n_rows + told.n_rows, n_bytes + told.n_bytes)
        del self._targets[generation.relid, told.event.attempt]
        self._rests.pop(generation.relid, None)
        self.valid_from = max(self.valid_from, generation.bounds.valid_from)
        self._lines = [line for line in self._lines if line.relid != generation.relid or not line.is_ours]
        self._lines.append(
            GenerationLine(
                generation.name, generation.relid, generation.number, GenerationState.FINISHED, True
            )
        )

    def _wake_resting(self, pool: ThreadPoolExecutor) -> None:
        now_s = time.monotonic()
        for relid in [relid for relid, (due_s, _) in self._rests.items() if due_s <= now_s]:
            # The length of the rest is kept: the next one is longer.
            self._rests[relid] = (float("inf"), self._rests[relid][1])
            self._handle(Again(relid), pool)

    # -- on the pool's threads -------------------------------------------------------------------------

    def _watched(self, act: Callable[[Any], None], action: Any) -> None:
        relid = (
            action.task.source.relation.relid if isinstance(action, Read) else action.source.relation.relid
        )
        try:
            act(action)
        except XidstreamError as error:
            if self._stop.is_set():
                return
            if error.policy.action is Policy.STOP:
                self.failure = error
                return
            log.warning("snapshots: %s", error.message)
            if isinstance(action, Read) and isinstance(error, ComponentLost):
                self._events.put(ReaderLost(relid, action.attempt, action.task.range.number))
            else:
                self._events.put(Failed(relid, action.attempt))
        except BaseException as error:  # noqa: BLE001 - the supervisor raises it
            self.failure = error

    def _hold(self, action: Hold) -> None:
        source = action.source
        held = self._actors.hold("hold", source, action.wait_for_writers)
        self._targets[source.relation.relid, action.attempt] = self._call_sink("target", source.relation)
        ranges = plan_ranges(held.source.leaves, by_range=held.by_range)
        self._events.put(
            Held(source.relation.relid, action.attempt, held.source, held.snapshot_name, held.bounds, ranges)
        )

    def _read(self, action: Read) -> None:
        relid = action.task.source.relation.relid
        target = self._targets[relid, action.attempt]
        files, n_rows = self._actors.read(action.task, action.bounds, target)
        self._events.put(RangeRead(relid, action.attempt, action.task.range.number, files, n_rows))

    def _commit(self, action: Commit) -> None:
        assert self._lines is not None
        self._actors.hold("await_flushed", action.bounds.valid_from)
        generation = self._book.begin(action.source, action.bounds, self._lines)
        pause_s = 0.5
        while not self._stop.is_set():
            try:
                self._call_sink("commit", generation, action.files)
                break
            except XidstreamError as error:
                if error.policy.action is Policy.STOP:
                    raise
                log.warning("snapshots: %s; trying again", error.message)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_REST_S)
        else:
            return
        self._book.finish(generation)
        self._notify(f"table {generation.name}: {action.n_rows:,} rows that it had before are in the sink")
        event = Committed(generation.relid, action.attempt)
        self._events.put(_Told(event, generation, action.n_rows, action.source.n_bytes))

    def _release(self, action: Release) -> None:
        try:
            self._actors.hold("release", action.relid)
        except XidstreamError:
            pass  # it was lost, and its lock with it
