"""The manifests of a commit to an Iceberg table, written before the catalog knows of it.

There are three kinds of snapshots: an *append* (``staged_append``), an *overwrite* or *delete*, which takes files away
and may put others in their place (``staged_overwrite``, and ``staged_base`` for tables that have no other), and a
*replace*, a change of files without a change of rows (``staged_replacement``). Whose files these are, and who sends the
commit, is ``iceberg_table``'s and ``base_table``'s to say.

A file is named by a ``DataFile`` made from what its writer reports, with the bounds of some columns: its footer is not
read.

Called by this package alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestFile
from pyiceberg.table import Transaction
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _ManifestMergeManager, _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT, Record
from pyiceberg.types import IcebergType, PrimitiveType

from xidstream.pipeline.iceberg.catalogs import bare

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate
    from pyiceberg.table.update.snapshot import _SnapshotProducer

    from xidstream.pipeline.log_tables.parquet_files import WrittenFile


MANIFEST_BYTES: Final = 1 << 20
"""A merge writes each manifest below this size anew, with some thousand files in it. Iceberg's own 8 MiB would be
seconds of CPU in one commit of ours."""
MERGES_AT: Final = 8
"""So many manifests of a base table become one."""


@dataclass(frozen=True)
class StagedCommit:
    """A commit whose manifests are written, and that no catalog knows. ``expired``: the snapshots that it removes.
    ``line``: the ids of those that the main branch comes from, these among them. ``requirements``: what the catalog is
    to check before it takes it."""

    transaction: Transaction
    producer: _SnapshotProducer[Any]
    expired: Sequence[Snapshot]
    line: Collection[int]
    requirements: tuple[TableRequirement, ...]

    def discard(self) -> None:
        """Remove what it has written: only where the catalog has surely not taken it."""
        self.producer._clean_all_uncommitted()


class KnownTransaction(Transaction):
    """A transaction whose updates do not matter to the snapshot that it makes: what it goes on from is the table's
    metadata, or these ``metadata``, which ``updates`` have made of them. pyiceberg's own copies all metadata of the
    table each time that it is asked for them, fourteen times for a commit: half of what a commit costs."""

    def __init__(
        self, table: Table, metadata: TableMetadata | None = None, updates: tuple[TableUpdate, ...] = ()
    ) -> None:
        super().__init__(table)
        self._known = table.metadata if metadata is None else metadata
        self._updates += updates

    @property
    def table_metadata(self) -> TableMetadata:
        return self._known


def staged_append(
    transaction: Transaction, added: Sequence[DataFile], summary: Mapping[str, str]
) -> _SnapshotProducer[Any]:
    """``summary``: goes into the snapshot's summary. Manifests are merged."""
    producer = transaction.update_snapshot(snapshot_properties=dict(summary)).merge_append()
    return _written(producer, added, ())


def staged_overwrite(
    transaction: Transaction,
    added: Sequence[DataFile],
    removed: Sequence[DataFile],
    summary: Mapping[str, str],
) -> _SnapshotProducer[Any]:
    """``removed`` are of the snapshot."""
    kind = Operation.DELETE if removed and not added else Operation.OVERWRITE
    producer = _OverwriteFiles(kind, transaction, transaction._table.io, snapshot_properties=dict(summary))
    return _written(producer, added, removed)


def staged_base(
    transaction: Transaction,
    added: Sequence[DataFile],
    removed: Sequence[DataFile],
    summary: Mapping[str, str],
) -> _SnapshotProducer[Any]:
    """An overwrite of a table whose commits are all overwrites: manifests are merged."""
    io = transaction._table.io
    producer = MergingOverwrite(Operation.OVERWRITE, transaction, io, snapshot_properties=dict(summary))
    return _written(producer, added, removed)


def staged_replacement(
    transaction: Transaction,
    added: Sequence[DataFile],
    removed: Sequence[DataFile],
    summary: Mapping[str, str],
) -> _SnapshotProducer[Any]:
    """``removed`` are of the snapshot, and have the rows of ``added``."""
    io = transaction._table.io
    producer = Replacement(Operation.OVERWRITE, transaction, io, snapshot_properties=dict(summary))
    return _written(producer, added, removed)


