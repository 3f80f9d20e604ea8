"""One base table under one mirror: what it holds, and the commits that replace its files.

Each commit of rows sets three watermarks: ``mirror/SLOT`` is the LSN to which the table was brought,
``mirror/SLOT/place`` tells the generation it comes from, and ``mirror/SLOT/owner`` is the mirror's number. So a refresh
that was cut short is taken up table by table, whatever the manifest says, and a mirror that was overtaken commits
nothing more: a commit is refused when one of these moved since the table was looked at.

Added columns come in a commit of the metadata alone, ahead of the rows: the files there already have nulls in them. All
other changes of the columns need the table written anew, which one commit does, too.

A table that another program has changed such that its files do not tell its rows by themselves counts as one that was
never filled (``StoredTable.is_as_made``): the next refresh builds it anew.

Called by ``pipeline.mirror.refresh``. No Spark.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from xidstream.pipeline.changelog.base_stores import BaseStore, BoundedFile, StoredTable
from xidstream.pipeline.changelog.manifest import KEEPS_ITS_LOG, check_owner
from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import NOTHING
from xidstream.pipeline.log_tables.table_metadata import KEY, PREFIX, SOURCE, TYPES, TableMetadata
from xidstream.pipeline.mirror.key_ranges import FileFacts, RangedKey
from xidstream.pipeline.mirror.plan import BaseFile
from xidstream.pipeline.pg import Lsn

TEXT_FIELD: Final = pa.field("_text", pa.map_(pa.string(), pa.string()))
"""PostgreSQL's text of values that their columns cannot hold. Only a base table that has such values has it."""

LEFT_OUT: Final = f"{PREFIX}left_out"
"""A property of a base table that is not kept up any more: JSON with ``since`` (ISO 8601), ``lsn`` (what the rows are
of) and ``reason``. Empty, or not there, while refreshes keep the table up."""


@dataclass(frozen=True)
class NewFile:
    """``path`` is relative to the table's directory."""

    path: str
    size_bytes: int
    facts: FileFacts

    @classmethod
    def written(cls, table: Location, path: str, key: RangedKey) -> NewFile:
        """What is to be said of a file that stands there. Raises OSError and what pyarrow raises."""
        with table.open(path) as file:
            return cls(path, int(file.size()), key.facts_of(file))


@dataclass(frozen=True)
class BaseFacts:
    """What a base table says of itself, beside its rows. ``properties``: ours alone."""

    fields: tuple[pa.Field, ...]
    properties: Mapping[str, str]


@dataclass(frozen=True)
class MirrorMarks:
    """Who commits, of which slot."""

    application_id: str
    owner: int

    @property
    def lsn_id(self) -> str:
        return f"mirror/{self.application_id}"

    @property
    def place_id(self) -> str:
        return f"{self.lsn_id}/place"

    @property
    def emptied_id(self) -> str:
        return f"{self.lsn_id}/emptied"

    def versions(self, lsn: int, snapshot_lsn: int) -> dict[str, int]:
        return {self.lsn_id: lsn, self.place_id: snapshot_lsn, f"{self.lsn_id}/owner": self.owner}


