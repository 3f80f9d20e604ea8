"""One range of a table's snapshot, from the server straight into Parquet files of the Delta table's layout.

No hop lies between: libpq's rows, columns, the contract's layout, the table's columns, a Parquet file. One block of
rows is in memory at a time, and a row group of the file. So memory depends on the largest value, not on the table.

Each range is a transaction of its own, which imports the snapshot anew: a reader that waits for its next range holds no
lock, and does not keep the server from cleaning up. ``cancel`` ends the range in hand if it is one of a snapshot that
was given up: else its reader would keep the table's lock for as long as the range takes. What fails or is cancelled
leaves a connection that is closed, and the next ``read`` makes another one.

Small tables of one snapshot are read one right after the other, in one transaction (``read_together``). One of them
that cannot be read costs the others a new connection, and nothing else.

Values come in binary where that can be decoded. A range that has a value which its native type cannot hold is read
again with that column as text. The reader asks for the text at once from then on: most tables have no such value, and
one that has some has them in most of its ranges.

Each attempt writes into a directory of its own, so that no commit ever names what a lost or repeated attempt wrote: it
names what ``read`` returned. Vacuum removes the rest, as what Spark's lost tasks leave (``log_tables.parquet_files``).

Rejected: Spark tasks that do this, because they would need the DSN's secret in the executors, psycopg and numba there,
and a job that cannot lose one range alone; a thread for reading beside one for writing, because several readers keep
the cores busy anyway.

Also rejected: progress within a range. It would have to be asked for, and a range is small (``snapshot.tables``).

Called by the snapshot's actors, one reader in each. ``read`` blocks. ``cancel`` may come from another thread meanwhile.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.decode import ValuesDoNotFit, decode_copied, text_columns
from xidstream.pipeline.errors import SnapshotLost, Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.parquet_files import Directory, ParquetFiles, WrittenFile
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.range_copy import RangeCopy, range_text
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import snapshot_rows
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import SEQ_BITS, RangeTask

_LSN_COLUMN = "_commit_lsn"
_LOCK_WAIT_MS, _LOCK_WAIT_TOGETHER_MS = 60_000, 200
"""For who waits to alter the table that is read. One that has a ``lock_timeout`` has given up by then. The second one
holds up other tables as well, so it is short."""


@dataclass(frozen=True)
class RangeOutput:
    """Where the rows of a range go: the Delta table, or a folder of the storage, and the job, a part of every
    directory's name in it."""

    table: Directory
    job: str


