"""One Delta table under one writer: its watermarks, its columns, its commits, all on one snapshot.

Delta's own *application transactions* say what a table holds: a commit carries (application id, version), and
here the version is a commit LSN. ``DeltaTableWriter`` keeps a handle on one version of the table: the
watermark that decides which rows are written is read from the same snapshot that the commit is checked
against, so a writer that commits under the same application id in between makes the commit fail
(``SnapshotOutdated``), and no interleaving of two runs, or of a run and its own ghost, writes a row twice. Who of
the two goes on, from a new snapshot, is the sink's to say.

deltalake checks that no other commit touched the application id since the snapshot; it accepts a version
lower than the last from a fresh handle. That a version never falls is therefore checked here. It also commits again
by itself where the answer to a commit was lost, and then meets its own: that, too, is an outdated snapshot, and the
next one shows that nothing is left to write.

A commit to a local table, with all that it needs, is on disk when the call that made it returns, and one that a
dead process made is when the table is opened (``durable_log``): its watermark says that rows may be confirmed.

The log gets its checkpoints here, after a commit, and in a folder more than deltalake would write where they spare
more than they cost (``checkpoint_pace``). One that fails fails no commit, which was made: it is told, and tried again
some commits later. Without a checkpoint the log is longer, and nothing else.

deltalake looks for expired files of the log after every commit, and lists the whole log for it. Here one commit in
``CHECKPOINT_EVERY`` looks for them, as Spark does with its checkpoints. For a table of the sink ``upkeep`` does it
beside the commits.

A commit that leaves many small files is followed by one that replaces them by one file (``small_files``), or that takes
in what ``upkeep`` has merged. Files are only removed from the very version that the snapshot shows: deltalake does not
see that somebody else has replaced them, because ``optimize`` says that it changes no data, and the rows would be there
twice. For the same reason our own removals say that data changes. An ``optimize`` that began before them is refused
then; it would bring their rows back. The replacing file says that no data changes, so a follower that passes over
removals reads none of its rows again.

After any failure the handle is of no further use: the caller drops the writer and opens a new one, which
reads from the log what did happen (a commit whose answer was lost is found there).

Runs on the driver; deltalake only, no Spark. Safe from any thread, but one at a time.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake import Schema as DeltaSchema
from deltalake import Transaction as AppTransaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from xidstream.pipeline import events
from xidstream.pipeline.delta.checkpoint_pace import CheckpointPace
from xidstream.pipeline.delta.durable_log import DurableLog
from xidstream.pipeline.delta.kept_tables import KeptTables, opened
from xidstream.pipeline.delta.plain_files import check_plain_files, is_mergeable
from xidstream.pipeline.delta.stored_columns import columns_of, delta_field
from xidstream.pipeline.delta.table_handle import TableHandle
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.errors import SinkFailed, UsageError, XidstreamError, known_reason
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.file_rows import rows_of_file
from xidstream.pipeline.log_tables.layout import layout_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, NOTHING, SnapshotOutdated, check_commit
from xidstream.pipeline.log_tables.parquet_files import ColumnRange, WrittenFile
from xidstream.pipeline.log_tables.relation_history import VERSIONS, VersionSince, recorded_with
from xidstream.pipeline.log_tables.small_files import OWN, Gathering, many_small, merge
from xidstream.pipeline.log_tables.table_metadata import (
    NOTHING_KNOWN,
    TableMetadata,
    columns_with_statistics,
)
from xidstream.pipeline.settings.delta_retention import PROPERTIES as RETENTION
from xidstream.pipeline.settings.delta_retention import RECORDED

CHECKPOINT_EVERY: Final = 100
"""So many commits lie between two checkpoints at most, unless the table has ``delta.checkpointInterval``."""
MERGED: Final = "xidstream.merged"
"""In the ``commitInfo`` of a commit that replaces small files, and does nothing else."""
ERASED: Final = "xidstream.erased"
"""In the ``commitInfo`` of a commit that takes rows of erased keys out of files, and does nothing else."""
_LOGGER: Final = logging.getLogger(__name__)
_COMMITS_ALONE: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_Writer = TypeVar("_Writer", bound="DeltaTableWriter")
_FAILURES: Final = (OSError, DeltaError, pa.ArrowException, XidstreamError)
"""Errors that are no reason to fail a commit that was made."""


class DeltaTableWriter:
    """``label`` names the table in errors."""

    upkeep: Upkeep | None = None
    """Is told of commits, for a table of the sink."""

    def __init__(self, table: TableHandle, location: Location, label: str) -> None:
        self._table = table
        self.location = location
        self._described: TableMetadata | None = None
        """What the table was last asked to say about itself; None where its properties may be others since."""
        self._merges_from = 0
        """The version: after a failure a while goes by before the next try."""
        self._gathering = Gathering()
        """Counts the small files of the table, as far as this writer knows of them."""
        self.label = label
        if table.metadata().partition_columns:
            raise SinkFailed(
                f"Delta table {label} is partitioned: this sink writes unpartitioned tables only",
                remedy="give the sink a root of its own",
            )
        self._read_columns()
        self._log = DurableLog(location, self.version)
        """Makes the commits in ``_delta_log`` durable."""
        self._cleaned_version = self.version
        """The version at which the log was last cleaned."""
        interval = self.property_of("delta.checkpointInterval")
        most = (
            int(interval)
            if interval is not None and interval.isdigit() and int(interval)
            else CHECKPOINT_EVERY
        )
        may_more = location.is_local and interval is None
        self._checkpoints = CheckpointPace(self.version, most, may_more=may_more)
        if may_more:
            self._checkpoints.found(*self._checkpoint_there())
        self._is_failure_logged = False
        """Whether the last checkpoint failed: such failures are logged once in a row."""

    @classmethod
    def open(
        cls: type[_Writer], location: Location, label: str, kept: KeptTables | None = None
    ) -> _Writer | None:
        """The table as it is now, or None where there is none. With a handle of ``kept``, which the next writer of this
        table takes over: there is one at a time."""
        try:
            table = opened(location) if kept is None else kept.newest(location)
        except TableNotFoundError:
            return None
        return cls(table, location, label)

    @classmethod
    def open_or_create(
        cls: type[_Writer],
        location: Location,
        label: str,
        columns: Sequence[TableColumn],
        about: TableMetadata = NOTHING_KNOWN,
        brought: Sequence[VersionSince] = (),
        kept: KeptTables | None = None,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> _Writer:
        """The table, made with ``columns`` where there is none; safe against a crash and against a race. ``kept``: as
        ``open``. ``marks``: versions (application id -> version) of a table that is made here."""
        found = cls.open(location, label, kept)
        if found is not None:
            return found
        schema = DeltaSchema([delta_field(column, about.comments.get(column.name)) for column in columns])
        properties = {**about.missing({}), **_versions({}, brought, label)}
        try:
            DeltaTable.create(
                location.uri,
                schema=schema,
                mode="ignore",
                description=about.description or None,
                configuration=properties,
                commit_properties=CommitProperties(app_transactions=_transactions(marks)),
                raise_if_key_not_exists=False,
                storage_options=location.storage_options,
            )
        except CommitFailedError:
            pass  # Another process made it first: what it made is what counts.
        found = cls.open(location, label, kept)
        if found is None:
            raise SinkFailed(f"Delta table {label} was created but is not there")
        location.sync_parents()
        return found

    def _read_columns(self) -> None:
        self.columns = columns_of(self._table)

    @property
    def title(self) -> str:
        return f"Delta table {self.label}"

    @property
    def version(self) -> int:
        """Delta's version of the snapshot."""
        return int(self._table.version())

    # -- what it holds ----------------------------------------------------------------------------------

    def watermark(self, application_id: str) -> int:
        """The version last committed under ``application_id`` in this snapshot, or ``NOTHING``."""
        version = self._table.transaction_version(application_id)
        return NOTHING if version is None else int(version)

    def files(self) -> pa.Table:
        """The files of the snapshot, as deltalake lists them: ``path``, ``size_bytes``, ``num_records``, ``min.…``."""
        return pa.table(self._table.get_add_actions(flatten=True))

    def paths(self) -> list[str]:
        found: list[str] = self.files()["path"].to_pylist()
        return found

    def removed_files(self, hours: int) -> list[str]:
        """The paths of files that a commit removed longer ago than this, as far as the log knows, and that are
        there."""
        return self._table.vacuum(hours, dry_run=True, enforce_retention_duration=False)

    def check_plain(self) -> None:
        """Raise Unsupported where the rows of the snapshot's files are not the table's."""
        check_plain_files(self._table, self.label)

    def read(self, columns: Sequence[str], lsn_column: str, first: int, last: int) -> pa.Table:
        """The rows of the snapshot whose ``lsn_column`` is from ``first`` to ``last``."""
        files = self.files()
        least, greatest = f"min.{lsn_column}", f"max.{lsn_column}"
        if least in files.column_names:  # no file has statistics of it otherwise
            is_in = (pc.field(least) <= last) & (pc.field(greatest) >= first)
            files = files.filter(is_in | pc.field(least).is_null() | pc.field(greatest).is_null())
        lsn = pc.field(lsn_column)
        paths = files["path"].to_pylist()
        rows = self._read(paths, dict.fromkeys([*columns, lsn_column]), (lsn >= first) & (lsn <= last))
        return rows.select(list(columns))

    def rows_of(self, paths: Collection[str]) -> pa.Table:
        """The rows of these files of the snapshot, all columns. The paths are as in ``files``."""
        return self._read([path for path in self.paths() if path in paths])

    def _read(
        self, paths: Iterable[str], names: Iterable[str] | None = None, wanted: pc.Expression | None = None
    ) -> pa.Table:
        self.check_plain()
        schema = pa.schema(self._table.schema().to_arrow())
        if names is not None:
            schema = pa.schema([schema.field(name) for name in names])
        read = (rows_of_file(self.location, path, schema, wanted) for path in paths)
        return pa.concat_tables([schema.empty_table(), *read])

    def refresh(self) -> None:
        """Go on from the table as it is now, all of which is on the disk when this returns."""
        before = self.version
        self._table.update_incremental()
        if self.version > before + 1:
            # What others committed may be other properties.
            self._described = None
        self._log.flush_up_to(self.version)

    # -- what it says of itself -------------------------------------------------------------------------

    def property_of(self, name: str) -> str | None:
        """A property that the table has; None where it has none of this name, or an empty one."""
        return self._table.metadata().configuration.get(name) or None

    @property
    def properties(self) -> dict[str, str]:
        """All of the table."""
        return dict(self._table.metadata().configuration)

    @property
    def ranged(self) -> list[str]:
        """The columns whose ranges the log has of each file, or of those in the order of a layout, as the table's
        properties say."""
        properties = self._table.metadata().configuration
        return [*columns_with_statistics(properties), *layout_columns(self.columns, properties)]

    def add_columns(self, columns: Sequence[TableColumn]) -> None:
        """Widen the table, in a commit of its own, before any file with the new columns is committed.

        Idempotent. An append with a schema wider than the table's would succeed and lose the column. Raises as
        ``_alter``.
        """
        if not columns:
            return
        fields = [delta_field(column) for column in columns]
        self._alter(lambda table: table.alter.add_columns(fields, post_commithook_properties=_COMMITS_ALONE))
        self._read_columns()
        missing = {c.name for c in columns} - {c.name for c in self.columns}
        if missing:
            raise SinkFailed(f"Delta table {self.label} did not take the columns {sorted(missing)}")

    def take_columns(self, columns: Sequence[TableColumn]) -> None:
        known = {column.name for column in self.columns}
        self.add_columns([column for column in columns if column.name not in known])

    def describe(self, about: TableMetadata, brought: Sequence[VersionSince] = ()) -> None:
        """Set the properties that the table lacks, or has otherwise, and record the versions that are brought, in a
        commit of its own.

        That is after an ALTER, and for a table that an earlier version of this sink made. ``about`` is the newest of
        several versions'. Raises as ``_alter``, and SinkFailed where the recorded versions are not readable.
        """
        if about is self._described and len(brought) <= 1:
            return
        found = self._table.metadata().configuration
        missing = {**about.missing(found), **_versions(found, brought, self.label)}
        # deltalake then lists more features of a table that lists some, which older readers refuse (docs/limits.md).
        # The retention alone is not worth that.
        lists_features = self._table.protocol().min_reader_version >= 3
        if missing and not (lists_features and missing.keys() <= RETENTION):
            self._alter(
                lambda table: table.alter.set_table_properties(
                    missing, raise_if_not_exists=False, post_commithook_properties=_COMMITS_ALONE
                )
            )
        self._described = about

    def _alter(self, change: Callable[[DeltaTable], None]) -> None:
        """Commit a change of the metadata, and go on from the snapshot with it.

        Raises SnapshotOutdated if somebody else committed in between, even rows alone, which deltalake lets pass. The
        caller has read the watermark that chooses its rows, and the one of the new snapshot may be another.
        """
        before = self.version
        try:
            change(self._table)
        except CommitFailedError as error:
            raise SnapshotOutdated(self.label) from error
        self.refresh()
        if self.version > before + 1:
            raise SnapshotOutdated(self.label)
        self._table.take_own(before, {})

    # -- commits ----------------------------------------------------------------------------------------

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        removed: Sequence[str] = (),
        merges: bool = True,
    ) -> None:
        """Append ``files`` and move the watermarks ``versions`` (application id -> commit LSN), atomically.

        Small files may be replaced by one with the same rows, in a commit after this one, if the caller ``merges``:
        then commits of others that began before are refused.

        ``marks`` are versions that may also stay as they are. ``removed`` are paths of files whose rows are in
        ``files``, or are to go. Raises SnapshotOutdated where somebody moved one of the versions since the snapshot,
        removed one of these files, or changed something else about the table; UsageError where a version would not
        rise; SinkFailed where two of ``files`` are the same file, so that the rows of one are gone.
        """
        check_commit(self, files, versions, marks)
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [_add_action(file, lsn_column, now_ms) for file in files]
        actions += [RemoveAction(path, True, now_ms) for path in removed]
        moved = {**marks, **versions}
        before = self.version
        self._write_log(actions, moved)
        self._settle(moved)
        self._gathering.add(files)
        merging = self._merge(lsn_column, now_ms) if merges and files and not removed else []
        if merging:
            # In a commit of its own: a follower that passes over it misses no new row.
            with suppress(SnapshotOutdated):
                self._write_log(merging, moved, commit_metadata={MERGED: "true"})
            self._settle(moved)
        self._keep_log_short(before + (2 if merging else 1))
        if self.upkeep is not None:
            self.upkeep.note(self.location, self.label, lsn_column, self.version)

    def _merge(self, lsn_column: str, now_ms: int) -> list[AddAction | RemoveAction]:
        """What replaces small files by one, if there are many. None is merged where they cannot be read: what is wrong
        with files of before is no reason to keep new rows waiting."""
        prepared = self.upkeep.take_merge(self.location) if self.upkeep is not None else None
        if prepared is None and not self._gathering.is_due:
            return []
        files = self.files()
        self._gathering.look(files)
        if self.upkeep is not None and prepared is not None:
            if is_mergeable(self._table) and set(prepared.removed) <= set(files["path"].to_pylist()):
                return _replacing(prepared.files, prepared.removed, lsn_column, now_ms)
            self.upkeep.discard(self.location, prepared)  # others have changed these files since
        replaced = many_small(files, lsn_column) if self.version >= self._merges_from else None
        if not replaced or not is_mergeable(self._table):
            return []
        directory = f"{OWN}{uuid.uuid4().hex}-merged"
        try:
            # The columns of this snapshot: another writer may have widened the table since it was opened.
            columns = columns_of(self._table)
            ranged, by = columns_with_statistics(self.properties), layout_columns(columns, self.properties)
            merged = merge(self.location, replaced, columns, lsn_column, directory, ranged, by)
        except (OSError, pa.ArrowException, XidstreamError) as error:
            self._merges_from = self.version + CHECKPOINT_EVERY
            text = f"Delta table {self.label}: small files could not be merged ({type(error).__name__})"
            _LOGGER.warning(events.Event("small_files_not_merged", text, table=self.label))
            return []
        self._gathering.forget()
        return _replacing(merged, replaced["path"].to_pylist(), lsn_column, now_ms)

    def swap(
        self,
        added: Sequence[AddAction],
        removed: Sequence[str] | None,
        marks: Mapping[str, int],
        columns: Sequence[TableColumn] | None = None,
    ) -> None:
        """Replace the files ``removed`` (None: all of them) by ``added``, and set the versions ``marks``, atomically.

        ``columns``, which go with None alone, are the table's from here on. Raises as ``commit``.
        """
        for application_id, version in marks.items():
            if not self.watermark(application_id) <= version <= MAX_VERSION:
                raise UsageError(f"Delta table {self.label}: {application_id} would fall to {version}")
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [*added]
        actions += [RemoveAction(path, True, now_ms) for path in removed or ()]
        schema = None if columns is None else DeltaSchema([delta_field(column) for column in columns])
        before = self.version
        self._write_log(actions, marks, mode="append" if removed is not None else "overwrite", schema=schema)
        self._settle(marks)
        if schema is not None:
            self._read_columns()
        self._keep_log_short(before + 1)

    def replace(self, added: Sequence[WrittenFile], removed: Sequence[str], marks: Mapping[str, int]) -> None:
        """Put ``added``, which have no change that ``removed`` had not, in the place of these files, and set the
        versions ``marks``, atomically. Raises as ``commit``."""
        actions = _replacing(added, removed, "_commit_lsn", int(time.time() * 1000))
        before = self.version
        self._write_log(actions, marks, commit_metadata={ERASED: "true"})
        self._settle(marks)
        self._keep_log_short(before + 1)

    def _write_log(
        self,
        actions: list[AddAction | RemoveAction],
        moved: Mapping[str, int],
        *,
        mode: str = "append",
        schema: DeltaSchema | None = None,
        commit_metadata: dict[str, str] | None = None,
    ) -> None:
        """Commit. ``commit_metadata`` goes into its ``commitInfo``.

        Raises SnapshotOutdated where nothing was committed, or where the answer is lost.
        """
        removes = mode != "append" or any(isinstance(action, RemoveAction) for action in actions)
        try:
            self._table.create_write_transaction(
                actions,
                mode=mode,
                schema=schema or self._table.schema(),
                partition_by=[],
                commit_properties=CommitProperties(
                    custom_metadata=commit_metadata,
                    app_transactions=_transactions(moved),
                    max_commit_retries=0 if removes else None,
                ),
                post_commithook_properties=_COMMITS_ALONE,
            )
        except CommitFailedError as error:
            raise SnapshotOutdated(self.label) from error

    def _settle(self, moved: Mapping[str, int]) -> None:
        """Go on from the snapshot with what was just committed."""
        before = self.version
        self.refresh()
        if self.version == before + 1:  # the commit is ours
            self._table.take_own(before, moved)
            return
        # A commit between ours and this refresh is seen here, or by the next commit.
        for application_id, version in moved.items():
            if self.watermark(application_id) != version:
                raise SnapshotOutdated(self.label)

    # -- its log ----------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write a checkpoint of this version, so that the commits before it are needed no more."""
        self._table.create_checkpoint()

    def _keep_log_short(self, ours: int) -> None:
        """After a commit of ours, which made the version ``ours``. What fails here is told, and tried again: the
        commit stands."""
        is_overtaken = self.version != ours
        try:
            if is_overtaken and self._checkpoints.is_due(self.version, is_overtaken=True):
                self._checkpoints.made_by_another(self._checkpoint_there()[0])
            if self._checkpoints.is_due(self.version, is_overtaken=is_overtaken):
                self._write_checkpoint()
            self._clean_if_due()
        except _FAILURES as error:
            self._checkpoints.failed(self.version)
            if not self._is_failure_logged:
                self._is_failure_logged = True
                kind = known_reason(error) or type(error).__name__
                text = (
                    f"Delta table {self.label}: no checkpoint of its log could be written ({kind}); its commits "
                    "stand, and this is tried again"
                )
                _LOGGER.warning(events.Event("checkpoint_failed", text, table=self.label))

    def _checkpoint_there(self) -> tuple[int, int]:
        """The version of the log's last checkpoint, NOTHING where none is known, and its bytes."""
        try:
            checkpoint = json.loads(self.location.read("_delta_log/_last_checkpoint"))
            return int(checkpoint["version"]), int(checkpoint.get("sizeInBytes") or 0)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return NOTHING, 0  # it is a hint, and one more checkpoint does no harm

    def _write_checkpoint(self) -> None:
        """In a folder the handle goes on from the checkpoint: what it lists begins there."""
        began_s = time.monotonic()
        self.checkpoint()
        n_bytes = self._log.flush_checkpoint(self.version)
        if self.location.is_local:
            self._table = opened(self.location, self.version)
        self._checkpoints.made(self.version, time.monotonic() - began_s, n_bytes)
        self._is_failure_logged = False

    def _clean_if_due(self) -> None:
        is_due = self.version // CHECKPOINT_EVERY > self._cleaned_version // CHECKPOINT_EVERY
        if not is_due or self.upkeep is not None or self.property_of(RECORDED):
            return
        if (self.property_of("delta.enableExpiredLogCleanup") or "").lower() != "false":
            self._table.cleanup_metadata()
        self._cleaned_version = self.version


