"""One base table in Iceberg, or their manifest: commits that put files in the place of others.

A base table is what ``changelog.base_stores.StoredTable`` says, and so is kept here:

- A *version* is a snapshot, and its number is the snapshot's id. Each commit of rows, and each that adds a column,
  makes one: so every version has its own columns, which its snapshot names.
- *Watermarks* are properties of the table, as in the log (``iceberg_table``), and each snapshot's summary says all of
  them. So whoever opens a snapshot is told what it holds.
- A commit requires that the main branch is at the snapshot that was opened, and the columns are those of then. It is
  sent once.
- *Nobody expires* but the mirror's vacuum: what the manifest names must stay readable (``gc.enabled=false``).

*Files have field ids*, those of the columns that the table gets with them. A column that is dropped and comes back, or
that gets another type, is another column, and older snapshots still find theirs. So the ids of new columns are given
here, ahead of the commit that makes them (``file_schema``), and the commit requires that nobody has given any since.

*Whose table it is now.* Another program may compact the table, delete rows, rename a column, or set it back. Then the
newest snapshot does not say the watermarks, or the columns are not those of the last commit (``SCHEMA``), and
``is_as_made`` is false: the mirror builds it anew. A commit that leaves files there, as a vacuum's of its number, does
not make it true.

The bounds of key columns are written in each type's own form: a timestamp has microseconds.

Called by ``changelog.iceberg_bases``. No Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.types as pt
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import TableProperties
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    AssertLastAssignedFieldId,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    update_table_metadata,
)
from pyiceberg.types import ListType, MapType, NestedField, PrimitiveType

from xidstream.pipeline.errors import Unsupported, UsageError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.catalogs import bare
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_types import arrow_type, iceberg_type
from xidstream.pipeline.iceberg.staged_commits import (
    MERGES_AT,
    KnownTransaction,
    data_file,
    files_by_path,
    staged_base,
)
from xidstream.pipeline.iceberg.table_properties import LSN, name_mapping_of
from xidstream.pipeline.iceberg.upkeep import remove_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.file_rows import rows_of_file
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, NOTHING, SnapshotOutdated

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate

SCHEMA: Final = "xidstream.schema-id"
"""A property: the id of the columns that the last commit of a mirror has left."""
KEPT: Final = {"gc.enabled": "false", TableProperties.MANIFEST_MIN_MERGE_COUNT: str(MERGES_AT)}
"""Properties of each of the tables. The second one is for the manifest, whose commits append."""
_FIELD_ID: Final = b"PARQUET:field_id"


class IcebergBase(IcebergTableWriter):
    """``StoredTable`` for one table."""

    _found: tuple[int, dict[str, DataFile]] = (NOTHING, {})
    """The files of one version."""

    @property
    def version(self) -> int:
        """The id of the snapshot; 0 where there is none yet."""
        return self._table.metadata.current_snapshot_id or NOTHING

    @property
    def properties(self) -> dict[str, str]:
        return dict(self._table.properties)

    def property_of(self, name: str) -> str | None:
        return self._table.properties.get(name) or None

    def watermark(self, application_id: str) -> int:
        return int(self._table.properties.get(f"{LSN}{application_id}", NOTHING))

    @property
    def is_as_made(self) -> bool:
        snapshot, properties = self._table.current_snapshot(), self._table.properties
        if snapshot is None:
            return not _marks(properties)
        is_same = properties.get(SCHEMA) == str(self._table.metadata.current_schema_id)
        return is_same and _marks(_summary(snapshot)) == _marks(properties)

    def _check_spec(self) -> None:
        """One that somebody has partitioned can be read, as it was before."""

    def check_plain(self) -> None:
        if self._table.spec().fields:
            raise Unsupported(
                f"{self.title} is partitioned by another program, and a mirror writes unpartitioned tables only",
                remedy="remove the partition fields (in Spark: ALTER TABLE … DROP PARTITION FIELD), or drop the base "
                "table in the catalog: the next refresh goes on, or makes it anew",
            )
        check_plain(self._table, self._table.current_snapshot(), self.title)

    def files(self) -> pa.Table:
        return listed(self._files(), self._table.schema())

    def _files(self) -> dict[str, DataFile]:
        """By path, what the newest snapshot has."""
        version, found = self._found
        if version != self.version:
            found = files_by_path(self._table, self._table.current_snapshot())
            self._found = self.version, found
        return found

    def rows_of(self, paths: Collection[str]) -> pa.Table:
        schema = pa.schema([column.field for column in self.columns])
        found = (rows_of_file(self.location, path, schema) for path in self._files() if path in paths)
        return pa.concat_tables([schema.empty_table(), *found])

    def file_schema(self, fields: Sequence[pa.Field]) -> pa.Schema:
        made = self._schema_of((field.name, field.type) for field in fields)
        return pa.schema([_with_ids(field) for field in made.fields])

    # -- commits -----------------------------------------------------------------------------------------

    def add_columns(self, columns: Sequence[TableColumn]) -> None:
        there = {column.name for column in self.columns}
        more = [column for column in columns if column.name not in there]
        if more:
            self._put([], [], {}, [*self.columns, *more])

    def put(
        self,
        added: Sequence[Any],
        removed: Sequence[str] | None,
        marks: Mapping[str, int],
        columns: Sequence[TableColumn] | None = None,
    ) -> None:
        for application_id, version in marks.items():
            if not self.watermark(application_id) <= version <= MAX_VERSION:
                raise UsageError(f"{self.title}: {application_id} would fall to {version}")
        self._put(added, removed, marks, columns)

    def _put(
        self,
        added: Sequence[Any],
        removed: Sequence[str] | None,
        marks: Mapping[str, int],
        columns: Sequence[TableColumn] | None,
    ) -> None:
        schema, metadata, updates, required = self._with_columns(columns)
        there = self._files()
        if not there.keys() >= set(removed or ()):
            raise SnapshotOutdated(self.label)
        gone = list(there.values()) if removed is None else [there[path] for path in removed]
        recorded = _marks(self._table.properties)
        recorded |= {f"{LSN}{application_id}": str(int(version)) for application_id, version in marks.items()}
        transaction = KnownTransaction(self._table, metadata, updates)
        transaction._requirements += required
        properties = {**KEPT, **recorded, SCHEMA: str(metadata.current_schema_id)}
        if updates:
            properties[TableProperties.DEFAULT_NAME_MAPPING] = name_mapping_of(schema)
        # Of what another program has changed, a snapshot says no watermarks, until all files are new.
        is_made = removed is None or self.is_as_made
        if not is_made:
            del properties[SCHEMA]
        transaction.set_properties(properties)
        files = [
            data_file(
                self._table,
                file.path,
                file.size_bytes,
                file.n_rows,
                {name: (each.low, each.high) for name, each in file.bounds.items()},
                schema,
            )
            for file in added
        ]
        producer = staged_base(transaction, files, gone, recorded if is_made else {})
        reach("iceberg_committing")
        try:
            self._send(transaction)
        except CommitFailedException as error:
            producer._clean_all_uncommitted()
            raise SnapshotOutdated(self.label) from error
        self._remove_merged(producer)
        self._read()

    def expire(self, kept: Collection[int]) -> int:
        """Have the table forget all snapshots but the newest, these, and those that a tag or a branch names. Returns
        how many these were. Raises SnapshotOutdated."""
        metadata = self._table.metadata
        needed = {*kept, metadata.current_snapshot_id, *(ref.snapshot_id for ref in metadata.refs.values())}
        gone = [each.snapshot_id for each in metadata.snapshots if each.snapshot_id not in needed]
        if gone:
            transaction = KnownTransaction(self._table)
            transaction._stage((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": gone}),))
            self._alter(transaction)
        return len(gone)

    def remove_unreached(self, paths: Collection[str]) -> None:
        """Remove those of these files, below the location, that nothing of the table names any more."""
        needed = set().union(*reachable(self._table))
        base = self._table.location().rstrip("/")
        remove_files(self._table.io, [f"{base}/{path}" for path in paths if path not in needed])

    # -- columns -----------------------------------------------------------------------------------------

    def _schema_of(self, columns: Iterable[tuple[str, pa.DataType]]) -> Schema:
        """These columns, with the ids that they have, or will get with the next commit that changes any."""
        there = {field.name: field for field in self._table.schema().fields}
        ids = itertools.count(self._table.metadata.last_column_id + 1)
        fields = []
        for name, type_ in columns:
            field = there.get(name)
            if field is None or arrow_type(field.field_type) != type_:
                new = Schema(NestedField(1, name, iceberg_type(type_), required=False))
                field = assign_fresh_schema_ids(new, lambda: next(ids)).fields[0]
            fields.append(field)
        return Schema(*fields)

    def _with_columns(
        self, columns: Sequence[TableColumn] | None
    ) -> tuple[Schema, TableMetadata, tuple[TableUpdate, ...], tuple[TableRequirement, ...]]:
        """The columns after a commit, the metadata with them, what makes them so, and what it requires."""
        metadata = self._table.metadata
        required: tuple[TableRequirement, ...] = (
            _model(AssertCurrentSchemaId, {"current-schema-id": metadata.current_schema_id}),
        )
        schema = self._table.schema()
        wanted = schema if columns is None else self._schema_of((c.name, c.type) for c in columns)
        if wanted.as_struct() == schema.as_struct():
            return schema, metadata, (), required
        known = next((s for s in metadata.schemas if s.as_struct() == wanted.as_struct()), None)
        updates: tuple[TableUpdate, ...]
        if known is not None:
            updates = (SetCurrentSchemaUpdate.model_validate({"schema-id": known.schema_id}),)
        else:
            id_ = max(each.schema_id for each in metadata.schemas) + 1
            wanted = Schema(*wanted.fields, schema_id=id_)
            updates = (
                AddSchemaUpdate.model_validate({"schema": wanted}),
                SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
            )
            last = {"last-assigned-field-id": metadata.last_column_id}
            required += (_model(AssertLastAssignedFieldId, last),)
        made = update_table_metadata(metadata, updates)
        return made.schema(), made, updates, required


def _model(kind: type[TableRequirement], values: Mapping[str, int]) -> TableRequirement:
    return kind.model_validate(values)


def _marks(recorded: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in recorded.items() if name.startswith(LSN)}


def _summary(snapshot: Snapshot) -> Mapping[str, str]:
    return snapshot.summary.additional_properties if snapshot.summary else {}


def mark_of(snapshot: Snapshot, application_id: str) -> int | None:
    """The watermark that a snapshot says that it has."""
    found = _summary(snapshot).get(f"{LSN}{application_id}")
    return None if found is None else int(found)


def columns_of(schema: Schema) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(f.name, arrow_type(f.field_type), f.name) for f in schema.fields)


def schema_at(table: Table, snapshot: Snapshot) -> Schema:
    """The columns that the table had with this snapshot."""
    found = (each for each in table.metadata.schemas if each.schema_id == snapshot.schema_id)
    return next(found, table.schema())


def check_plain(table: Table, snapshot: Snapshot | None, title: str) -> None:
    """Raise Unsupported where the rows of the snapshot's files are not the table's."""
    for manifest in [] if snapshot is None else snapshot.manifests(table.io):
        if manifest.content is ManifestContent.DELETES and manifest.fetch_manifest_entry(table.io):
            raise Unsupported(
                f"another program has deleted rows of {title} by delete files, which a mirror does not apply",
                remedy="drop the base table in the catalog: the next refresh makes it anew",
            )


def listed(files: Mapping[str, DataFile], schema: Schema) -> pa.Table:
    """The files of a snapshot with these columns, as ``StoredTable.files`` has them."""
    found: dict[str, pa.Array] = {
        "path": pa.array(list(files), pa.string()),
        "size_bytes": pa.array([file.file_size_in_bytes for file in files.values()], pa.int64()),
        "num_records": pa.array([file.record_count for file in files.values()], pa.int64()),
    }
    for field in schema.fields:
        type_ = arrow_type(field.field_type)
        if not (pt.is_integer(type_) or pt.is_string(type_) or pt.is_date32(type_) or pt.is_timestamp(type_)):
            continue
        for name, bounds in (("min", "lower_bounds"), ("max", "upper_bounds")):
            values = [_value(file, bounds, field) for file in files.values()]
            if any(value is not None for value in values):
                found[f"{name}.{field.name}"] = _array(values, type_)
    return pa.table(found)


def _value(file: DataFile, bounds: str, field: NestedField) -> Any:
    found = (getattr(file, bounds) or {}).get(field.field_id)
    assert isinstance(field.field_type, PrimitiveType), field
    return None if found is None else from_bytes(field.field_type, found)


def _array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    if pt.is_date32(type_):
        return pa.array(values, pa.int32()).cast(type_)
    if pt.is_timestamp(type_):
        return pa.array(values, pa.int64()).cast(type_)
    return pa.array(values, type_)


def _with_ids(field: NestedField) -> pa.Field:
    type_ = field.field_type
    if isinstance(type_, ListType):
        kind = pa.list_(_with_ids(type_.element_field))
    elif isinstance(type_, MapType):
        kind = pa.map_(_with_ids(type_.key_field), _with_ids(type_.value_field))
    else:
        kind = arrow_type(type_)
    metadata = {_FIELD_ID: str(field.field_id).encode()}
    return pa.field(field.name, kind, nullable=not field.required, metadata=metadata)


def newest_until(table: Table, modified_s: Mapping[str, float]) -> dict[int, float]:
    """By the ids of all snapshots but the newest, when the next one came. ``modified_s``: when files came, by their
    path below the table's location. What came since that was listed is later than all."""
    metadata = table.metadata
    snapshots = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0)
    came_s = [modified_s.get(_below(table, each.manifest_list), float("inf")) for each in snapshots]
    return {each.snapshot_id: s for each, s in zip(snapshots[:-1], came_s[1:], strict=True)}


