"""Parquet files of a Delta table, in a directory of each writer's own, and a report of them.

They are written by Spark's executors (``executor_tasks``), by the driver, and by the readers of snapshots. This module
imports pyarrow alone, so that a new Python worker is quick.

A writer writes below ``<job>-<random>/`` inside the Delta table's directory, and reports one row for each finished file
(``REPORT_SCHEMA``). Nothing else names a file, so what a failed, retried or speculative attempt leaves
behind is never committed. `vacuum` removes it. (The names do not start with an underscore, because vacuum skips such
names.)

Rejected: names made of the task and its attempt. Spark may run several of our functions in one task: from 4.1 on it
does so for a union of frames that have one partition each. With one name for all of them, a later file replaced an
earlier one, and its rows were lost.

Rows keep the order in which they come. Row groups and files are bounded (``ROW_GROUP_ROWS``, ``ROW_GROUP_BYTES``,
``FILE_BYTES``), so a task's memory does not depend on the size of the transaction.

A file is on disk, not only in a cache, before it is reported. So what a commit names survives a power cut.

Each file has all columns of the table, also those in which it has no value: there are readers of the files alone, who
take the first one's columns for those of all. (Null lists and maps are a fifth of what writing pgbench's accounts
costs.)

Rows at or below the table's watermark are dropped here, before the conversion: a replay reads them, but writes none of
them.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.errors import StorageFault, known_reason
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.parquet import SPARK_METADATA, halved, statistics_leaves

ROW_GROUP_ROWS: Final = 128 << 10
ROW_GROUP_BYTES: Final = 64 << 20
"""In Arrow memory. A row group ends at the limit that is reached first, because rows may be a megabyte wide."""
FILE_BYTES: Final = 128 << 20
_PAGE_BYTES: Final = 1 << 30
"""A page has 2 GiB at most, and Parquet's writer looks at its size once in a thousand rows."""

_REPEATING: Final = ("_change_type", "_commit_lsn", "_commit_timestamp", "_xid")
"""Columns that are written with a dictionary. It pays where values repeat, and costs much where they do not."""
_COUNTING: Final = "_seq"
"""The column whose values are mostly each one more than the last: the steps take next to nothing, in time and bytes."""
_RANGED_TYPES: Final = (
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
)
_EPOCH_DAY: Final = datetime.date(1970, 1, 1).toordinal()

REPORT_SCHEMA: Final = "path string, size long, n_rows long, min_commit_lsn long, max_commit_lsn long"
_REPORT_ARROW: Final = pa.schema(
    [("path", pa.string())]
    + [(name, pa.int64()) for name in ("size", "n_rows", "min_commit_lsn", "max_commit_lsn")]
)


class ColumnRange(NamedTuple):
    """The least and the greatest value of a column in a file, as a Delta log has them: numbers, and as texts dates and
    timestamps, these in whole milliseconds, with all values between them."""

    column: str
    least: int | str
    greatest: int | str


@dataclass(frozen=True)
class WrittenFile:
    """``path`` is relative to the table's directory, in ASCII, and safe in a URI. The LSNs are the lowest and highest
    commit LSN of its rows."""

    path: str
    size: int
    n_rows: int
    min_commit_lsn: int
    max_commit_lsn: int
    ranges: tuple[ColumnRange, ...] = ()
    """What is known of further columns, where a table has statistics of them."""


class Directory(Protocol):
    """Where files are written: a ``Location``, or a folder of the storage (``storage.stored_folder``)."""

    def create(self, path: str) -> pa.NativeFile:
        """A new file, relative to this directory. Raises OSError or StorageFault."""
        ...

    def sync(self, paths: Iterable[str]) -> None:
        """Wait until closed files are durable. Raises OSError."""
        ...