def _transactions(versions: Mapping[str, int]) -> list[AppTransaction]:
    return [AppTransaction(application_id, version) for application_id, version in versions.items()]


def _versions(found: Mapping[str, str | None], brought: Sequence[VersionSince], label: str) -> dict[str, str]:
    """The property that records ``brought``, where ``found`` does not."""
    recorded = found.get(VERSIONS)
    value = recorded_with(recorded, brought, label)
    return {} if value is None or value is recorded else {VERSIONS: value}


def _replacing(
    added: Sequence[WrittenFile], removed: Sequence[str], lsn_column: str, now_ms: int
) -> list[AddAction | RemoveAction]:
    return [
        *(_add_action(file, lsn_column, now_ms, is_change=False) for file in added),
        *(RemoveAction(path, True, now_ms) for path in removed),
    ]


def _add_action(file: WrittenFile, lsn_column: str, now_ms: int, *, is_change: bool = True) -> AddAction:
    stats: dict[str, object] = {"numRecords": file.n_rows}
    if file.max_commit_lsn:
        # Lets a reader that is bounded by an LSN skip files.
        ranges = [ColumnRange(lsn_column, file.min_commit_lsn, file.max_commit_lsn), *file.ranges]
        stats["minValues"] = {each.column: each.least for each in ranges}
        stats["maxValues"] = {each.column: each.greatest for each in ranges}
    return AddAction(file.path, file.size, {}, now_ms, is_change, json.dumps(stats))