class BaseTable:
    """``label`` is ``schema.table``. Raises SnapshotOutdated from what commits: look at everything again. Raises
    Unsupported where another tool has deleted rows by deletion vectors."""

    def __init__(self, writer: StoredTable, marks: MirrorMarks) -> None:
        self._writer = writer
        self._marks = marks
        self.location = writer.location
        self.label = writer.label
        check_owner(writer, marks.application_id, marks.owner)
        writer.check_plain()
        if writer.watermark(marks.lsn_id) == NOTHING and writer.files().num_rows:
            raise SinkFailed(
                f"the base table of {self.label} was not written by a mirror of this slot",
                remedy="give each slot a root of its own, or move away what stands in the place of its base tables",
            )

    @classmethod
    def open_or_create(
        cls,
        bases: BaseStore,
        key: str,
        label: str,
        fields: Sequence[pa.Field],
        about: TableMetadata,
        marks: MirrorMarks,
    ) -> BaseTable:
        return cls(bases.open_or_create(key, label, [_target(field) for field in fields], about), marks)

    @classmethod
    def open(cls, bases: BaseStore, key: str, label: str, marks: MirrorMarks) -> BaseTable | None:
        """None where there is no table that a mirror of this slot has filled."""
        writer = bases.open(key, label)
        if writer is None or writer.watermark(marks.lsn_id) == NOTHING:
            return None
        return cls(writer, marks)

    @property
    def lsn(self) -> int:
        """To which its last commit brought it; 0 for a table that was never filled, was emptied since, or has to be
        filled anew."""
        found = self._writer.watermark(self._marks.lsn_id)
        is_empty = found == self._writer.watermark(self._marks.emptied_id)
        return NOTHING if is_empty or not self._writer.is_as_made else found

    @property
    def is_as_made(self) -> bool:
        """Whether its files tell its rows by themselves."""
        return self._writer.is_as_made

    @property
    def snapshot_lsn(self) -> int:
        """The place of the snapshot that it comes from."""
        return self._writer.watermark(self._marks.place_id)

    @property
    def version(self) -> int:
        return self._writer.version

    @property
    def fields(self) -> list[pa.Field]:
        return [column.field for column in self._writer.columns]

    def file_schema(self, fields: Sequence[pa.Field]) -> pa.Schema:
        """In which a file with these columns is written."""
        return self._writer.file_schema(fields)

    @property
    def facts(self) -> BaseFacts:
        return facts_of(self._writer)

    @property
    def has_text(self) -> bool:
        return any(column.name == TEXT_FIELD.name for column in self._writer.columns)

    @property
    def left_out_since(self) -> datetime.datetime | None:
        """Since when it has not been kept up; None if it is. Aware, UTC."""
        found = self._writer.property_of(LEFT_OUT)
        return None if found is None else datetime.datetime.fromisoformat(json.loads(found)["since"])

    def leave_out(self, reason: str | None) -> None:
        """Record in the table why it is not refreshed any more, for readers that open the table alone. None: it is
        refreshed again. Nothing is committed if the table says so already."""
        found = self._writer.property_of(LEFT_OUT)
        if reason is None and found is None:
            return
        if found is not None and json.loads(found)["reason"] == reason:
            return
        now = datetime.datetime.now(datetime.timezone.utc).isoformat()
        said = {"since": now, "lsn": str(Lsn(self.lsn)), "reason": reason}
        value = "" if reason is None else json.dumps(said, ensure_ascii=False)
        self._writer.describe(TableMetadata("", {LEFT_OUT: value}, {}))

    def files(self, key: RangedKey) -> list[BaseFile]:
        found = self._writer.files()
        rows = zip(
            found["path"].to_pylist(),
            found["size_bytes"].to_pylist(),
            found["num_records"].to_pylist(),
            key.ranges_in(found),
            strict=True,
        )
        return [BaseFile(*row) for row in rows]

    def absolute(self, path: str) -> str:
        return f"{self.location.uri}/{path}"

    def describe(self, about: TableMetadata) -> None:
        self._writer.describe(about)

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        self._writer.add_columns([_target(field) for field in fields])

    def replace(
        self,
        new: Sequence[NewFile],
        key: RangedKey,
        removed: Sequence[BaseFile],
        lsn: int,
        snapshot_lsn: int,
        *,
        erases: bool = False,
    ) -> None:
        """Put ``new`` in the place of ``removed``: the table is at ``lsn`` from here on. ``erases``: versions before
        this one have rows that must not be read any more (``erased_base``)."""
        erased = {f"{self._marks.lsn_id}/erased": self.version + 1} if erases else {}
        self._swap(new, key, [file.path for file in removed], lsn, snapshot_lsn, marks=erased)

    def replace_all(
        self, new: Sequence[NewFile], key: RangedKey, fields: Sequence[pa.Field], lsn: int, snapshot_lsn: int
    ) -> None:
        """Put ``new`` in the place of all there is, with other columns."""
        self._swap(new, key, None, lsn, snapshot_lsn, [_target(field) for field in fields])

    def empty(self) -> None:
        """Take all rows out of a table that is left out: the next refresh that has a state of it builds it anew."""
        lsn = self._writer.watermark(self._marks.lsn_id)
        marks = {**self._marks.versions(lsn, self.snapshot_lsn), self._marks.emptied_id: lsn}
        self._writer.put([], None, marks)

    def _swap(
        self,
        new: Sequence[NewFile],
        key: RangedKey,
        removed: Sequence[str] | None,
        lsn: int,
        snapshot_lsn: int,
        columns: Sequence[TableColumn] | None = None,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        added = [
            BoundedFile(file.path, file.size_bytes, file.facts.n_rows, key.bounds(file.facts))
            for file in new
            if file.facts.n_rows
        ]
        reach("base_written")
        self._writer.put(added, removed, {**self._marks.versions(lsn, snapshot_lsn), **marks}, columns)
        reach("base_committed")


def facts_of(writer: StoredTable) -> BaseFacts:
    ours = {name: value for name, value in writer.properties.items() if name.startswith(PREFIX) and value}
    return BaseFacts(tuple(column.field for column in writer.columns), ours)


def about_base(
    label: str, key: Sequence[str] | None, ranged: RangedKey, types: Mapping[str, str] = MappingProxyType({})
) -> TableMetadata:
    """What a base table says of itself. ``types``: column → PostgreSQL's type, as far as the log tells."""
    return TableMetadata(
        f"The PostgreSQL table {label} as it was at one LSN: current/_manifest says at which, for each version.",
        {
            SOURCE: label,
            KEY: json.dumps(list(key or ()), ensure_ascii=False),
            **({TYPES: json.dumps(dict(types), ensure_ascii=False)} if types else {}),
            **ranged.properties,
            **KEEPS_ITS_LOG,
        },
        {},
    )


def _target(field: pa.Field) -> TableColumn:
    return TableColumn(field.name, field.type, field.name)
