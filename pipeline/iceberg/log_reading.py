"""One snapshot of an Iceberg table of a change log, as its readers want it: files, ranges of LSNs, and columns' names.

Readers fold files, and not tables (``pipeline.changelog``). So what Iceberg would do between the two is done here, or
refused:

- *Rows that were deleted* without writing files anew (delete files, deletion vectors) would come back: Unsupported.
- *Names.* The sink's files have no field ids, and a column that somebody renamed in Iceberg has its former name in the
  files from before. A column's names are all that the table knows of: in its name mapping, and in its former schemas.
  A name that columns of two sources have had would take values for those of another column: Unsupported. Files of other
  programs have field ids, and there these count: such programs write names that Parquet or Avro allow.
- *Types.* A file may have a narrower type than the column, where that was widened, and where the file's transaction had
  begun before. ``FileColumn.is_widened`` says of a column whether that can be.
- *The layouts* (``xidstream.versions``) name columns as they were called then. They are given with today's names.

A snapshot is what the table was when it was opened. Nobody changes it, and its files stay for an hour at least after
it was replaced (``upkeep``).

pyiceberg alone, no Spark. Called by ``pipeline.changelog.iceberg_root`` and ``merging``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.types as pt
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import FileFormat, ManifestContent
from pyiceberg.types import LongType

from xidstream.pipeline.errors import StorageFault, Unsupported, known_reason
from xidstream.pipeline.iceberg.catalogs import bare
from xidstream.pipeline.iceberg.iceberg_types import RULES, arrow_type
from xidstream.pipeline.iceberg.table_properties import LSN
from xidstream.pipeline.log_tables.relation_history import VERSIONS

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter

_OWNER: Final = "/owner"
_OWN: Final = ("data-", "snapshot-")
"""How the sink's files begin. Other programs write below ``data/``."""


@contextmanager
def reading(title: str) -> Iterator[None]:
    """Turn what storage and files say into StorageFault, which names the table."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = known_reason(error) or type(error).__name__
        raise StorageFault(f"{title} cannot be read: {reason}") from error


@dataclass(frozen=True)
class FileColumn:
    """A column of the table as files have it. ``names``: today's first."""

    id: int
    names: tuple[str, ...]
    is_widened: bool


@dataclass(frozen=True)
class SnapshotFile:
    """``path`` is below the table's location. ``least``, ``greatest``: by column, as far as they are told.
    ``is_own``: the sink has written it. ``named``: as the table names it."""

    path: str
    n_bytes: int
    n_rows: int
    least: Mapping[str, int]
    greatest: Mapping[str, int]
    is_own: bool
    named: DataFile


