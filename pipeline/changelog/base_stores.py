"""Where the base tables of a log are, and what a table of any format can do for them: the seam between the mirror's
rules and the formats.

A refresh (``pipeline.mirror``) decides which files of a base table are replaced, writes the new ones, and names
versions in the manifest (``manifest``). How a table is made, and how a commit puts some files in the place of others, a
``BaseStore`` and its tables know: ``delta_bases`` has Delta tables in a folder beside the log, ``iceberg_bases`` a
namespace of the log's catalog.

What a format promises:

- A *version* is what a table was after one commit, and has a number, which no other version of it has. It can be read
  as long as the vacuum keeps it, and nobody else removes one.
- A commit puts files in the place of others, sets watermarks, and changes the columns, all at once or not at all. It
  succeeds only where nobody has committed since the table was opened (``SnapshotOutdated``). So a mirror that was
  overtaken commits nothing.
- Whoever opens a version is told the watermarks that it had.

The manifest is a table of the store, too, with rows for readers.

Called by ``manifest`` and ``pipeline.mirror``. ``log_root`` gives the store of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

if TYPE_CHECKING:
    from xidstream.pipeline.changelog.log_table import LogTable
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile


@dataclass(frozen=True)
class Bounds:
    """The lowest and the highest value of a column in a file, as Parquet stores them: a date is days, a timestamp is
    microseconds, both since 1970. No row has a null there."""

    type: pa.DataType
    low: Any
    high: Any


@dataclass(frozen=True)
class BoundedFile:
    """``path`` is relative to the table's ``location``. ``bounds``: by column."""

    path: str
    size_bytes: int
    n_rows: int
    bounds: Mapping[str, Bounds] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseVersion:
    """One version of a table. ``files``: absolute paths, or URIs. ``open``: the version, for reading."""

    location: Location
    files: tuple[str, ...]
    watermark: Callable[[str], int | None]
    open: Callable[[], LogTable]


class StoredTable(Protocol):
    """A table on one version: the newest when it was opened, and after each commit of this handle. After a failure it
    is of no further use."""

    label: str
    location: Location
    columns: tuple[TableColumn, ...]

    @property
    def title(self) -> str:
        """The format and the table."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def properties(self) -> dict[str, str]: ...

    @property
    def is_as_made(self) -> bool:
        """Whether the files have the table's columns, and nobody else has put rows there. If not, the table can only be
        made anew."""
        ...

    def watermark(self, application_id: str) -> int: ...

    def property_of(self, name: str) -> str | None:
        """None where it has none of this name, or an empty one."""
        ...

    def check_plain(self) -> None:
        """Raise Unsupported where the rows of its files are not the table's."""
        ...

    def files(self) -> pa.Table:
        """``path``, ``size_bytes``, ``num_records``, and of each column with bounds ``min.COLUMN`` and
        ``max.COLUMN``."""
        ...

    def file_schema(self, fields: Sequence[pa.Field]) -> pa.Schema:
        """The schema in which a file with these columns is written. The commit that has the columns is the next one of
        this handle that changes any."""
        ...

    def describe(self, about: TableMetadata) -> None:
        """Have the table say this of itself, in a commit of its own, if it does not yet."""
        ...

    def add_columns(self, columns: Sequence[TableColumn]) -> None:
        """Add columns behind the others, in a commit of its own."""
        ...

    def put(
        self,
        added: Sequence[BoundedFile],
        removed: Sequence[str] | None,
        marks: Mapping[str, int],
        columns: Sequence[TableColumn] | None = None,
    ) -> None:
        """Put ``added`` in the place of the files ``removed`` (None: all of them), and set the watermarks ``marks``,
        which may also stay as they are. ``columns``, which go with None alone, are the table's from here on."""
        ...

    # -- for the manifest ----------------------------------------------------------------------------------

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        removed: Sequence[str] = (),
    ) -> None:
        """What ``log_tables.log_table.LogTable.commit`` says. ``removed`` are paths of files whose rows are in
        ``files``, or are to go."""
        ...

    def read(self, columns: Sequence[str], lsn_column: str, first: int, last: int) -> pa.Table:
        """The rows whose ``lsn_column`` is from ``first`` to ``last``."""
        ...

    def rows_of(self, paths: Collection[str]) -> pa.Table:
        """The rows of these files, all columns. The paths are as in ``files``."""
        ...


class BaseStore(Protocol):
    """The base tables of one log. Any thread may call. All raise StorageFault and what the format's library raises.
    ``bounds_any_name``: whether columns with any name have bounds, or those with a plain one alone
    (``mirror.key_ranges``)."""

    @property
    def bounds_any_name(self) -> bool: ...

    def key_of(self, schema: str, table: str) -> str:
        """What a line of the manifest calls a source's table (its ``directory``)."""
        ...

    def open(self, key: str, label: str) -> StoredTable | None:
        """The table as it is now, or None where there is none."""
        ...

    def open_or_create(
        self, key: str, label: str, columns: Sequence[TableColumn], about: TableMetadata
    ) -> StoredTable:
        """The table, made with ``columns`` where there is none; safe against a crash and against a race."""
        ...

    def at(self, key: str, version: int) -> BaseVersion | None:
        """A version of a table; None where it is gone: a vacuum came after the look at the manifest, or another engine,
        or the table is another one by now."""
        ...

    def is_newest(self, key: str, version: int) -> bool:
        """Whether no commit came after this version of a table."""
        ...

    def forget(self) -> None:
        """Look at everything anew from here on."""
        ...
