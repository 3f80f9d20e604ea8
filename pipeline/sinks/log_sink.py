"""A sink of tables: one per source table, ``_messages``, and ``_transactions`` last. Of Delta, or of Iceberg.

What the formats do otherwise stands behind ``LogTables``. What is here holds for both of them.

``LogSink.write`` takes a batch and returns when ``_transactions`` holds it; only then may the caller
confirm. In between, for each table: its watermark (the commit LSN up to which it holds rows) is read from a
snapshot. Segments above it that are Parquet in the table's layout already get a name in the table
(``pipeline.log_tables.segment_links``). All other rows above it are written to Parquet files, by the driver or by
Spark's executors (``pipeline.sinks.written_rows``). These names and files are committed on that snapshot with the new
watermark (``LogTableWriter.commit``). A crash anywhere leaves each table at a watermark of its own; the replay,
however its batches are cut, writes to each what it lacks. A reader bounded by the greatest ``commit_lsn`` of
``_transactions`` never sees a torn transaction, because that is committed after all the tables. Where the format
commits several tables in one step (``LogTables.together``), all these commits are one, and no reader sees a torn
transaction (``batch_commits``).

Watermarks under the application id of the slot: a source table's and ``_transactions``' are the commit LSN
of the last transaction they hold; ``_messages`` has two, because its rows come in two orders. Transactional
messages come with their transaction, with LSNs older than those of messages before them: the commit LSN
decides. Non-transactional ones come when they are decoded, in the order of their own LSNs, and the server
skips those below the start of the replay: their greatest ``lsn``, under ``<application id>/messages``,
decides. So ``_messages`` is deduplicated by ``lsn`` without reading it.

The driver writes ``_transactions`` and ``_messages``, too. Messages may be many gigabytes. They are read, filtered and
written chunk by chunk (``message_chunks``) into as many files as they need, and those are one commit.

Who may write, and whether what is held can come from this server, is ``pipeline.log_tables.ownership``'s: a snapshot
that somebody else has outdated is taken anew, and checked.

Rejected: Spark's own writers (a jar that must match Spark, and a commit that cannot be tied to our watermark in one
snapshot).

The driver's process only; ``write`` from one thread at a time, tables are written by up to four.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.account.model import LogPart
from xidstream.pipeline.errors import (
    Action,
    SegmentCorrupt,
    SinkFailed,
    Unsupported,
    UsageError,
    XidstreamError,
)
from xidstream.pipeline.exchange import AT_ONCE, Pace, SlotIdentity, Tenure
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.batch_parts import TableParts
from xidstream.pipeline.log_tables.columns import ColumnMapping, Conform, TableColumn, map_all_columns
from xidstream.pipeline.log_tables.log_table import (
    MAX_VERSION,
    NOTHING,
    LogTables,
    LogTableWriter,
    SnapshotOutdated,
    TableCommit,
)
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WriteOutput, WrittenFile
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.segment_links import SegmentLinks
from xidstream.pipeline.log_tables.snapshot_log import Carry, SnapshotLog
from xidstream.pipeline.log_tables.writer_cache import WriterCache
from xidstream.pipeline.parked import skipped_rows
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA
from xidstream.pipeline.settings.sink_kinds import SinkKind
from xidstream.pipeline.sinks.batch_commits import BatchCommits, Guard, commits_of
from xidstream.pipeline.sinks.message_chunks import message_chunks, new_messages
from xidstream.pipeline.sinks.written_rows import write_rows
from xidstream.pipeline.snapshot.ddl import Ddl, read_ddl
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.batch_parts import TableName
    from xidstream.pipeline.snapshot.bounds import SnapshotBounds
    from xidstream.pipeline.spark.session import GetSession
    from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch

PARALLEL_TABLES: Final = 4
"""Jobs at a time: four tiny ones together take as long as one (measured); more only queue for the cores."""


class LogSink:
    """``tables``: of the format that ``kind`` names. ``beside``: the same, for the snapshots that are committed beside
    the batches; what ``tables`` do for their upkeep they leave to these.

    Raises from ``write``: Superseded (a later run of this slot commits here), SinkDiverged (the sink is ahead of the
    server), StorageFault, SegmentCorrupt, SinkFailed. After any of them nothing of the batch may be confirmed, and
    the same batch may be written again, by this sink or another.
    """

    kind: SinkKind

    def __init__(self, tables: LogTables, beside: LogTables, identity: SlotIdentity) -> None:
        self._tables = tables
        self._beside = beside
        self._application_id = identity.application_id
        """Under this name tables keep the watermark of the slot."""
        self._messages_id = f"{identity.application_id}/messages"
        """Logical messages outside of transactions have a watermark of their own, under this name."""
        self._ownership: Ownership | None = None
        """The run that this sink commits for, and its checks; None before ``claim``, when tables are only looked at."""
        self._writers = WriterCache(tables.kept_handles)
        """The tables that were opened, kept from batch to batch."""
        self._guarded = Guard(self._writers, tables.title)
        """Turns what a table raises into errors of ours, and forgets the table then."""
        self._threads: ThreadPoolExecutor | None = None
        """Write several tables at a time; None when the sink is not open."""
        self._links = SegmentLinks()
        """Gives segments to tables as their files."""
        self._snapshot_log: SnapshotLog | None = None
        """The snapshots' commits; None before ``claim``."""
        self._n_mark_commits = 0
        """The commits of its marks that the handle on ``_transactions`` has read."""
        self._session: GetSession | None = None
        """Starts the Spark session where a batch needs one; None when the sink is not open."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._tables.root})"

    def open(self, session: GetSession) -> None:
        """Make ``_transactions`` and ``_messages`` where they are not."""
        self._session = session
        try:
            self._own_table(locations.MESSAGES, MESSAGES_SCHEMA)
            self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        except Exception as error:
            raise fault_of(error, f"opening the sink's root {self._tables.root}") from error
        self._threads = ThreadPoolExecutor(PARALLEL_TABLES, thread_name_prefix="log-sink")

    def log_part(self) -> LogPart | None:
        return None

    def pace(self) -> Pace:
        return AT_ONCE

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        self._links.close()
        self._writers.clear()
        self._beside.close()
        self._tables.close()

    def last_owner(self) -> int:
        """The number of the last run that wrote here, as of the opening; 0 for none."""
        writer = self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        return Ownership.owner_of(writer, self._application_id)

    def claim(self, tenure: Tenure) -> None:
        """Write as ``tenure`` from here on. Whoever had the slot before can complete no batch after this.

        Raises Superseded where a later run was here, SinkDiverged where the sink is ahead of the server.
        """
        self._ownership = Ownership(self._application_id, self._messages_id, self._tables.root, tenure)
        # Opened again, and checked.
        self._writers.clear()
        self._guarded(locations.TRANSACTIONS, self._claim_transactions)
        self._guarded(locations.MESSAGES, self._check_messages)
        log = SnapshotLog(
            self._beside, self._application_id, self._ownership, self.watermark(), self._carries()
        )
        self._snapshot_log = log
        # Before anybody commits a snapshot here: no batch need come again that tells of these.
        log.park(tenure.parked)

    def _check_messages(self) -> None:
        self._own_table(locations.MESSAGES, MESSAGES_SCHEMA)

    def _slots(self) -> list[str]:
        """The application ids of all slots that have written to ``_transactions``."""
        raise NotImplementedError

    def _claim_transactions(self) -> None:
        writer = self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        assert self._ownership is not None
        self._ownership.check_server(writer, self._slots)
        writer.commit([], {}, marks=self._marks)

    def _carries(self) -> Carry | None:
        """Who carries over the rows that a repair of a snapshot does not read; None where nobody does."""
        return None

    def snapshot_log(self) -> SnapshotLog:
        """Where the snapshots of tables are committed, as the tenure that claimed this sink."""
        if self._snapshot_log is None:
            raise UsageError(f"the {self.kind.name} sink is not claimed")
        return self._snapshot_log

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        raise UsageError(f"the {self.kind.name} sink gets snapshots through its log")

    def exclude_contained(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        """The log keeps all changes: whoever folds it leaves out what a snapshot contains."""

    def watermark(self) -> Lsn:
        """The commit LSN of the last transaction that is whole in the sink; ``0/0`` when it holds none.

        As of this sink's last commit, or its opening.
        """
        try:
            writer = self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        except Exception as error:
            raise fault_of(error, f"opening {self._tables.title(locations.TRANSACTIONS)}") from error
        return Lsn(writer.watermark(self._application_id))

    # -- one batch -------------------------------------------------------------------------------------

    def write(self, batch: SinkBatch) -> None:
        """Return when the sink holds the batch whole. At least once in, exactly once kept."""
        if self._threads is None or self._ownership is None:
            raise UsageError(f"the {self.kind.name} sink is not open, or not claimed")
        if batch.last_commit_lsn > MAX_VERSION:
            raise Unsupported(f"commit LSN {batch.last_commit_lsn} does not fit a version of 63 bits")
        self._guarded(locations.TRANSACTIONS, lambda: self._check_repeated(batch))
        commits = commits_of(len(batch.parts), self._guarded, self._tables.together(), self._tables.root)
        if batch.last_commit_lsn > self.watermark():
            self._write_tables(list(batch.parts.values()), batch, commits)
        ddl: list[Ddl] = []
        commits.add(locations.MESSAGES, lambda: self._messages_of(batch, ddl))
        # Before `_transactions` says that all is whole up to here.
        skipped = skipped_rows(each for unit in batch.content.units for each in unit.skipped)
        self.snapshot_log().park([*batch.content.parked, *skipped])
        self.snapshot_log().note_ddl(ddl)
        commits.add(
            locations.TRANSACTIONS,
            lambda: self._transactions_of(batch.transaction_rows),
            lambda: reach("committing_transactions"),
            lambda: reach("transactions_committed"),
        )
        commits.finish()

    def _write_tables(self, tables: list[TableParts], batch: SinkBatch, commits: BatchCommits) -> None:
        if len(tables) == 1:
            self._write_table(tables[0], batch, commits)
            return
        assert self._threads is not None
        futures = [self._threads.submit(self._write_table, parts, batch, commits) for parts in tables]
        # All come to their end before the first failure is raised: none is left running behind the caller. Those
        # that have not begun never do: their rows may be lost with whatever the first one lacked.
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        ended = [future for future in futures if not future.cancelled()]
        failures = [failure for future in ended if (failure := future.exception()) is not None]
        if failures:
            raise min(failures, key=_severity)

    def _write_table(self, parts: TableParts, batch: SinkBatch, commits: BatchCommits) -> None:
        key = self._tables.key_of(*parts.name)
        commits.add(
            key,
            lambda: self._rows_of(key, parts, batch),
            lambda: reach("committing_table"),
            lambda: reach("table_committed"),
        )

    def _rows_of(self, key: str, parts: TableParts, batch: SinkBatch) -> TableCommit | None:
        writer = self._writer(key, parts.label)
        watermark = NOTHING if writer is None else writer.watermark(self._application_id)
        if writer is not None and watermark > self.watermark():
            self._check_repeated_rows(writer, parts, batch)
        if batch.last_commit_lsn <= watermark:
            if writer is not None:
                self._writers[key] = writer
            return None
        rules = self._tables.rules
        columns, mappings = map_all_columns(() if writer is None else writer.columns, parts.schemas, rules)
        about = self._tables.about(parts.appearances[-1].relation)
        brought = [
            VersionSince(self._application_id, each.commit_lsn, each.relation, mappings[each.layout].targets)
            for each in parts.appearances
        ]
        if writer is None:
            writer = self._tables.open_or_create(key, parts.label, columns, about, brought)
            if writer.columns != columns or writer.watermark(self._application_id) != watermark:
                raise SnapshotOutdated(parts.label)
            self._check(writer)
        self._writers[key] = writer
        writer.describe(about, brought)
        writer.take_columns(columns)
        target = WriteOutput(writer.location, f"data-{uuid.uuid4().hex}", watermark)
        files, left = self._link_segments(parts, mappings, batch, target)
        conform = [Conform.of(columns, mapping.names) for mapping in mappings]
        files += write_rows(left, batch, target, conform)
        if not files:
            return None
        files.sort(key=lambda file: (file.min_commit_lsn, file.path))
        last = max(file.max_commit_lsn for file in files)
        return TableCommit(writer, files, {self._application_id: last}, self._marks)

    def _link_segments(
        self, parts: TableParts, mappings: list[ColumnMapping], batch: SinkBatch, target: WriteOutput
    ) -> tuple[list[WrittenFile], TableParts]:
        """The segments that needed only a name in the table, and the parts that are left to write."""
        try:
            return self._links.give(parts, mappings, target, batch.storage, self._tables.rules)
        except SegmentCorrupt:
            # Where a later run has the slot, it has cleaned up after this one.
            owned = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
            if owned is not None:
                self._check(owned)
            raise

    # -- opening tables --------------------------------------------------------------------------------

    def _writer(self, key: str, label: str) -> LogTableWriter | None:
        """The table's, checked when it is opened; None where there is no table."""
        writer = self._writers.get(key)
        if writer is None:
            writer = self._tables.open(key, label)
            if writer is not None:
                self._check(writer)
        return writer

    def _check(self, writer: LogTableWriter) -> None:
        if self._ownership is not None:  # before `claim` tables are only looked at
            self._ownership.check(writer)

    @property
    def _marks(self) -> dict[str, int]:
        assert self._ownership is not None
        return self._ownership.marks

    def _check_repeated(self, batch: SinkBatch) -> None:
        assert self._ownership is not None
        writer = self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        self._ownership.check_repeated(writer, batch.transaction_rows)

    def _check_repeated_rows(self, writer: LogTableWriter, parts: TableParts, batch: SinkBatch) -> None:
        """Check the repeated rows of a table that a crash left ahead of ``_transactions``. These name it also where its
        rows were left out. That may be so after every park, because a parked table may have another name by then."""
        assert self._ownership is not None
        rows = batch.transaction_rows
        begun = parts.first_commit_lsns()
        parked = batch.content.parked
        touching = [
            writer.label in tables and (lsn in begun or not any(each.covers(lsn) for each in parked))
            for lsn, tables in zip(rows["commit_lsn"].to_pylist(), rows["tables"].to_pylist(), strict=True)
        ]
        asked = rows.filter(pa.array(touching, pa.bool_()))
        self._ownership.check_repeated(writer, asked, above=self.watermark(), prefix="_")

    # -- the driver's own tables -----------------------------------------------------------------------

    def _own_table(self, key: str, schema: pa.Schema) -> LogTableWriter:
        writer = self._writers.get(key)
        if writer is None:
            columns = [TableColumn(f.name, f.type, f.name) for f in schema]
            about = self._tables.about_own(key)
            writer = self._tables.open_or_create(key, key, columns, about)
            self._check(writer)
            if writer.columns != tuple(columns):
                raise SinkFailed(
                    f"{writer.title} has other columns: it was not written by this sink",
                    remedy="give the sink a root of its own",
                )
            writer.describe(about)
            self._writers[key] = writer
        return writer

    def _transactions_of(self, rows: pa.Table) -> TableCommit | None:
        writer = self._own_table(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA)
        n_marks = self.snapshot_log().n_mark_commits
        if n_marks != self._n_mark_commits:
            writer.refresh()
            self._check(writer)
            self._n_mark_commits = n_marks
        new = rows.filter(pc.greater(rows["commit_lsn"], writer.watermark(self._application_id)))
        if not new.num_rows:
            return None
        versions = {self._application_id: pc.max(new["commit_lsn"]).as_py()}
        files = self._own_files(writer, TRANSACTIONS_SCHEMA, "commit_lsn")
        for part in new.to_batches():
            files.write(part)
        return TableCommit(writer, files.close(), versions, self._marks, "commit_lsn")

    def _messages_of(self, batch: SinkBatch, ddl: list[Ddl]) -> TableCommit | None:
        """``ddl`` becomes what the batch tells of it."""
        ddl.clear()

        def take_ddl(rows: pa.RecordBatch) -> None:
            message_columns = (rows[name].to_pylist() for name in ("commit_lsn", "content", "xid"))
            ddl.extend(
                read for each in zip(*message_columns, strict=True) if (read := read_ddl(*each)) is not None
            )

        chunks = message_chunks(batch.message_batches(take_ddl))
        first = next(chunks, None)
        if first is None:
            return None
        writer = self._own_table(locations.MESSAGES, MESSAGES_SCHEMA)
        files = self._own_files(writer, MESSAGES_SCHEMA, "lsn")
        watermarks = {i: writer.watermark(i) for i in (self._application_id, self._messages_id)}
        moved: dict[str, int] = {}
        for chunk in itertools.chain((first,), chunks):
            new, versions = new_messages(chunk, watermarks, self._application_id, self._messages_id)
            for part in new.to_batches():
                files.write(part)
            moved |= {i: max(version, moved.get(i, NOTHING)) for i, version in versions.items()}
            # Messages outside of transactions come in the order of their LSNs, so none is kept twice over the chunks.
            # Those of one transaction share its commit LSN: that may rise after the last of its chunks only.
            watermarks[self._messages_id] = moved.get(self._messages_id, watermarks[self._messages_id])
        return TableCommit(writer, files.close(), moved, self._marks, "lsn") if moved else None

    def _own_files(self, writer: LogTableWriter, schema: pa.Schema, lsn_column: str) -> ParquetFiles:
        job = f"data-{uuid.uuid4().hex}-driver"
        return ParquetFiles(writer.location, job, schema, lsn_column, writer.ranged)


_ORDER: Final = (Action.STOP, Action.RESTART, Action.RETRY)


def _severity(failure: BaseException) -> int:
    """The lowest is raised: what needs a person before what a restart or a retry mends."""
    return _ORDER.index(failure.policy.action) if isinstance(failure, XidstreamError) else -1
