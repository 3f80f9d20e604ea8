"""What Spark does for a refresh: net rows into files, and the new files of swaps that are too large for the driver.

Net rows are written once, as Parquet beside the table's own files (``write_net``), where this process and all executors
read them. Their directory goes with the refresh, or with the next vacuum.

In folders Spark reads and writes the files itself, and no row passes through Python. Its wheels have no connector for
object stores, so there pyarrow does it in the executors, as for the log (``parquet_frame``, ``WriteParts``): a task
holds a record batch that it reads and a row group that it writes, however large its file is. So are files written that
need field ids (Iceberg's), which Spark's writer does not give.

Of a large swap, what comes to the driver is one count for each touched file and each slot. A touched file's new version
is its rows without the net keys (a left anti join, the keys are broadcast), and after them its net rows that are not
gone. One task reads one group and writes one file, in which most rows keep their order. There is no shuffle of the
base. Only a group that is cut into several files is sorted by ranges of the key.

``mirror_session`` gives a session of its own over the user's SparkContext. Its settings are the mirror's alone, and its
jobs have their own pool.

Called by ``pipeline.mirror.refresh`` and ``pipeline.mirror.swap``, on the driver, on one thread.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.types as pt

from xidstream.pipeline.changelog.arrow_rows import CHANGE, TEXT
from xidstream.pipeline.changelog.fold import DELETED
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.local_swap import write_file
from xidstream.pipeline.mirror.plan import BaseFile, FileGroup, KeyRange, NetCounts
from xidstream.pipeline.spark.parquet_frames import parquet_frame
from xidstream.pipeline.spark.session import UNION_PARTITIONING
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SLOT: Final = "_seq"
"""The column of a net row's slot: a name of the contract, so none of the source's."""
POOL: Final = "xidstream-mirror"
BROADCAST_KEYS: Final = 4_000_000
"""Net keys up to here are broadcast, some 100 MB of integers. More are joined by a shuffle, which costs no memory."""
_JOB_BYTES: Final = 64 << 20
_NET_ROW_GROUP_BYTES: Final = 8 << 20

_CONF: Final = {
    # Delta wants timestamps that other engines read, with statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.session.timeZone": "UTC",
    # A user's ANSI mode would end the refresh at an older value that a column's newest type cannot hold.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    # A part of these is in a task's memory where pyarrow writes, whatever the rows are.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    # Each new file is a partition of a union.
    UNION_PARTITIONING: "false",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
}
_READ: Final = {
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}


def mirror_session(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    for key, value in _CONF.items():
        session.conf.set(key, value)
    return session


@contextmanager
def in_own_pool(spark: SparkSession) -> Iterator[None]:
    """The jobs of this thread, within, are of the mirror's pool: with Spark's FAIR scheduler the sink's go first."""
    context: Any = spark.sparkContext
    before = context.getLocalProperty("spark.scheduler.pool")
    context.setLocalProperty("spark.scheduler.pool", POOL)
    try:
        yield
    finally:
        context.setLocalProperty("spark.scheduler.pool", before)


