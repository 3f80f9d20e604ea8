"""One table of a change log under one writer, and all tables below one root: what every format of table can do.

A sink of tables, the log of snapshots and the rule of ownership ask these protocols, and no format.
``pipeline.delta`` and ``pipeline.iceberg`` have one of each.

What a format promises:

- A table holds *watermarks*: (application id, commit LSN). They never fall, and they are committed with the rows that
  they speak of, or not at all.
- A ``LogTableWriter`` shows one snapshot of its table. Watermarks are read from it, and a commit succeeds only where
  none of them has been moved since. So no interleaving of two runs writes a row twice (``SnapshotOutdated``).
- After a failure the handle must not be used again. A new one shows what did happen.
- What a commit made is durable when the call returns.
- Where a format can commit several tables in one step (``LogTables.together``), that is one commit: all of the tables
  have it, or none has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa

from xidstream.pipeline.errors import SinkFailed, UsageError
from xidstream.pipeline.log_tables.columns import ColumnRules, TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile
    from xidstream.pipeline.schema import RelationVersion

MAX_VERSION: Final = (1 << 63) - 1
NOTHING: Final = 0
"""The watermark of a table that holds nothing: no commit has LSN 0."""


class SnapshotOutdated(Exception):
    """The table is not what the snapshot shows any more: write it again, from a new one."""


class LogTableWriter(Protocol):
    """``label`` names the table, and ``title`` does with the format before it. ``location``: where its files are."""

    label: str
    location: Location
    columns: tuple[TableColumn, ...]

    @property
    def title(self) -> str: ...

    @property
    def ranged(self) -> Collection[str]:
        """A commit states the lowest and highest value of these columns for each file."""
        ...

    def watermark(self, application_id: str) -> int:
        """The version last committed under ``application_id`` in this snapshot, or ``NOTHING``."""
        ...

    def take_columns(self, columns: Sequence[TableColumn]) -> None:
        """Make the table ready for files with these columns. The first are its own, some perhaps with a wider type; new
        ones follow. Idempotent."""
        ...

    def describe(self, about: TableMetadata, brought: Sequence[VersionSince] = ()) -> None:
        """Have the table say this of itself, and record the versions that are brought."""
        ...

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        merges: bool = True,
    ) -> None:
        """Append ``files`` and move the watermarks ``versions`` (application id -> commit LSN), atomically.

        ``marks`` are watermarks that may also stay as they are. A format may merge small files beside it, if the caller
        ``merges``. Raises SnapshotOutdated where somebody moved one of the versions since the snapshot, or changed
        something else that matters; UsageError where a version would not rise; SinkFailed where two of ``files`` are
        the same file."""
        ...

    def read(self, columns: Sequence[str], lsn_column: str, first: int, last: int) -> pa.Table:
        """The rows of the snapshot whose ``lsn_column`` is from ``first`` to ``last``."""
        ...

    def paths(self) -> list[str]:
        """The files of the snapshot, relative to ``location``."""
        ...

    def refresh(self) -> None:
        """Go on from the table as it is now."""
        ...


@dataclass(frozen=True)
class TableCommit:
    """A commit that is still to be made: ``table``, and what its ``commit`` is given."""

    table: LogTableWriter
    files: Sequence[WrittenFile]
    versions: Mapping[str, int]
    marks: Mapping[str, int]
    lsn_column: str = "_commit_lsn"

    def alone(self) -> None:
        """Raises as ``LogTableWriter.commit``."""
        self.table.commit(self.files, self.versions, self.lsn_column, marks=self.marks)


Together = Callable[[Sequence[TableCommit]], None]
"""Commits to several tables in one step, one commit a table: all of them, or none. Raises as ``LogTableWriter.commit``.
SnapshotOutdated means that one of the tables is outdated; no handle may be used after it."""


class LogTables(Protocol):
    """The tables below one root. ``root`` names it for people, without credentials. A table's ``key`` is its name
    there. ``kept_handles``: how many tables a sink keeps open. Any thread may call."""

    root: str
    rules: ColumnRules
    kept_handles: int

    def title(self, label: str) -> str:
        """The format and the table."""
        ...

    def key_of(self, schema: str, table: str) -> str:
        """The key of a source's table. The sink's own tables have the keys ``locations.TRANSACTIONS`` and so on."""
        ...

    def about(self, relation: RelationVersion) -> TableMetadata:
        """What a source's table says of itself. The same object for equal relations, as long as it is remembered."""
        ...

    def about_own(self, key: str) -> TableMetadata: ...

    def open(self, key: str, label: str) -> LogTableWriter | None:
        """The table as it is now, or None where there is none."""
        ...

    def open_or_create(
        self,
        key: str,
        label: str,
        columns: Sequence[TableColumn],
        about: TableMetadata,
        brought: Sequence[VersionSince] = (),
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> LogTableWriter:
        """The table, made with ``columns`` where there is none; safe against a crash and against a race. ``marks``:
        versions that a table which is made here has from its beginning, where the format can do that."""
        ...

    def together(self) -> Together | None:
        """What commits several of these tables in one step; None where each is committed by itself."""
        ...

    def close(self) -> None: ...


def check_commit(
    table: LogTableWriter, files: Sequence[WrittenFile], versions: Mapping[str, int], marks: Mapping[str, int]
) -> None:
    """What every format refuses before it commits anything: ``LogTableWriter.commit`` says what it raises."""
    if len({file.path for file in files}) < len(files):
        raise SinkFailed(
            f"{table.title}: two writers gave their files one name",
            remedy="start again, and report this as a defect of xidstream: no row of the table was committed",
        )
    for application_id, version in versions.items():
        before = table.watermark(application_id)
        if not before < version <= MAX_VERSION:
            raise UsageError(f"{table.title}: version {version} after {before}")
    for application_id, version in marks.items():
        if version < table.watermark(application_id):
            raise UsageError(f"{table.title}: {application_id} would fall to {version}")
