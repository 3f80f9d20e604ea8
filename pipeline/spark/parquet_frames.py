"""Parquet files as a DataFrame: by Spark's own reader, or by pyarrow in the executors where Spark's reader cannot.

Two things it cannot. Its wheels have no connector for object stores. And it hands the list of columns to Parquet as a
value of Hadoop's configuration, which replaces ``${…}`` in each value that it gives out
(``org.apache.hadoop.conf.Configuration.substituteVars``). So a column whose name holds the name of a property in such
brackets is looked for under another name, and read as null, without a word. There is no way to quote the brackets: with
such a column pyarrow reads. ``is_read_as_named`` says so. Spark's writer hands its columns over in the same way, so it
cannot write such a table either.

With pyarrow the rows pass through the executors batch by batch. Spark asks such a function for rows, and never says
which of their columns a query uses: whoever makes the frame says so, by its schema. Columns that are not in it are not
read, nor are row groups whose statistics have no wanted row. From a store the rest comes in few requests: Arrow asks
for the columns of several row groups at once, and takes neighbours together (``pre_buffer``).

Rejected for stores, so that Spark's own reader could prune by itself: a server on this machine that speaks WebHDFS,
which Hadoop's client knows without a jar. It reads some four times as many bytes, works where all executors are on one
machine, and would need this way beside it elsewhere. And it is an open port to the store's files, whose secret would
stand in paths that Spark's UI shows to everybody. A DataFrame of a class of our own whose ``select`` hands its columns
down: it would prune in one spelling of a query and not in another.

And Spark takes a path for a pattern, unless it is told not to: ``{a,b}`` may be in a folder's name.

Called by whatever reads Parquet: segments, snapshots for functions, the change log and base tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import pyarrow as pa

from xidstream.pipeline.spark.spark_schemas import spark_schema

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyspark.sql import DataFrame, SparkSession

_REPLACED: Final = "${"
_AS_THEY_ARE: Final = {"__globPaths__": "false", "recursiveFileLookup": "true"}
"""A path is a path, whatever characters it has, and its folders are no partitions."""
_BATCH_ROWS: Final = 16 << 10
_AHEAD_BYTES: Final = 32 << 20
"""How much of a store's file, compressed, is asked for at a time, and held: the next row groups that fit, or one."""
_FIELD_ID: Final = b"PARQUET:field_id"


def is_read_as_named(names: Iterable[str]) -> bool:
    """Whether Spark's Parquet reader and writer take these columns' names as they are."""
    return not any(_REPLACED in name for name in names)


class ReadableFolder(Protocol):
    """A folder in an object store: a ``Location``, or a folder of the storage (``storage.stored_folder``). Pickles."""

    def open(self, path: str) -> AbstractContextManager[Any]:
        """A file to read from, relative to this folder."""
        ...


class ColumnLookup(NamedTuple):
    """Which column of a file has a column's values: the one with the field id ``id``, in a file that has such ids, else
    the first of ``names`` that is there."""

    id: int
    names: tuple[str, ...]


def parquet_frame(
    spark: SparkSession,
    paths: Sequence[str],
    schema: pa.Schema,
    options: Mapping[str, str],
    location: ReadableFolder | None = None,
    lookups: Sequence[ColumnLookup] | None = None,
    wanted: pc.Expression | None = None,
) -> DataFrame:
    """The rows of the files in ``schema``; null in a column that a file has not. ``paths`` are absolute and local (or
    URIs that Spark reads), or below ``location`` in an object store. ``options`` are those of Spark's reader.

    ``lookups``: for each of the schema's columns, where files may call it otherwise, or have another type; then pyarrow
    reads. ``wanted``: which rows are asked for. Others may come as well: a caller filters."""
    types = spark_schema(schema)
    if not paths:
        return spark.createDataFrame([], types)
    if location is None and lookups is None and is_read_as_named(schema.names):
        uris = [f"file://{path}" if path.startswith("/") else path for path in paths]
        return spark.read.schema(types).options(**_AS_THEY_ARE, **options).parquet(*uris)
    read = StoredFiles(tuple(paths), schema, location, None if lookups is None else tuple(lookups), wanted)
    return spark.range(0, len(paths), 1, len(paths)).mapInArrow(read, types)


@dataclass(frozen=True)
class StoredFiles:
    """For ``mapInArrow``: the numbers that come in are indexes into ``paths``."""

    paths: tuple[str, ...]
    schema: pa.Schema
    location: ReadableFolder | None = None
    lookups: tuple[ColumnLookup, ...] | None = None
    wanted: pc.Expression | None = None

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        for batch in numbers:
            for number in batch.column(0).to_pylist():
                with self._opened(self.paths[number]) as file:
                    reader = pq.ParquetFile(
                        file, pre_buffer=self.location is not None, page_checksum_verification=True
                    )
                    there = reader.schema_arrow
                    names = list(dict.fromkeys(there.names[i] for i in self._field_indexes(there) if i >= 0))
                    for groups in self._portions(reader, names):
                        for rows in reader.iter_batches(_BATCH_ROWS, groups, names):
                            yield self._conformed(rows)

    def _portions(self, reader: pq.ParquetFile, names: Sequence[str]) -> Iterator[list[int]]:
        """The row groups with wanted rows, as many at a time as are read ahead."""
        from xidstream.pipeline.log_tables.file_rows import groups_with  # it loads pandas

        footer = reader.metadata
        groups: Sequence[int] = range(footer.num_row_groups)
        # Files that call columns otherwise, or hold them in another type, have other statistics, too.
        if self.wanted is not None and self.lookups is None:
            groups = groups_with(self.wanted, footer, self.schema)
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        leaves = [
            i for i, path in enumerate(paths) if any(path == n or path.startswith(f"{n}.") for n in names)
        ]
        portion, n_bytes = list[int](), 0
        for number in groups:
            group = footer.row_group(number)
            size = sum(group.column(i).total_compressed_size for i in leaves)
            if portion and n_bytes + size > _AHEAD_BYTES:
                yield portion
                portion, n_bytes = [], 0
            portion.append(number)
            n_bytes += size
        if portion:
            yield portion

    def _opened(self, path: str) -> AbstractContextManager[Any]:
        if self.location is None:
            return open(path.removeprefix("file://"), "rb")
        return self.location.open(path)

    def _conformed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for field, i in zip(self.schema, self._field_indexes(rows.schema), strict=True):
            arrays.append(pa.nulls(rows.num_rows, field.type) if i < 0 else rows.column(i).cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _field_indexes(self, there: pa.Schema) -> list[int]:
        return field_indexes(there, self.schema.names, self.lookups)


def field_indexes(
    there: pa.Schema, names: Sequence[str], lookups: Sequence[ColumnLookup] | None
) -> list[int]:
    """For each of the columns ``names``, which of a file's has its values, or -1. ``lookups``: theirs, or None where
    the file calls them as the table does."""
    if lookups is None:
        return [there.get_field_index(name) for name in names]
    ids = {int(f.metadata[_FIELD_ID]): i for i, f in enumerate(there) if _FIELD_ID in (f.metadata or {})}
    if ids:
        return [ids.get(column.id, -1) for column in lookups]
    found = ([there.get_field_index(name) for name in column.names] for column in lookups)
    return [next((i for i in indexes if i >= 0), -1) for indexes in found]