def set_shuffle_partitions(session: SparkSession, n_bytes: int) -> None:
    """For tables of about this size."""
    n = max(int(session.sparkContext.defaultParallelism), min(2_000, n_bytes // _JOB_BYTES))
    session.conf.set("spark.sql.shuffle.partitions", str(n))


def read_files(session: SparkSession, schema: pa.Schema, table: Location, paths: Sequence[str]) -> DataFrame:
    """Parquet files below ``table`` in its present columns; a column that a file does not have is null."""
    if table.is_local:
        return parquet_frame(session, [f"{table.uri}/{path}" for path in paths], schema, _READ)
    return parquet_frame(session, paths, schema, _READ, table)


class SlotFinder:
    """The slot of a net row, and the files whose ranges hold its key, as Spark computes them. ``files`` have ranges and
    are in key order."""

    def __init__(self, key: RangedKey, files: Sequence[BaseFile]) -> None:
        self._key = key
        self._files = files

    def slot(self) -> Column:
        """How many files, but the first, begin at or below the key; as text.

        Spark compiles each branch of a plan that has a number of its own in it. A text is no part of the code, so all
        branches of ``group_frame`` share theirs.
        """
        return self._between(0, len(self._files) - 1).cast("string")

    def _between(self, low: int, high: int) -> Column:
        """A tree of comparisons, so that a row is compared with a few of many files."""
        from pyspark.sql import functions

        if low >= high:
            return functions.lit(low)
        middle = (low + high + 1) // 2
        below = self._is_below(self._files[middle])
        return functions.when(below, self._between(low, middle - 1)).otherwise(self._between(middle, high))

    def _is_below(self, file: BaseFile) -> Column:
        """Whether the key lies before all of the file's rows, column by column."""
        from pyspark.sql import functions

        assert file.range is not None
        condition = functions.lit(False)
        columns = list(zip(self._key.columns, file.range.low, self._key.types, strict=True))
        for name, low, type_ in reversed(columns):
            value, bound = functions.col(quoted(name)), _literal(functions.lit(low), type_)
            condition = (value < bound) | ((value == bound) & condition)
        return condition

    def counts(self, net: DataFrame, key: Sequence[str]) -> NetCounts:
        """``net`` has the column SLOT. ``key``: all its columns, also those without ranges."""
        from pyspark.sql import functions

        session = net.sparkSession
        low_names = [f"_low{i}" for i in range(len(self._key.columns))]
        high_names = [f"_high{i}" for i in range(len(self._key.columns))]
        types = ["string" if _is_text(t) else "bigint" for t in self._key.types]
        fields = ["_file int"]
        fields += [f"{name} {t}" for name, t in zip(low_names, types, strict=True)]
        fields += [f"{name} {t}" for name, t in zip(high_names, types, strict=True)]
        ranges = [file.range for file in self._files]
        rows = [(i, *r.low, *r.high) for i, r in enumerate(ranges) if r is not None]
        boxes = session.createDataFrame(rows, ", ".join(fields))
        within = functions.lit(True)
        names = [f"_key{i}" for i in range(len(self._key.columns))]
        for name, low, high, type_ in zip(names, low_names, high_names, self._key.types, strict=True):
            value = functions.col(name)
            within &= value >= _literal(functions.col(low), type_)
            within &= value <= _literal(functions.col(high), type_)
        parts = [
            functions.col(quoted(c)).alias(name) for c, name in zip(self._key.columns, names, strict=True)
        ]
        keys = net.select(*parts, SLOT, CHANGE)
        touched = keys.join(functions.broadcast(boxes), within).groupBy("_file").count()
        arriving = keys.where(_is_there()).groupBy(SLOT).count()
        is_null = [functions.col(quoted(name)).isNull() for name in key]
        has_null = reduce(lambda a, b: a | b, is_null).cast("int")
        has_text = functions.col(TEXT).isNotNull().cast("int") if TEXT in net.columns else functions.lit(0)
        whole = net.agg(
            functions.count(functions.lit(1)), functions.sum(has_null), functions.sum(has_text)
        ).toDF("n", "nulls", "texts")
        collected = (
            touched.select(functions.lit("touched"), functions.col("_file").cast("string"), "count")
            .union(arriving.select(functions.lit("arriving"), SLOT, "count"))
            .union(whole.select(functions.lit("n"), functions.lit("0"), "n"))
            .union(whole.select(functions.lit("nulls"), functions.lit("0"), "nulls"))
            .union(whole.select(functions.lit("texts"), functions.lit("0"), "texts"))
            .collect()
        )
        found: dict[str, dict[int, int]] = {"touched": {}, "arriving": {}, "n": {}, "nulls": {}, "texts": {}}
        for kind, index, count in collected:
            found[kind][int(index)] = count or 0
        ones = [found[kind].get(0, 0) for kind in ("n", "nulls", "texts")]
        return NetCounts(found["touched"], found["arriving"], *ones)


def group_frame(
    groups: Sequence[FileGroup],
    base: Sequence[DataFrame],
    net: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    n_keys: int,
) -> DataFrame:
    """The rows of the groups' new files, each file one partition. ``base[i]``: the rows of the i-th group's old files.

    ``key`` (ranged columns first) and ``columns`` are the table's. ``n_keys``: of net rows.
    """
    from pyspark.sql import functions

    keys = net.select(*map(quoted, key))
    if n_keys <= BROADCAST_KEYS:
        keys = functions.broadcast(keys)
    frames = []
    for group, rows in zip(groups, base, strict=True):
        new = net.where(functions.col(SLOT).isin([str(slot) for slot in group.slots]) & _is_there())
        new = new.select(*map(quoted, columns))
        if group.files:
            new = rows.join(keys, list(key), "left_anti").select(*map(quoted, columns)).union(new)
        frames.append(cut(new, key, group.n_files))
    return reduce(lambda a, b: a.union(b), frames)


def cut(rows: DataFrame, key: Sequence[str], n_files: int) -> DataFrame:
    """One partition for each file, by ranges of the key where there are several. ``key``: ranged columns first."""
    if n_files == 1 or not key:
        return rows.coalesce(n_files)
    names = [quoted(name) for name in key]
    return rows.repartitionByRange(n_files, *names).sortWithinPartitions(*names)


def write_files(rows: DataFrame, table: Location, directory: str, schema: pa.Schema) -> list[str]:
    """One file for each partition with rows, on disk, as paths relative to the table. ``rows`` have the columns of
    ``schema``. Raises what Spark raises."""
    paths = _written(rows, table, directory, schema, {})
    table.sync(paths)
    return paths


def write_net(net: DataFrame, table: Location, directory: str, schema: pa.Schema) -> list[str]:
    """One row for each changed key (``pipeline.changelog.fold.net_changes``), in files as ``write_files`` names them.

    Without dictionaries: so a footer says how many bytes the values take in memory.
    """
    options = {
        "parquet.enable.dictionary": "false",
        "parquet.block.size": str(_NET_ROW_GROUP_BYTES),
    }
    return _written(net, table, directory, schema, options)


def _written(
    rows: DataFrame, table: Location, directory: str, schema: pa.Schema, options: Mapping[str, str]
) -> list[str]:
    if not table.is_local or has_ids(schema):
        found = rows.mapInArrow(WriteParts(table, directory, schema, is_plain=bool(options)), "path string")
        return sorted(path for (path,) in found.collect())
    folder = f"{table.uri}/{directory}"
    options = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false", **options}
    rows.write.options(**options).parquet(f"file://{folder}")
    return [f"{directory}/{name}" for name in sorted(os.listdir(folder)) if name.endswith(".parquet")]


def has_ids(schema: pa.Schema) -> bool:
    """Whether the columns of the files are to have field ids."""
    return any(b"PARQUET:field_id" in (field.metadata or {}) for field in schema)


@dataclass(frozen=True)
class WriteParts:
    """For ``mapInArrow``: each partition with rows becomes a file below ``table``, and its path comes out. A task that
    is done again writes another file, and that of the first stays for the vacuum. ``is_plain``: without
    dictionaries."""

    table: Location
    directory: str
    schema: pa.Schema
    is_plain: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        number = 0 if context is None else context.partitionId()
        path = f"{self.directory}/{number:05d}-{uuid.uuid4().hex}.parquet"
        rows = (in_schema(pa.Table.from_batches([batch]), self.schema) for batch in batches)
        paths = write_file(self.table, path, rows, not self.is_plain, self.schema, lambda: None)
        yield pa.RecordBatch.from_arrays([pa.array(paths, pa.string())], names=["path"])


def bounds_of(tail: DataFrame, key: RangedKey) -> KeyRange | None:
    """The lowest and highest value of each ranged column of the key in all rows of a tail. Runs a small job."""
    from pyspark.sql import functions

    ends = []
    for name, type_ in zip(key.columns, key.types, strict=True):
        value = _stored(functions.col(quoted(name)), type_)
        ends += [functions.min(value), functions.max(value)]
    found = tail.agg(*ends).first()
    if found is None or None in found:
        return None
    return KeyRange(tuple(found[::2]), tuple(found[1::2]))


def _is_there() -> Column:
    from pyspark.sql import functions

    return functions.col(CHANGE) != DELETED


def _stored(value: Column, type_: pa.DataType) -> Column:
    """A value of the column's type as Parquet stores it: the reverse of ``_literal``."""
    from pyspark.sql import functions

    if pt.is_date32(type_):
        return functions.unix_date(value)
    if pt.is_timestamp(type_):
        return functions.unix_micros(value.cast("timestamp"))
    return value


def _is_text(type_: pa.DataType) -> bool:
    return bool(pt.is_string(type_) or pt.is_large_string(type_))


def _literal(value: Column, type_: pa.DataType) -> Column:
    """A bound, which is a number for a date or a timestamp, as a value of the column's type."""
    from pyspark.sql import functions

    if pt.is_date32(type_):
        return functions.date_from_unix_date(value.cast("int"))
    if pt.is_timestamp(type_):
        instant = functions.timestamp_micros(value.cast("long"))
        return instant.cast("timestamp_ntz") if type_.tz is None else instant
    return value