class ByteRateLimit:
    """A limit of bytes a second; 0 is none. ``spent`` says how long to wait after so many bytes more.

    It looks at the range so far, so that a wait that took too long is made up for. Time without bytes is not saved up
    for longer than ``_MOST_SAVED_S``: else a limit would not hold after a slow stretch.
    """

    _MOST_SAVED_S = 1.0

    def __init__(self, bytes_per_s: int, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_s = now_s

    def spent(self, n_bytes: int, now_s: float) -> float:
        """Seconds to wait."""
        if self._bytes_per_s <= 0:
            return 0.0
        self._due_s = max(self._due_s, now_s - self._MOST_SAVED_S) + n_bytes / self._bytes_per_s
        return max(0.0, self._due_s - now_s)


class RangeReader:
    """Reads one range after another."""

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._connection: RangeCopy | None = None
        self._snapshot_name: str | None = None
        """The name of the snapshot of the range in hand."""
        self._begun: str | None = None
        """The name of the snapshot of the connection's transaction; None between transactions."""
        self._as_text: dict[RelationVersion, frozenset[int]] = {}
        """The columns that are read as text, in tables with values that a native type cannot hold."""

    def __repr__(self) -> str:
        return f"RangeReader({self._snapshot_name or 'idle'})"

    def read(
        self,
        task: RangeTask,
        bounds: SnapshotBounds,
        target: RangeOutput,
        conform: Conform,
        *,
        bytes_per_s: int = 0,
        lock_wait_ms: int = _LOCK_WAIT_MS,
        ends: bool = True,
    ) -> list[WrittenFile]:
        """The finished, durable files with all rows of a range; none where it has no rows.

        ``bytes_per_s``: how much of COPY's rows is read at most; 0 for no limit. ``lock_wait_ms``: for who waits to
        alter the table. ``ends``: whether the transaction ends; else the next range is one of the same snapshot.

        Raises SnapshotLost (also after ``cancel``), SnapshotInterrupted, ConnectionLost, PoisonedChange (a value that
        cannot be delivered; it names table and column), ColumnNameClash, PreconditionMissing (a privilege), and
        StorageFault.
        """
        with self._lock:
            self._snapshot_name = task.snapshot_name
            self._cancelled.clear()
        reach("snapshot_range_reading")
        try:
            pace = ByteRateLimit(bytes_per_s, time.monotonic())
            files = self._copied(task, bounds, target, conform, pace, lock_wait_ms)
            if ends:
                self._connected().end()
                self._begun = None
            with self._lock:
                # From here on nobody cancels what this connection does.
                self._snapshot_name = None
                self._stop_if_cancelled(range_text(task))
        except BaseException as error:
            with self._lock:
                self._snapshot_name = None
            self.close()
            if isinstance(error, XidstreamError):
                # Whatever the server or the connection made of it.
                self._stop_if_cancelled(range_text(task))
            raise
        written = files.close()
        reach("snapshot_range_written")
        return written

    def read_together(
        self,
        tasks: Sequence[RangeTask],
        bounds: SnapshotBounds,
        targets: Sequence[tuple[RangeOutput, Conform]],
        *,
        bytes_per_s: int = 0,
    ) -> list[list[WrittenFile] | XidstreamError]:
        """What ``read`` returns, or raises, of each of these ranges, all of one snapshot."""
        lock_wait_ms = _LOCK_WAIT_MS if len(tasks) == 1 else _LOCK_WAIT_TOGETHER_MS
        found: list[list[WrittenFile] | XidstreamError] = []
        for i, (task, (target, conform)) in enumerate(zip(tasks, targets, strict=True)):
            try:
                files = self.read(
                    task,
                    bounds,
                    target,
                    conform,
                    bytes_per_s=bytes_per_s,
                    lock_wait_ms=lock_wait_ms,
                    ends=i + 1 == len(tasks),
                )
                found.append(files)
            except XidstreamError as error:
                found.append(error)
        return found

    def cancel(self, snapshot_name: str) -> None:
        """End the read in hand, if it is one of this snapshot. For another thread.

        A read that has not begun yet finds that the snapshot is gone, and one that has ended stays as it is.
        """
        with self._lock:
            if self._snapshot_name != snapshot_name:
                return
            self._cancelled.set()
            if self._connection is not None:
                self._connection.cancel()

    def close(self) -> None:
        """End the snapshot's transaction and the connection."""
        with self._lock:
            connection, self._connection, self._begun = self._connection, None, None
        if connection is not None:
            connection.close()

    def _connected(self) -> RangeCopy:
        connection = self._connection
        if connection is None:
            connection = RangeCopy(self._dsn)
            with self._lock:
                self._connection = connection
        return connection

    def _copied(
        self,
        task: RangeTask,
        bounds: SnapshotBounds,
        target: RangeOutput,
        conform: Conform,
        pace: ByteRateLimit,
        lock_wait_ms: int,
    ) -> ParquetFiles:
        """The range in files that are still open. It is read again, into others, where a column of it must be text."""
        relation = task.source.relation
        while True:
            directory = f"{target.job}-{task.range.number}-{secrets.token_hex(8)}"
            files = ParquetFiles(target.table, directory, conform.schema, _LSN_COLUMN)
            as_text = self._as_text.get(relation) or text_columns(relation)
            try:
                self._begin(task, lock_wait_ms)
                self._copy(task, as_text, bounds, files, conform, pace)
                return files
            except ValuesDoNotFit as found:
                self._as_text[relation] = as_text | found.columns
                self.close()

    def _begin(self, task: RangeTask, lock_wait_ms: int) -> None:
        self._stop_if_cancelled(range_text(task))
        connection = self._connected()
        if self._begun != task.snapshot_name:
            connection.begin(task.snapshot_name)
            self._begun = task.snapshot_name
        connection.lock(task, lock_wait_ms)

    def _copy(
        self,
        task: RangeTask,
        as_text: frozenset[int],
        bounds: SnapshotBounds,
        files: ParquetFiles,
        conform: Conform,
        pace: ByteRateLimit,
    ) -> None:
        relation, where = task.source.relation, range_text(task)
        n_rows = 0
        self._stop_if_cancelled(where)
        for rows in self._connected().blocks(task, as_text):
            first_seq = (task.range.number << SEQ_BITS) + n_rows
            read_bytes = len(rows.payload)
            n_rows += len(rows.lengths)
            if n_rows >= 1 << SEQ_BITS:
                raise Unsupported(f"{where} has more than {1 << SEQ_BITS} rows")
            decoded = decode_copied(rows.payload, rows.lengths, relation, as_text, where)
            del rows  # a giant row is not kept beside its columns
            batch: pa.RecordBatch = snapshot_rows(
                relation,
                decoded.columns,
                decoded.text,
                snapshot_lsn=bounds.snapshot_lsn,
                taken_at_us=bounds.taken_at_us,
                first_seq=first_seq,
            )
            del decoded
            files.write(conform(batch))
            del batch
            self._cancelled.wait(pace.spent(read_bytes, time.monotonic()))
            self._stop_if_cancelled(where)

    def _stop_if_cancelled(self, where: str) -> None:
        if self._cancelled.is_set():
            raise SnapshotLost(f"{where}: the read was cancelled, because this snapshot was given up")
