"""One table of the change log as Spark reads it: the files of one version of it, and what it says of itself.

A table's own log has the least and the greatest commit LSN of each file, so files without a wanted row are not named to
Spark at all. A file may lack a column that was added later, so the schema is always given, never found.

``LogTable`` is what each format has alike, ``DeltaLogTable`` a Delta table; an Iceberg table is in ``iceberg_root``.

Files in a folder are read by Spark's own Parquet reader, those in an object store by pyarrow (``parquet_frames``),
which reads the columns that ``rows`` is asked for.
Without Spark, ``log_tables.file_rows`` reads a file. Dates are proleptic Gregorian in all files, also in those that
`optimize` wrote anew without Spark's mark.

Called by ``log_root``, and by ``table_at``, which reads base tables with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.changelog.slots import application_ids
from xidstream.pipeline.delta.kept_tables import KeptTables, opened
from xidstream.pipeline.delta.plain_files import check_plain_files
from xidstream.pipeline.delta.stored_columns import columns_of
from xidstream.pipeline.errors import StorageFault, known_reason
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.file_rows import rows_of_file
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.spark.parquet_frames import ColumnLookup, parquet_frame

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_OPTIONS: Final = {
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "mergeSchema": "false",
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}
MAX_LSN: Final = (1 << 63) - 1
"""The greatest LSN that Delta's numbers can hold."""


@dataclass(frozen=True)
class LogFile:
    """``path``: below the table's directory. The LSNs are those of its rows, or the widest where they are not known.
    ``n_bytes``, ``n_rows``: 0 where they are not known."""

    path: str
    n_bytes: int
    min_lsn: int
    max_lsn: int
    n_rows: int = 0


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what the storage or Delta says into StorageFault, which names ``what``."""
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        yield
    except TableNotFoundError:
        raise
    except (OSError, DeltaError, pa.ArrowException) as error:
        reason = known_reason(error) or type(error).__name__
        raise StorageFault(f"{what} cannot be read: {reason}") from error


class LogTable(ABC):
    """One version of a table, and no other, however long it is asked. ``format`` names it for people. ``schema`` is of
    its columns, in Arrow's types."""

    format: ClassVar[str]
    location: Location
    schema: pa.Schema
    columns: Sequence[TableColumn]
    properties: Mapping[str, str]

    @property
    def title(self) -> str:
        """The format and the table, for people."""
        return f"{self.format} table {self.location.uri.rpartition('/')[2]}"

    @abstractmethod
    def watermark(self, application_id: str) -> int | None:
        """The version last committed under ``application_id``: for a slot's own, a commit LSN."""

    def watermark_now(self, application_id: str) -> int | None:
        """The watermark in the table's newest version."""
        raise NotImplementedError

    @abstractmethod
    def slots(self) -> list[str]:
        """The application ids of the slots that have written to it. Of ``_transactions`` alone."""

    @abstractmethod
    def check_plain(self) -> None:
        """Raises Unsupported where another tool has deleted rows or renamed columns without writing the files anew."""

    @abstractmethod
    def listed(self) -> pa.Table:
        """The files: ``path`` below ``location``, ``size_bytes``, ``num_records``, and of each column whose range is
        told ``min.COLUMN`` and ``max.COLUMN``."""

    def files(self, first: int = 0, last: int = MAX_LSN, column: str = "_commit_lsn") -> list[LogFile]:
        """The files that may have rows with commit LSNs from ``first`` to ``last``, both included; without limits all.

        Raises as ``check_plain``.
        """
        self.check_plain()

        def values(name: str, missing: int) -> list[int]:
            return [missing if value is None else int(value) for value in self._listed(name)]

        files = zip(
            self._listed("path"),
            values("size_bytes", 0),
            values(f"min.{column}", 0),
            values(f"max.{column}", MAX_LSN),
            values("num_records", 0),
            strict=True,
        )
        return [
            file
            for file in (LogFile(*each) for each in files)
            if file.min_lsn <= last and file.max_lsn >= first
        ]

    def greatest(self, column: str, begin: str = "") -> dict[str, Any]:
        """By the path of each file, the greatest value of a column; None where it is not told. ``begin``: how the paths
        begin of the files that are asked for, None for others. Only what the sink or a mirror writes is sure to be a
        value of Python's: other tools tell of dates after the year 9999."""
        return self._bound(f"max.{column}", begin)

    def least(self, column: str, begin: str = "") -> dict[str, Any]:
        """By the path of each file, the least value, as ``greatest`` has the greatest."""
        return self._bound(f"min.{column}", begin)

    def _bound(self, name: str, begin: str) -> dict[str, Any]:
        files, paths = self._files, self._listed("path")
        if name not in files.column_names:
            return dict.fromkeys(paths)
        column_values = files[name]
        asked = pc.if_else(
            pc.starts_with(files["path"], begin), column_values, pa.scalar(None, column_values.type)
        )
        return dict(zip(paths, asked.to_pylist(), strict=True))

    @cached_property
    def _files(self) -> pa.Table:
        return self.listed()

    def _listed(self, name: str) -> list[Any]:
        files = self._files
        return files[name].to_pylist() if name in files.column_names else [None] * files.num_rows

    @property
    def is_opaque(self) -> bool:
        """Whether Spark's planner cannot leave out columns of ``rows`` by itself."""
        return not self.location.is_local

    def rows(
        self,
        spark: SparkSession,
        files: Sequence[LogFile],
        names: Iterable[str] | None = None,
        wanted: pc.Expression | None = None,
    ) -> DataFrame:
        """The rows of ``files``, in the table's columns, or in those of ``names`` that it has; in one of its columns
        where it has none of them, so that rows are rows. ``wanted``: which rows are asked for. Others may come as
        well."""
        paths = [file.path for file in files]
        schema, lookups = self._chosen(names), self.column_lookups(files)
        if lookups is not None:
            lookups = [lookups[self.schema.get_field_index(name)] for name in schema.names]
        return rows_of_files(spark, self.location, paths, schema, lookups, wanted)

    def column_lookups(self, files: Sequence[LogFile]) -> Sequence[ColumnLookup] | None:
        """How ``files`` hold each column of the table; None where all have them under their names, in types that Spark
        takes for theirs."""
        return None

    def _chosen(self, names: Iterable[str] | None) -> pa.Schema:
        if names is None:
            return self.schema
        wanted = frozenset(names)
        fields = [field for field in self.schema if field.name in wanted]
        return pa.schema(fields or [self.schema.field(0)])

    def count(self, lsn: int) -> int:
        """How many rows have this commit LSN. Reads that column, of the files that may have it."""
        wanted = pc.field("_commit_lsn") == lsn
        with reading(self.title):
            files = self.files(lsn, lsn)
            return sum(self.read_file(file, ["_commit_lsn"], wanted).num_rows for file in files)

    def read(self, names: Sequence[str]) -> pa.Table:
        """All rows: for the small tables of the log itself."""
        empty = self._schema_of(names).empty_table()
        return pa.concat_tables([empty, *(self.read_file(file, names) for file in self.files())])

    def read_file(self, file: LogFile, names: Sequence[str], wanted: pc.Expression | None = None) -> pa.Table:
        """The rows of one file that ``wanted`` lets through: ``names`` has its columns, too."""
        return rows_of_file(self.location, file.path, self._schema_of(names), wanted, file.n_bytes or None)

    def _schema_of(self, names: Sequence[str]) -> pa.Schema:
        return pa.schema([self.schema.field(name) for name in names])