class ParquetFiles:
    """Writes record batches of one schema to as many files as they need. Not thread-safe.

    ``lsn_column`` is the column of the commit LSNs. ``ranged`` are further columns whose ranges are reported, if they
    hold whole numbers, dates or timestamps from year 1 to 9999. A row group ends at ``group_rows``, by default
    ``ROW_GROUP_ROWS``. ``close`` returns the finished files. After an exception the files stay where they are, and are
    not returned.
    """

    def __init__(
        self,
        table: Directory,
        directory: str,
        schema: pa.Schema,
        lsn_column: str,
        ranged: Collection[str] = (),
        group_rows: int | None = None,
    ) -> None:
        self._table = table
        self._group_rows = ROW_GROUP_ROWS if group_rows is None else group_rows
        """A row group ends at so many rows, or at ``ROW_GROUP_BYTES``."""
        self._directory = directory
        self._schema = schema
        self._lsn_index = schema.get_field_index(lsn_column)
        """Where the column of the commit LSNs is in the schema."""
        self._ranged = [
            name
            for name in schema.names
            if name in ranged and name != lsn_column and schema.field(name).type in _RANGED_TYPES
        ]
        """The columns, beside that one, whose ranges are reported."""
        self._dictionary = [name for name in _REPEATING if name in schema.names]
        """The columns that are written with a dictionary, because their values repeat."""
        self._encoding = {_COUNTING: "DELTA_BINARY_PACKED"} if _COUNTING in schema.names else None
        """The encoding of the column that counts up, where the schema has it."""
        self._pending: list[pa.RecordBatch] = []
        """The batches of the row group that is not written yet."""
        self._pending_rows = 0
        """Their rows."""
        self._pending_bytes = 0
        """Their bytes in memory."""
        self._writer: pq.ParquetWriter | None = None
        """Writes the file in hand; None between two files."""
        self._sink: pa.NativeFile | None = None
        """What that writer writes to."""
        self._finished: list[WrittenFile] = []
        """The files that are complete, in the order of their rows."""
        self._begin_counts()

    def _begin_counts(self) -> None:
        self._n_rows = 0
        self._min_lsn: int | None = None
        self._max_lsn: int | None = None
        self._ranges: dict[str, tuple[int, int]] = {}

    @property
    def _path(self) -> str:
        return f"{self._directory}/part-{len(self._finished):05d}.parquet"

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= self._group_rows or self._pending_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def end_file(self) -> None:
        """What is written next goes to another file."""
        self._write_row_group()
        self._finish_file()

    def close(self) -> list[WrittenFile]:
        self.end_file()
        return self._finished

    def _write_row_group(self) -> None:
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending, self._schema)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        try:
            if self._writer is None:
                self._sink = self._table.create(self._path)
                self._writer = pq.ParquetWriter(
                    self._sink,
                    self._schema,
                    compression="snappy",
                    use_dictionary=self._dictionary,
                    column_encoding=self._encoding,
                    write_statistics=statistics_leaves(self._schema),
                    store_schema=False,
                )
            for chunk in halved(table, _PAGE_BYTES):
                self._writer.write_table(chunk, row_group_size=max(ROW_GROUP_ROWS, chunk.num_rows))
            assert self._sink is not None
            written = self._sink.tell()
        except OSError as error:
            raise _storage_fault(self._path, error) from error
        self._count(table)
        if written >= FILE_BYTES:
            self._finish_file()

    def _count(self, table: pa.Table) -> None:
        lsns: dict[str, Any] = pc.min_max(table.column(self._lsn_index)).as_py()
        self._n_rows += table.num_rows
        if lsns["min"] is not None:
            self._min_lsn = lsns["min"] if self._min_lsn is None else min(self._min_lsn, lsns["min"])
            self._max_lsn = lsns["max"] if self._max_lsn is None else max(self._max_lsn, lsns["max"])
        for name in self._ranged:
            found = pc.min_max(_numbers(table[name])).as_py()
            if found["min"] is not None:
                least, greatest = self._ranges.get(name, (found["min"], found["max"]))
                self._ranges[name] = min(least, found["min"]), max(greatest, found["max"])

    def _range(self, column: str, least: int, greatest: int) -> ColumnRange | None:
        """None for a time that has no such text: PostgreSQL's go from 4713 BC to 294276 AD."""
        type_ = self._schema.field(column).type
        try:
            if pa.types.is_timestamp(type_):
                zone = "Z" if type_.tz else ""
                return ColumnRange(column, _time(least // 1000) + zone, _time(-(-greatest // 1000)) + zone)
            if pa.types.is_date(type_):
                return ColumnRange(column, _day(least), _day(greatest))
        except (OverflowError, ValueError):
            return None
        return ColumnRange(column, least, greatest)

    def _finish_file(self) -> None:
        if self._writer is None or self._sink is None:
            return
        try:
            self._writer.add_key_value_metadata(SPARK_METADATA)
            self._writer.close()
            size = self._sink.tell()
            self._sink.close()
            self._table.sync([self._path])
        except OSError as error:
            raise _storage_fault(self._path, error) from error
        found = [self._range(name, *each) for name, each in self._ranges.items()]
        self._finished.append(
            WrittenFile(
                self._path,
                size,
                self._n_rows,
                self._min_lsn or 0,
                self._max_lsn or 0,
                tuple(each for each in found if each is not None),
            )
        )
        self._writer = self._sink = None
        self._begin_counts()


def _time(milliseconds: int) -> str:
    since = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
    moment = since + datetime.timedelta(milliseconds=milliseconds)
    return moment.replace(tzinfo=None).isoformat(timespec="milliseconds")


def _day(days: int) -> str:
    return datetime.date.fromordinal(_EPOCH_DAY + days).isoformat()


def _numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """int64: numbers, days, or microseconds."""
    return (column.cast(pa.int32()) if pa.types.is_date(column.type) else column).cast(pa.int64())


def _storage_fault(path: str, error: OSError) -> StorageFault:
    return StorageFault(
        f"Parquet file {path} cannot be written: {known_reason(error) or type(error).__name__}"
    )


def report_of(files: list[WrittenFile]) -> pa.RecordBatch:
    columns = [[getattr(file, name) for file in files] for name in _REPORT_ARROW.names]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, _REPORT_ARROW, strict=True)], schema=_REPORT_ARROW
    )


@dataclass(frozen=True)
class WriteOutput:
    """Where one job writes one table, and above which commit LSN."""

    table: Location
    job: str
    """Unique for one table of one batch: a part of every directory's name."""
    watermark: int

    def files(self, schema: pa.Schema) -> ParquetFiles:
        """A writer in a new directory, at each call."""
        return ParquetFiles(self.table, f"{self.job}-{secrets.token_hex(8)}", schema, "_commit_lsn")

    def above(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """``rows`` (contract layout) without those that the table holds already."""
        lsns = rows.column(rows.schema.get_field_index("_commit_lsn"))
        lowest = pc.min(lsns).as_py()
        if lowest is None or lowest > self.watermark:
            return rows
        return rows.filter(pc.greater(lsns, self.watermark))
