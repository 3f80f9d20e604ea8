"""The Spark driver's loop: it pulls a batch, gives it to the sink, and reports it done with the next pull.

It runs on a thread of the process that has the Spark session: the driver actor, or the user's own process. Pulling
gives the backpressure. Reporting a batch only after the sink has returned gives the guarantee: the next epoch
delivers again what was not reported, and the sink's own watermark drops what the sink already holds.

Before each batch the loop asks the storage whether the slot is still this epoch's. A user's function has no fence of
its own, and a process that was stopped for a while, or whose link was lost, does not know that another run went on.

There is never more than one loop of a run on a sink: the supervisor calls ``stop`` and waits for the end before it
begins the next epoch's loop. A loop that was stopped neither writes another batch nor reports the one it was writing.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from xidstream.actors.driver.object_store_frames import ObjectStoreFrames
from xidstream.actors.driver.session_kind import reads_ray_objects
from xidstream.actors.driver.stored_frames import StoredFrames
from xidstream.actors.runtime.driver_session import LoopSession
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.account import BatchHistory, ProcessPart, SinkPart
from xidstream.pipeline.account.batches import MOST_BATCHES, MOST_LATENCIES_OF_A_BATCH
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import Batch, SlotIdentity, Tenure
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.initial_copy.staged_snapshots import StagedSnapshots
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.sinks.sink import Sink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import check_owner
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage

_T = TypeVar("_T")
_PULL_WAIT_S = 1.0
STALLED_AFTER_S = 120.0
"""A Spark job that has waited for executors for this long will wait for ever, because RayDP's master is gone."""