class DeltaLogTable(LogTable):
    """One version of a Delta table: ``version``, or the newest. Raises ``TableNotFoundError`` where there is none.

    ``kept``: the newest version by a handle of these. It may go on to a later one, and then the version is opened."""

    format = "Delta"

    def __init__(
        self, location: Location, version: int | None = None, kept: KeptTables | None = None
    ) -> None:
        self.location = location
        self._kept = kept
        self._handle: DeltaTable = opened(location, version) if kept is None else kept.newest(location)
        self._version = self._handle.version()
        self.schema = pa.schema(self._handle.schema().to_arrow())
        self.columns = columns_of(self._handle)
        self.properties: dict[str, str] = dict(self._handle.metadata().configuration)

    @property
    def _table(self) -> DeltaTable:
        if self._handle.version() != self._version:
            self._handle = opened(self.location, self._version)
        return self._handle

    def watermark(self, application_id: str) -> int | None:
        return self._table.transaction_version(application_id)

    def slots(self) -> list[str]:
        return application_ids(self.location, None if self._kept is None else self._kept.notes(self.location))

    def check_plain(self) -> None:
        check_plain_files(self._table, self.location.uri.rpartition("/")[2])

    def listed(self) -> pa.Table:
        return pa.table(self._table.get_add_actions(flatten=True))


def rows_of_files(
    spark: SparkSession,
    location: Location,
    paths: Sequence[str],
    schema: pa.Schema,
    lookups: Sequence[ColumnLookup] | None = None,
    wanted: pc.Expression | None = None,
) -> DataFrame:
    """The rows of Parquet files below ``location``, in ``schema``; null in a column that a file has not. ``lookups``
    and ``wanted``: as ``parquet_frame`` takes them."""
    if location.is_local:
        local = [f"{location.uri}/{path}" for path in paths]
        return parquet_frame(spark, local, schema, _OPTIONS, lookups=lookups, wanted=wanted)
    return parquet_frame(spark, paths, schema, _OPTIONS, location, lookups, wanted)
