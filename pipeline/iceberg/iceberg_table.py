"""One Iceberg table under one writer: its watermarks, its columns, its commits, all on one snapshot.

What ``log_table`` promises of every format is kept here so:

- *Watermarks* are properties of the table (``table_properties``). A commit sets them together with its snapshot, and
  the snapshot's summary says them once more.
- *Read, then commit.* Each commit makes a snapshot, even one without files, and requires that the table's main branch
  is still at the snapshot that the watermarks were read from. So nobody else has come in between.
- *A lost race.* The table is loaded again. If watermarks and columns are what they were, the winner was harmless (a
  compaction, a user's property): the same files are committed after it. If not, ``SnapshotOutdated`` is raised.

pyiceberg (0.12) would repeat an append by itself, on whatever snapshot it then finds, and so after a run that has
taken over. So ``Transaction`` only gathers a commit here, and ``Table._do_commit`` sends it once. Manifests of a
commit that has lost are removed, and so is its metadata; where the outcome is unknown nothing is. Whether it has lost,
the table is asked (``_was_taken``).

*A file* is named by a ``DataFile`` made from what its writer reports, with the bounds of the LSNs: its footer is not
read. Files carry no field ids, because a segment is written before its table is known: the table's name mapping finds
the columns (``table_properties``).

*Small files* are merged after a commit, in another one (``merging``).

*Old snapshots* are expired by the commits themselves, some dozens at a time (``expiring``). Manifests are merged where
files are appended (``staged_commits``). What no snapshot names then is ``upkeep``'s to remove. A table whose files are
replaced again and again is another kind (``base_table``).

Runs on the driver; no Spark. Safe from any thread, but one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.expressions import And, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import TableProperties, Transaction
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
)

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.catalog_errors import answering
from xidstream.pipeline.iceberg.durable_io import written
from xidstream.pipeline.iceberg.expiring import line_of, old_snapshots, superseded
from xidstream.pipeline.iceberg.iceberg_types import arrow_type, iceberg_type
from xidstream.pipeline.iceberg.staged_commits import (
    KnownTransaction,
    StagedCommit,
    data_file_of,
    files_by_path,
    staged_append,
    staged_overwrite,
    staged_replacement,
)
from xidstream.pipeline.iceberg.table_properties import (
    COLUMNS,
    LSN,
    name_mapping_of,
    properties_of,
    sources_of,
    sources_property,
    versions_property,
    watermark_of,
)
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.erased_marks import ERASURES
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated, check_commit
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata as IcebergMetadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement
    from pyiceberg.table.update.snapshot import _SnapshotProducer

    from xidstream.pipeline.iceberg.merging import Merging
    from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile

MERGED: Final = "xidstream.merged"
"""In the summary of a snapshot that replaces small files, and does nothing else."""
ATTEMPTS: Final = 8
"""Commits after others that were harmless. A compaction is one commit; who commits all the time is no compaction."""
Newest = dict[str, "tuple[IcebergMetadata, str]"]
"""What the handles of one process have made of a table, by its label: the metadata, and where it is. The sink and its
log of snapshots both commit to ``_transactions``, each second or so. Who begins where the other ended loses no race."""


class IcebergTableWriter:
    """``label`` names the table in errors. ``location`` is where its files are, as ``log_tables`` takes it. ``ranged``
    are the columns whose ranges are told of each file. ``sources``: by field id, which column of the source a column
    has; also of columns that are gone."""

    upkeep: IcebergUpkeep | None = None
    """Is told of snapshots that were expired, for a table of the sink."""
    expires = True
    """Whether its commits expire old snapshots. Not where the run is to do that, which removes their files."""
    newest: Newest | None = None
    """For a table to which several handles of this process commit."""
    merging: Merging | None = None
    """Merges small files after commits, for a table of the sink."""

    def __init__(
        self, table: Table, location: Location, label: str, ranged: Collection[str] = ("_commit_lsn",)
    ) -> None:
        self._table = table
        self.location = location
        self.label = label
        self.ranged = ranged
        self._described: TableMetadata | None = None
        self._check_spec()
        self._read()

    @property
    def title(self) -> str:
        return f"Iceberg table {self.label}"

    def _check_spec(self) -> None:
        if self._table.spec().fields:
            raise SinkFailed(
                f"{self.title} is partitioned: this sink writes unpartitioned tables only",
                remedy="give the sink a namespace of its own",
            )

    @property
    def loaded(self) -> Table:
        """For this package: pyiceberg's table, as it was loaded."""
        return self._table

    def _read(self) -> None:
        """From the metadata that is loaded."""
        self._watermarks: dict[str, int] = {}
        self.sources = sources = sources_of(self._table.properties, self.title)
        self.columns = tuple(
            TableColumn(field.name, arrow_type(field.field_type), sources.get(field.field_id, field.name))
            for field in self._table.schema().fields
        )

    # -- what it holds ---------------------------------------------------------------------------------

    def watermark(self, application_id: str) -> int:
        """The version last committed under ``application_id`` in this snapshot, or ``NOTHING``.

        Raises SinkDiverged where the table was set back to an older snapshot."""
        if application_id not in self._watermarks:
            self._watermarks[application_id] = watermark_of(self._table, application_id, self.title)
        return self._watermarks[application_id]

    def read(self, columns: Sequence[str], lsn_column: str, first: int, last: int) -> pa.Table:
        """The rows of the snapshot whose ``lsn_column`` is from ``first`` to ``last``, in the contract's types."""
        lsn = Reference(lsn_column)
        least, greatest = literal(first), literal(last)
        between = And(GreaterThanOrEqual(term=lsn, value=least), LessThanOrEqual(term=lsn, value=greatest))
        rows = self._table.scan(row_filter=between, selected_fields=tuple(columns)).to_arrow()
        types = {column.name: column.type for column in self.columns}
        return rows.select(list(columns)).cast(pa.schema([(name, types[name]) for name in columns]))

    def paths(self) -> list[str]:
        """The files of the snapshot, relative to ``location``; of those elsewhere, where they are."""
        base = f"{self._table.location().rstrip('/')}/"
        return [task.file.file_path.removeprefix(base) for task in self._table.scan().plan_files()]

    def refresh(self) -> None:
        """Go on from the table as it is now."""
        with answering(self.title):
            self._table.refresh()
        self._read()

    # -- what it says of itself ------------------------------------------------------------------------

    def take_columns(self, columns: Sequence[TableColumn]) -> None:
        """Add the columns that the table has not, and widen those that have become wider, in a commit of its own,
        before any file with them is committed. Idempotent. Raises SnapshotOutdated as ``_alter``."""
        there = {column.name: column for column in self.columns}
        wider = [c for c in columns if c.name in there and c.type != there[c.name].type]
        more = [c for c in columns if c.name not in there]
        if not wider and not more:
            return
        transaction = self._table.transaction()
        update = transaction.update_schema()
        for column in wider:
            path: tuple[str, ...] = (column.name,)
            type_ = column.type
            while pa.types.is_list(type_):
                path, type_ = (*path, "element"), type_.value_type
            update.update_column(path, field_type=iceberg_type(type_))
        for column in more:
            update.add_column((column.name,), iceberg_type(column.type))
        update.commit()
        sources = sources_of(self._table.properties, self.title)
        named = {column.name: column.source for column in more}
        for field in transaction.table_metadata.schema().fields:
            if field.name in named:
                sources[field.field_id] = named[field.name]
        transaction.set_properties({COLUMNS: sources_property(sources)})
        self._alter(transaction)

    def describe(self, about: TableMetadata, brought: Sequence[VersionSince] = ()) -> None:
        """Set the properties that the table lacks, or has otherwise, and record the versions that are brought, in a
        commit of its own. Raises SnapshotOutdated, and SinkFailed where the recorded versions are not readable."""
        if about is self._described and len(brought) <= 1:
            return
        found = self._table.properties
        wanted = {**properties_of(about), **versions_property(found, brought, self.label)}
        missing = {key: value for key, value in wanted.items() if found.get(key) != value}
        if TableProperties.DEFAULT_NAME_MAPPING not in found:
            missing[TableProperties.DEFAULT_NAME_MAPPING] = name_mapping_of(self._table.schema())
        if missing:
            transaction = self._table.transaction()
            transaction.set_properties(missing)
            self._alter(transaction)
        self._described = about

    def _alter(self, transaction: Transaction) -> None:
        """Commit a change of the metadata, and go on from the table with it.

        Raises SnapshotOutdated if somebody else committed in between: the caller has read the watermark that chooses
        its rows, and the one of the new snapshot may be another."""
        self._require_snapshot(transaction)
        try:
            self._send(transaction)
        except CommitFailedException as error:
            raise SnapshotOutdated(self.label) from error
        self._read()

    # -- commits ---------------------------------------------------------------------------------------

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        merges: bool = True,
        removed: Sequence[str] = (),
        once: bool = False,
    ) -> None:
        """``LogTableWriter.commit``. Manifests are merged in the same commit, and small files after it.

        ``removed`` are paths of files, below ``location``, whose rows are in ``files``, or are to go. Such a commit is
        tried once: SnapshotOutdated is raised, too, where one of them is not in the snapshot, and where anybody else
        has committed since the table was read. ``once``: without such files, too."""
        moved = self.begin(files, versions, marks)
        for _ in range(ATTEMPTS):
            staged = self.stage(files, moved, lsn_column, removed)
            try:
                self._send(staged.transaction)
                break
            except CommitFailedException as error:
                staged.discard()
                if removed or once:
                    raise SnapshotOutdated(self.label) from error
                self.reload_behind_harmless(moved)
        else:
            raise SnapshotOutdated(self.label)
        self._complete(staged, moved)
        if merges and not removed:
            self.merge_behind(files, lsn_column)

    def merge_behind(self, added: Sequence[WrittenFile], lsn_column: str) -> None:
        """Merge small files, if there are many after a commit that added these. Raises what a commit raises whose
        outcome is not known."""
        if self.merging is not None and added:
            self.merging.follow(self, added, lsn_column)

    def stage_replacement(
        self, added: Sequence[WrittenFile], removed: Sequence[DataFile], lsn_column: str
    ) -> StagedCommit:
        """Write the manifests of a commit that puts ``added``, which have the rows of ``removed`` and no other, in the
        place of these files of the snapshot. After an exception nobody needs them, and they are removed, but for what
        pyiceberg's other threads are still writing: that becomes a leftover."""
        transaction = KnownTransaction(self._table)
        files = [data_file_of(self._table, file, lsn_column) for file in added]
        producer = staged_replacement(transaction, files, removed, {MERGED: "true"})
        return self._staged(transaction, producer, self._expire(transaction))

    def replace(self, staged: StagedCommit) -> None:
        """Make the commit of a replacement. It is tried once.

        Raises SnapshotOutdated where somebody else has committed since the table was read: nothing was done then."""
        reach("iceberg_committing")
        try:
            self._send(staged.transaction)
        except CommitFailedException as error:
            staged.discard()
            raise SnapshotOutdated(self.label) from error
        self._complete(staged, {})

    # -- a commit in its steps: for this package, where several tables are committed at once ------------

    def begin(
        self, files: Sequence[WrittenFile], versions: Mapping[str, int], marks: Mapping[str, int]
    ) -> Mapping[str, int]:
        """All that a commit moves. Raises as ``commit``."""
        check_commit(self, files, versions, marks)
        moved = {**marks, **versions}
        self._take_newest(moved)
        return moved

    def stage(
        self,
        files: Sequence[WrittenFile],
        moved: Mapping[str, int],
        lsn_column: str,
        removed: Sequence[str] = (),
    ) -> StagedCommit:
        """Write the manifests of a commit. The catalog names none of them yet. Raises SnapshotOutdated where one of
        ``removed`` is not in the snapshot."""
        # A version may be an Lsn, whose text is another one.
        properties = {
            f"{LSN}{application_id}": str(int(version)) for application_id, version in moved.items()
        }
        transaction = KnownTransaction(self._table)
        transaction.set_properties(properties)
        added = [data_file_of(self._table, file, lsn_column) for file in files]
        if removed:
            producer = staged_overwrite(transaction, added, self._named(removed), properties)
        else:
            producer = staged_append(transaction, added, properties)
        expired = self._expire(transaction)
        staged = self._staged(transaction, producer, expired)
        reach("iceberg_committing")
        return staged

    def take(self, staged: StagedCommit, moved: Mapping[str, int]) -> None:
        """Go on from the table as it is, after the catalog took ``staged`` and did not say what it made of it. Raises
        SnapshotOutdated where somebody has moved a watermark again meanwhile."""
        before = self._table.metadata
        with answering(self.title):
            self._table.refresh()
        # As ``Table._do_commit`` does, which leaves to the next one what it could not remove.
        self._table.catalog._delete_old_metadata(self._table.io, before, self._table.metadata)
        self._tell_newest()
        self._complete(staged, moved)

    def _complete(self, staged: StagedCommit, moved: Mapping[str, int]) -> None:
        """After the catalog took it, and the table was read again."""
        self._remove_merged(staged.producer)
        if staged.expired and self.upkeep is not None:
            self.upkeep.note(self._table, self.location, self.label, staged.expired, staged.line)
        self._read()
        for application_id, version in moved.items():
            if self.watermark(application_id) != version:
                raise SnapshotOutdated(self.label)

    def _remove_merged(self, producer: _SnapshotProducer[Any]) -> None:
        """A commit that merges manifests has written one of its own files first, and merged it at once: that one no
        snapshot has ever named."""
        snapshot = self._table.snapshot_by_id(producer.snapshot_id)
        if len(producer._written_manifests) < 2 or snapshot is None:
            return
        named = {manifest.manifest_path for manifest in snapshot.manifests(self._table.io)}
        for path in producer._written_manifests:
            if path not in named:
                self._table.io.delete(path)

    def _send(self, transaction: Transaction) -> None:
        """Once. Raises CommitFailedException, and what the catalog's driver raises: then nobody knows what happened."""
        with answering(self.title), written() as paths:
            try:
                self._table._do_commit(transaction._updates, self._required(transaction))
            except CommitFailedException:
                if not self._was_taken(transaction, paths):
                    for path in paths:
                        self._table.io.delete(path)
                    raise
            except ValueError as error:
                # By pyiceberg, ahead of all that it writes: the main branch is where it was.
                if not self._expires_gone(transaction):
                    raise
                raise CommitFailedException("others have expired the same snapshots") from error
        self._tell_newest()

    def _expires_gone(self, transaction: Transaction) -> bool:
        """Whether a commit expires snapshots that the table, as the catalog has it now, has not any more."""
        expired = {
            i for u in transaction._updates if isinstance(u, RemoveSnapshotsUpdate) for i in u.snapshot_ids
        }
        if not expired:
            return False
        newest = self._table.catalog.load_table(self._table.name())
        return not expired <= {each.snapshot_id for each in newest.metadata.snapshots}

    def _was_taken(self, transaction: Transaction, paths: Collection[str]) -> bool:
        """Whether a commit that the catalog has refused is the table's newest all the same: a driver that sends a
        request again because its answer was lost (Glue's does) is told that somebody else was first, and that was the
        same commit. ``paths``: of the metadata that were written for it.

        Raises CommitStateUnknownException where others have committed after it, and what the driver raises."""
        try:
            newest = self._table.catalog.load_table(self._table.name())
        except NoSuchTableError:
            return False  # somebody has dropped it
        made = {u.snapshot.snapshot_id for u in transaction._updates if isinstance(u, AddSnapshotUpdate)}
        if newest.metadata_location in paths or newest.metadata.current_snapshot_id in made:
            self._table.metadata, self._table.metadata_location = newest.metadata, newest.metadata_location
            return True
        known = {each.metadata_file for each in newest.metadata.metadata_log}
        if not known.isdisjoint(paths) or any(each.snapshot_id in made for each in newest.metadata.snapshots):
            raise CommitStateUnknownException("a commit was refused, and is there")
        return False

    def has(self, staged: StagedCommit) -> bool:
        """Whether the table has this commit, as the catalog has it now. Raises what the catalog's driver raises."""
        try:
            newest = self._table.catalog.load_table(self._table.name())
        except NoSuchTableError:
            return False  # somebody has dropped it
        return any(each.snapshot_id == staged.producer.snapshot_id for each in newest.metadata.snapshots)

    def _required(self, transaction: Transaction) -> tuple[TableRequirement, ...]:
        return *transaction._requirements, AssertTableUUID(uuid=self._table.metadata.table_uuid)

    def _tell_newest(self) -> None:
        if self.newest is not None:
            self.newest[self.label] = self._table.metadata, self._table.metadata_location

    def _require_snapshot(self, transaction: Transaction) -> None:
        current = self._table.metadata.current_snapshot_id
        asserted = {"ref": MAIN_BRANCH, "snapshot-id": current}
        transaction._stage((), (AssertRefSnapshotId.model_validate(asserted),))

    def _take_newest(self, moved: Mapping[str, int]) -> None:
        """Go on from what another handle of this process has committed. Raises as ``reload_behind_harmless``."""
        found = None if self.newest is None else self.newest.get(self.label)
        if found is None or _sequence(found[0]) <= _sequence(self._table.metadata):
            return
        before = self._made_from(moved)
        self._table.metadata, self._table.metadata_location = found
        self._read()
        if self._made_from(moved) != before:
            raise SnapshotOutdated(self.label)

    def reload_behind_harmless(self, moved: Mapping[str, int]) -> None:
        """Raise SnapshotOutdated unless all that this commit was made from is as it was."""
        before = self._made_from(moved)
        self.refresh()
        if self._made_from(moved) != before:
            raise SnapshotOutdated(self.label)

    def _made_from(self, moved: Mapping[str, int]) -> tuple[object, ...]:
        # A snapshot that was read before an erasure may have rows that were erased.
        watermarks = {each: self.watermark(each) for each in (*moved, ERASURES)}
        return watermarks, self._table.schema(), self._table.location()

    def _named(self, paths: Sequence[str]) -> list[DataFile]:
        """What the snapshot has of these files. Raises SnapshotOutdated where it has not all of them."""
        named = files_by_path(self._table, self._table.current_snapshot())
        if not named.keys() >= set(paths):
            raise SnapshotOutdated(self.label)
        return [named[path] for path in paths]

    def _staged(
        self, transaction: Transaction, producer: _SnapshotProducer[Any], expired: Sequence[Snapshot]
    ) -> StagedCommit:
        line = line_of(self._table.metadata) if expired else ()
        return StagedCommit(transaction, producer, expired, line, self._required(transaction))

    def expire_until(self, before_ms: int | None) -> tuple[Sequence[Snapshot], Collection[int]]:
        """Have the table forget, in a commit of its own, the snapshots that others followed before that time; None:
        all but the newest. What a tag or a branch comes from stays, and with ``gc.enabled=false`` all do. Returns those
        that went, and the ids that the main branch came from. Raises SnapshotOutdated."""
        metadata = self._table.metadata
        line, expired = line_of(metadata), superseded(metadata, before_ms)
        if expired:
            transaction = KnownTransaction(self._table)
            ids = [each.snapshot_id for each in expired]
            transaction._stage((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids}),))
            self._alter(transaction)
        return expired, line

    def _expire(self, transaction: Transaction) -> list[Snapshot]:
        """Have the commit remove the oldest snapshots, if there are many."""
        expired = old_snapshots(self._table.metadata) if self.expires else []
        if expired:
            ids = [each.snapshot_id for each in expired]
            transaction._stage((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids}),))
        return expired


def _sequence(metadata: IcebergMetadata) -> int:
    """How many snapshots were made; a table of format version 1 does not say."""
    return int(getattr(metadata, "last_sequence_number", 0))