class BatchLoop:
    """``before`` has the counts of the run's earlier epochs, and ``history`` their last batches."""

    def __init__(
        self,
        session: LoopSession,
        sink: Sink,
        sequencer: Any,
        storage_uri: str,
        identity: SlotIdentity,
        before: SinkReport,
        history: BatchHistory | None = None,
    ) -> None:
        self._session = session
        self._sink = sink
        self._sequencer = sequencer
        self._storage = Storage(storage_uri)
        """The storage, for what the sink reads of it."""
        self._identity = identity
        self._read_segment = SegmentReader(storage_uri)
        """Reads a segment in this process."""
        self._frames: ObjectStoreFrames | StoredFrames = ObjectStoreFrames()
        """How rows in memory come to Spark; ``StoredFrames`` where its JVM has not joined Ray."""
        self._stop = threading.Event()
        """Set by ``stop``: the batch that is being written is the last."""
        self._writing_since_s: float | None = None
        """When the sink was given the current batch, on the monotonic clock; None between batches."""
        self._idle_since_s: float | None = None
        """Since when a batch is being written without any running task of Spark; None if that is not so."""
        self.progress = before
        """The counts since the driver began, without what only a question to the JVM or the history tells."""
        self.history = history or BatchHistory()
        """The last batches, for the status."""
        self._is_claimed = self._has_claimed = False
        self._staged: StagedSnapshots | None = None
        """The snapshots that wait in the storage for a user's function; None for a sink that has tables."""
        self._done: int | None = None
        """The batch that the sink has and that the next pull reports."""

    def stop(self) -> None:
        """End ``run`` when the current batch is written. That batch is not reported any more."""
        self._stop.set()

    def run(self) -> None:
        """Run until the sequencer has no more batches. Raises the error of the sink or of another part."""
        self._sink.open(self._session.get)
        try:
            watermark = self._sink.watermark()
            self.progress = dataclasses.replace(self.progress, sink_lsn=watermark)
            tenure: Tenure = self._call("sink_opened", watermark, self._sink.last_owner())
            self._sink.claim(tenure)
            self._is_claimed = self._has_claimed = True
            self._deliver_snapshots(tenure)
            spark = self._session.started
            # A session that is not there yet will be one of ours, which reads them.
            if spark is not None and not reads_ray_objects(spark):
                self._frames = StoredFrames(self._storage, self._layout(tenure))
            while not self._stop.is_set():
                done, self._done = self._done, None
                batch = self._call("next_batch", _PULL_WAIT_S, tenure.loop, done, self._sink.pace())
                if done is not None:
                    reach("batch_reported")
                if self._stop.is_set():
                    return
                if batch is None:
                    if self._call("finished"):
                        return
                    continue
                self._take(batch, tenure)
        finally:
            self._is_claimed = False
            self._sink.close()

    def _deliver_snapshots(self, tenure: Tenure) -> None:
        """A function has no fold: it gets the rows from before first, and the changes after them then."""
        if self._sink.kind.snapshots is not Snapshots.FIRST:
            return
        layout = self._layout(tenure)
        is_ours = partial(check_owner, self._storage, layout, tenure.number)
        staged = self._staged = StagedSnapshots(self._storage, layout, is_ours)
        if self._call("takes_snapshots"):
            staged.deliver(self._session.get(), partial(self._give_snapshot, tenure), self._is_over)
        self._sink.exclude_contained(staged.contained())

    def _is_over(self) -> bool:
        return self._stop.is_set() or bool(self._call("finished"))

    def _give_snapshot(self, tenure: Tenure, batch: SnapshotBatch) -> None:
        self._writing_since_s = time.monotonic()
        try:
            check_owner(self._storage, self._layout(tenure), tenure.number)
            self._sink.write_snapshot(batch)
        finally:
            self._writing_since_s = None

    def on_snapshots(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        """On any thread: ``call`` with the sink's tables. Raises ComponentLost before the sink is this loop's, and
        after the loop's end, unless ``after_end``: the sink itself refuses what a run tells that was taken over."""
        has_sink = self._is_claimed and not self._stop.is_set()
        if not (has_sink or (self._has_claimed and after_end)):
            raise ComponentLost("the Spark driver writes to no sink at the moment")
        if self._sink.kind.snapshots is not Snapshots.FIRST:
            return call(self._sink.snapshot_log())
        if self._staged is None:
            raise ComponentLost("the Spark driver has not opened the sink yet")
        return call(self._staged)

    def sink_part(self, n_executors: int | None) -> SinkPart:
        """For the run's account."""
        return dataclasses.replace(
            self.progress.sink,
            latency=self.history.latency,
            in_hand=self.history.in_hand(time.monotonic()),
            batches=self.history.batches[-MOST_BATCHES:],
            idle_s=self.idle_s,
            n_executors=n_executors,
        )

    def sink_report(self, n_executors: int | None, process: ProcessPart | None = None) -> SinkReport:
        """For the run's account, with what is left of the change log."""
        return SinkReport(
            self.sink_part(n_executors), process, self._sink.log_part() if self._is_claimed else None
        )

    @property
    def idle_s(self) -> float | None:
        """For how long the current batch has had a Spark job and no running task, as ``is_stalled`` last saw it."""
        since_s = self._idle_since_s
        return None if since_s is None else time.monotonic() - since_s

    def is_stalled(self) -> bool:
        """Whether the current batch has waited for ``STALLED_AFTER_S`` with a job and no running task.

        Spark shows no error when RayDP's master dies: its jobs wait for executors that nobody starts.
        """
        now_s = time.monotonic()
        if self._writing_since_s is None or self._has_running_tasks():
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s > STALLED_AFTER_S

    def _has_running_tasks(self) -> bool:
        spark = self._session.started
        if spark is None:
            return True
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        # Without an active stage the sink works outside of Spark, as the Delta commit does.
        return not known or any(stage.numActiveTasks for stage in known)

    def _take(self, batch: Batch, tenure: Tenure) -> None:
        self._writing_since_s = time.monotonic()
        self.history.begin(self._writing_since_s, batch.n_transactions, batch.n_rows, batch.n_bytes)
        try:
            # A batch without content only moves the position: its transactions changed no published table.
            if _has_content(batch):
                check_owner(self._storage, self._layout(tenure), tenure.number)
                reach("writing_batch")
                self._sink.write(self._spark_batch(batch))
                reach("batch_written")
        except BaseException:
            self.history.dropped()
            raise
        finally:
            self._writing_since_s = None
        if self._stop.is_set():
            self.history.dropped()
            return
        self._done = batch.number
        self._count(batch)
        self._frames.forget()

    def _spark_batch(self, batch: Batch) -> SinkBatch:
        frames = self._frames
        return SinkBatch(
            batch, self._session.get, frames.frame, self._read_segment, frames.read, frames.put, self._storage
        )

    def _layout(self, tenure: Tenure) -> Layout:
        return Layout(self._identity.system_identifier, self._identity.slot, tenure.epoch)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._sequencer, method).remote(*arguments))
        except Exception as error:
            raise unwrap(error, "commit sequencer") from error

    def _count(self, batch: Batch) -> None:
        before = self.progress.sink
        lag_ms = before.last_lag_ms
        committed_us = _commits_us(batch)
        now_us = time.time_ns() // 1000
        if len(committed_us):
            lag_ms = max(0.0, (now_us - int(committed_us[-1])) / 1000)
        lsn = str(batch.last_commit_lsn) if batch.last_commit_lsn else before.last_commit_lsn
        self.history.done(time.monotonic(), now_us, lsn or str(INVALID_LSN), committed_us)
        part = dataclasses.replace(
            before,
            n_batches=before.n_batches + 1,
            n_rows=before.n_rows + batch.n_rows,
            n_transactions=before.n_transactions + sum(u.transactions.num_rows for u in batch.units),
            last_commit_lsn=lsn,
            last_lag_ms=lag_ms,
        )
        self.progress = dataclasses.replace(self.progress, sink=part)


def _has_content(batch: Batch) -> bool:
    return any(u.transactions.num_rows or u.messages for u in batch.units)


def _commits_us(batch: Batch) -> npt.NDArray[np.int64]:
    """When the last of its transactions committed, as many as the history keeps, in microseconds since the Unix
    epoch."""
    parts: list[npt.NDArray[np.int64]] = []
    n = 0
    for unit in reversed(batch.units):
        if n >= MOST_LATENCIES_OF_A_BATCH:
            break
        if unit.transactions.num_rows:
            column = unit.transactions.column("commit_timestamp").slice(
                max(0, unit.transactions.num_rows - MOST_LATENCIES_OF_A_BATCH)
            )
            parts.append(column.cast(pa.int64()).to_numpy(zero_copy_only=False))
            n += len(column)
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)