class IcebergTableSnapshot:
    """What ``table`` was when it was opened. Raises Unsupported where a column's name has meant two of the source's,
    SinkDiverged where the table was set back to an older snapshot: what is missing then, no file tells."""

    def __init__(self, table: IcebergTableWriter) -> None:
        self._table = table
        self._loaded: Table = table.loaded
        self.location = table.location
        for application_id in self._ids():
            table.watermark(application_id)
        self.columns = table.columns
        self.schema = pa.schema([column.field for column in table.columns])
        self.file_columns = self._file_columns()
        self.properties = self._with_todays_names(dict(self._loaded.properties))

    @property
    def title(self) -> str:
        return self._table.title

    def watermark(self, application_id: str) -> int | None:
        """None where nothing was committed under the id."""
        known = f"{LSN}{application_id}" in self._loaded.properties
        return self._table.watermark(application_id) if known else None

    def watermark_now(self, application_id: str) -> int | None:
        """The watermark in the table as it is now."""
        newest = self._loaded.catalog.load_table(self._loaded.name())
        found = newest.properties.get(f"{LSN}{application_id}")
        return None if found is None else int(found)

    def slots(self) -> list[str]:
        """The application ids of the slots whose runs have written to the table."""
        return sorted(each.removesuffix(_OWNER) for each in self._ids() if each.endswith(_OWNER))

    def _ids(self) -> list[str]:
        return [name.removeprefix(LSN) for name in self._loaded.properties if name.startswith(LSN)]

    @cached_property
    def files(self) -> list[SnapshotFile]:
        """All of them. Raises Unsupported where rows of files were deleted, and for files that cannot be read."""
        snapshot, io = self._loaded.current_snapshot(), self._loaded.io
        found = []
        with reading(self.title):
            for manifest in [] if snapshot is None else snapshot.manifests(io):
                entries = manifest.fetch_manifest_entry(io)
                if entries and manifest.content is ManifestContent.DELETES:
                    raise Unsupported(
                        f"another program has deleted rows of {self.title}: it has {len(entries)} delete files, which "
                        "reads of a state do not apply",
                        remedy="have that program write the files anew (Spark's rewrite_data_files with "
                        "delete-file-threshold 1), or set the table back to the snapshot before",
                    )
                found += [self._file(entry.data_file) for entry in entries]
        return found

    # -- inside ------------------------------------------------------------------------------------------

    def _file(self, file: DataFile) -> SnapshotFile:
        base, path = bare(self._loaded.location()).rstrip("/") + "/", bare(file.file_path)
        if file.file_format is not FileFormat.PARQUET or not path.startswith(base):
            raise Unsupported(
                f"{self.title} has a file that the sink does not read: it is "
                + (
                    "in another place than the table"
                    if file.file_format is FileFormat.PARQUET
                    else f"in {file.file_format.value}"
                ),
                remedy=f"have the program that wrote it write Parquet below {self._loaded.location()}",
            )
        ids = {field.field_id: field.name for field in self._loaded.schema().fields}
        ranged = {id_: name for id_, name in ids.items() if name in self._table.ranged}
        path = path.removeprefix(base)
        return SnapshotFile(
            path,
            file.file_size_in_bytes,
            file.record_count,
            _numbers(file.lower_bounds, ranged),
            _numbers(file.upper_bounds, ranged),
            path.startswith(_OWN),
            file,
        )

    def _file_columns(self) -> tuple[FileColumn, ...]:
        metadata = self._loaded.metadata
        todays = {field.field_id for field in self._fields}
        mapping = self._loaded.name_mapping()
        mapped = {each.field_id: each.names for each in mapping or ()}
        former = [field for schema in metadata.schemas for field in schema.fields]
        widened = self._columns_of_several_types()
        found = []
        for field, column in zip(self._fields, self.columns, strict=True):
            id_ = field.field_id
            names = dict.fromkeys(
                [field.name, *mapped.get(id_, ()), *(each.name for each in former if each.field_id == id_)]
            )
            is_widened = field.name in widened
            for each in former:
                if each.field_id != id_ and each.name not in names:
                    continue
                source = self._table.sources.get(each.field_id, each.name)
                type_ = arrow_type(each.field_type)
                # What was dropped, and came back with the next row, is the same column of the source.
                is_same = each.field_id == id_ or (source == column.source and each.field_id not in todays)
                if not is_same or not RULES.reads(column.type, type_):
                    raise Unsupported(
                        f"column {field.name} of {self.title} has a name that another column had before, and files do "
                        "not tell the two apart",
                        remedy="drop the later one of the two in Iceberg, or give the sink another namespace",
                    )
                is_widened = is_widened or type_ != column.type
            found.append(FileColumn(id_, tuple(names), is_widened and _may_widen(column.type)))
        return tuple(found)

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self._loaded.schema().fields

    def _columns_of_several_types(self) -> set[str]:
        """The columns that have taken values of several of PostgreSQL's types."""
        types: dict[str, set[str]] = {}
        for version in _versions(self._loaded.properties):
            for taken in version["columns"].values():
                types.setdefault(taken["column"], set()).add(taken["type"])
        return {name for name, each in types.items() if len(each) > 1}

    def _with_todays_names(self, properties: dict[str, str]) -> dict[str, str]:
        todays = {name: each.names[0] for each in self.file_columns for name in reversed(each.names)}
        todays |= {each.names[0]: each.names[0] for each in self.file_columns}
        versions = _versions(properties)
        for version in versions:
            for taken in version["columns"].values():
                taken["column"] = todays.get(taken["column"], taken["column"])
        return {**properties, VERSIONS: json.dumps(versions)} if versions else properties


def todays_names(columns: Sequence[FileColumn], names: Sequence[str]) -> list[str]:
    """What the table calls the columns of a file, which are called ``names`` there; empty for one that is gone."""
    todays: dict[str, str] = {}
    for column in columns:
        name = next((each for each in column.names if each in names), None)
        if name is not None:
            todays[name] = column.names[0]
    return [todays.get(name, "") for name in names]


def _versions(properties: Mapping[str, str]) -> list[dict[str, Any]]:
    """The layouts; none where they are not as the sink writes them, which whoever needs them tells."""
    try:
        found: list[dict[str, Any]] = json.loads(properties[VERSIONS])
        for version in found:
            for taken in version["columns"].values():
                str(taken["column"]), str(taken["type"])
    except (ValueError, TypeError, LookupError, AttributeError):
        return []
    return found


def _may_widen(type_: pa.DataType) -> bool:
    """Whether a file may have a narrower type that is stored otherwise. An ``int2`` stands in Parquet as an ``int4``
    does."""
    while pt.is_list(type_):
        type_ = type_.value_type
    return bool(type_ in (pa.int64(), pa.float64()) or pt.is_decimal(type_))


def _numbers(bounds: Mapping[int, bytes] | None, ranged: Mapping[int, str]) -> dict[str, int]:
    found = {ranged[id_]: value for id_, value in (bounds or {}).items() if id_ in ranged}
    return {name: int(from_bytes(LongType(), value)) for name, value in found.items()}