def _written(
    producer: _SnapshotProducer[Any], added: Sequence[DataFile], removed: Sequence[DataFile]
) -> _SnapshotProducer[Any]:
    """After an exception nobody needs the manifests, and they are removed, but for what pyiceberg's other threads are
    still writing: that becomes a leftover."""
    for file in added:
        producer.append_data_file(file)
    for file in removed:
        producer.delete_data_file(file)
    try:
        producer.commit()
    except Exception:
        producer._clean_all_uncommitted()
        raise
    return producer


class MergingOverwrite(_OverwriteFiles):
    """pyiceberg (0.12) merges manifests when it appends, and never when it overwrites: each commit would leave two
    more, one of them with nothing but files that are gone. To read a manifest takes 5 ms of CPU, whatever is in it.

    What an earlier commit has taken away needs no manifest any more. Several such that fit in one would be merged into
    one without entries, which pyiceberg refuses to write: so no later commit would succeed.

    A file that is gone has bounds in its manifest, which are keys of rows that may be erased. So the files that this
    commit takes away stand in a manifest of their own, and those that an earlier one has taken away in none: two
    commits after a file has gone the newest snapshot says nothing of it."""

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        merging = _ManifestMergeManager(MANIFEST_BYTES, MERGES_AT, True, self)
        data = [each for each in manifests if each.content is ManifestContent.DATA]
        others = [each for each in manifests if each.content is not ManifestContent.DATA]
        there = [each for each in data if each.has_added_files() or each.has_existing_files()]
        gone = [each for each in data if each not in there and self._is_ours(each)]
        cleared = [
            merging._create_manifest(each.partition_spec_id, [each])
            if each.deleted_files_count and not self._is_ours(each)
            else each
            for each in there
        ]
        return merging.merge_manifests(cleared) + gone + others

    def _is_ours(self, manifest: ManifestFile) -> bool:
        return manifest.added_snapshot_id in (None, self.snapshot_id)


class Replacement(_OverwriteFiles):
    """An overwrite that says what it is: pyiceberg (0.12) makes no snapshot that is a *replace*."""

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        found = super()._summary(snapshot_properties)
        return Summary(operation=Operation.REPLACE, **found.additional_properties)


def data_file(
    table: Table,
    path: str,
    size_bytes: int,
    n_rows: int,
    bounds: Mapping[str, tuple[Any, Any]],
    schema: Schema | None = None,
) -> DataFile:
    """``path`` is relative to the table's location. ``bounds``: by column the lowest and the highest value, as Parquet
    stores them; no row has a null there. ``schema``: which the table will have; None: which it has."""
    fields = {field.name: field for field in (schema or table.schema()).fields}
    ranges = [(fields[name].field_id, fields[name].field_type, *each) for name, each in bounds.items()]
    made = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{table.location().rstrip('/')}/{path}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=n_rows,
        file_size_in_bytes=size_bytes,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds={id_: _bound(type_, low) for id_, type_, low, _ in ranges},
        upper_bounds={id_: _bound(type_, high) for id_, type_, _, high in ranges},
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=None,
    )
    made.spec_id = table.metadata.default_spec_id
    return made


def data_file_of(table: Table, file: WrittenFile, lsn_column: str) -> DataFile:
    """A file of the log, with the ranges that its writer reports."""
    bounds: dict[str, tuple[Any, Any]] = {}
    if file.max_commit_lsn:
        bounds[lsn_column] = file.min_commit_lsn, file.max_commit_lsn
        for each in file.ranges:
            bounds[each.column] = _number(each.least), _number(each.greatest)
    return data_file(table, file.path, file.size, file.n_rows, bounds)


def _number(value: int | str) -> int:
    """A bound of a range, as Delta's logs have it: a timestamp becomes microseconds since 1970."""
    if isinstance(value, int):
        return value
    moment = datetime.datetime.fromisoformat(value.removesuffix("Z")).replace(tzinfo=datetime.timezone.utc)
    since = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
    return (moment - since) // datetime.timedelta(microseconds=1)


def _bound(type_: IcebergType, value: Any) -> bytes:
    assert isinstance(type_, PrimitiveType), type_
    return to_bytes(type_, value)


def files_by_path(table: Table, snapshot: Snapshot | None) -> dict[str, DataFile]:
    """The files of a snapshot, by their path below the table's location; of those elsewhere, by where they are."""
    base = f"{bare(table.location()).rstrip('/')}/"
    return {
        bare(entry.data_file.file_path).removeprefix(base): entry.data_file
        for manifest in ([] if snapshot is None else snapshot.manifests(table.io))
        for entry in manifest.fetch_manifest_entry(table.io)
    }