def reachable(table: Table) -> tuple[set[str], set[str]]:
    """The files below the table's location that its metadata name: what its snapshots are read from, and the metadata
    themselves, of which another writer may be removing old ones."""
    metadata, io = table.metadata, table.io
    manifests = {m.manifest_path: m for each in metadata.snapshots for m in each.manifests(io)}
    read = {*manifests, *(each.manifest_list for each in metadata.snapshots)}
    for manifest in manifests.values():
        read |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(io)}
    others = {table.metadata_location, *(each.metadata_file for each in metadata.metadata_log)}
    others |= {each.statistics_path for each in (*metadata.statistics, *metadata.partition_statistics)}
    base = f"{bare(table.location()).rstrip('/')}/"
    below, beside = ({_below(table, p) for p in some if bare(p).startswith(base)} for some in (read, others))
    return below, beside


def named_files(table: Table) -> set[str]:
    """The data files that any snapshot has, by their paths below the table's location."""
    return {path for path in reachable(table)[0] if path.endswith(".parquet")}


def manifests_of(table: Table, snapshots: Iterable[Snapshot]) -> Iterator[tuple[str, dict[str, DataFile]]]:
    """The manifests of these snapshots, one after the other, each with the data files that it names, also as ones that
    are gone; all by their paths below the table's location."""
    manifests = {m.manifest_path: m for each in snapshots for m in each.manifests(table.io)}
    for path, manifest in sorted(manifests.items()):
        entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        yield (
            _below(table, path),
            {_below(table, each.data_file.file_path): each.data_file for each in entries},
        )


def gone_in(table: Table, snapshot: Snapshot) -> dict[str, DataFile]:
    """The data files that the manifests of a snapshot name as ones that are gone, by their paths below the table's
    location."""
    manifests = [each for each in snapshot.manifests(table.io) if each.deleted_files_count]
    return {
        _below(table, entry.data_file.file_path): entry.data_file
        for each in manifests
        for entry in each.fetch_manifest_entry(table.io, discard_deleted=False)
        if entry.status is ManifestEntryStatus.DELETED
    }


def _below(table: Table, path: str) -> str:
    return bare(path).removeprefix(f"{bare(table.location()).rstrip('/')}/")
