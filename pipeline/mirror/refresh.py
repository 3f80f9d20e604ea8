"""A refresh: all base tables of a slot, brought to the newest complete commit of the log, and then named at once.

The order is what makes it safe. First each table is brought to the LSN by one commit of its own, which names the LSN
and the generation it came from. Last, the manifest names all versions in one commit. A refresh that ends anywhere in
between has changed nothing for whoever reads by the manifest. The next one looks at each table: where it stands, its
own last commit says. A table that is ahead of the manifest is gone on with from there.

For each table there is one of four answers, and ``what_to_do`` decides it:

- *keep*: the log has nothing new of it. No commit; the manifest repeats the version.
- *build*: there is no base yet, or it comes from an earlier snapshot. The fold of the snapshot and all behind it.
- *rewrite*: the fold of the base and what is behind it, all files written anew. For tables without a key (a multiset:
  no range tells where a row is), after a TRUNCATE, after a change of columns other than an addition, and where a key
  has no ranges (``pipeline.mirror.key_ranges``).
- *swap*: the usual one, only touched files (``pipeline.mirror.plan``).

Another mirror of the slot makes itself known in the manifest, and this one ends with Superseded at its next look. What
it has in hand then is refused by Delta (``pipeline.mirror.base_table``).

Rejected: upserting every batch of the sink. It writes files anew at each commit, keeps the sink from its next batch,
and readers of two tables see two moments.

Called by ``pipeline.mirror.mirror``. Runs on the driver, on one thread; Spark does the work.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.mirror import rewrite
from xidstream.pipeline.mirror.base_table import (
    TEXT_FIELD,
    BaseTable,
    MirrorMarks,
    NewFile,
    about_base,
)
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.plan import (
    BaseFile,
    Group,
    in_key_order,
    jobs,
    n_files_for,
    plan_swap,
    removed,
)
from xidstream.pipeline.spark.delta_table import SnapshotOutdated
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.state.fold import fold, net_changes
from xidstream.pipeline.state.manifest import ManifestLine, current
from xidstream.pipeline.state.shape import TableShape
from xidstream.pipeline.state.table_at import LogRows, TableAt

if TYPE_CHECKING:
    from pyspark import StorageLevel
    from pyspark.sql import DataFrame, SparkSession


class Answer(enum.Enum):
    """What a refresh does with one table."""

    KEEP = "keep"
    BUILD = "build"
    REWRITE = "rewrite"
    SWAP = "swap"


@dataclass(frozen=True)
class TableRefresh:
    """What was done with one table. ``version`` is Delta's. Bytes and files are those of the new and removed ones."""

    table: str
    answer: Answer
    version: int
    n_files_written: int = 0
    bytes_written: int = 0
    n_files_removed: int = 0
    n_files_kept: int = 0


def what_to_do(
    *,
    is_built: bool,
    is_same_generation: bool,
    has_changes: bool,
    has_truncate: bool,
    columns_fit: bool,
    has_ranges: bool,
) -> Answer:
    """``columns_fit``: the base has the table's columns, or lacks new ones alone. ``has_ranges``: of all its files."""
    if not is_built or not is_same_generation:
        return Answer.BUILD
    if not columns_fit:
        return Answer.REWRITE
    if not has_changes:
        return Answer.KEEP
    return Answer.SWAP if has_ranges and not has_truncate else Answer.REWRITE


def new_columns(base: Sequence[pa.Field], wanted: Sequence[pa.Field]) -> list[pa.Field] | None:
    """The columns that the base lacks; None where it differs otherwise, and must be written anew."""
    there = {field.name: field.type for field in base if field.name != TEXT_FIELD.name}
    names = [field.name for field in wanted]
    if any(name not in names for name in there):
        return None
    if any(there.get(field.name, field.type) != field.type for field in wanted):
        return None
    # Delta refuses names that differ in case alone, so such a column must not be added beside another.
    lower = {name.lower() for name in there}
    added = [field for field in wanted if field.name not in there]
    return None if any(field.name.lower() in lower for field in added) else added


class TableRefresher:
    """Refreshes one table to the LSN of ``log``. ``line``: the table's in the manifest, or None."""

    def __init__(
        self,
        session: SparkSession,
        root: Location,
        marks: MirrorMarks,
        log: TableAt,
        line: ManifestLine | None,
        file_bytes: int,
    ) -> None:
        self._session = session
        self._log = log
        self._lsn = lsn = int(log.lsn)
        self._place = int(log.generation.bounds.place)
        self._file_bytes = file_bytes
        self._shape = log.shape
        self._fields = arrow_fields(log.shape)
        types = {field.name: field.type for field in self._fields}
        self._key = RangedKey.of(log.shape.key, types)
        self._label = log.shape.table
        location = current(root).child(directory_of(log))
        about = about_base(self._label, log.shape.key, self._key)
        self._base = BaseTable.open_or_create(location, self._label, self._fields, about, marks)
        if self._base.lsn > lsn:
            raise SnapshotOutdated(self._label)  # A refresh that went further: look at the log again.
        self._about = about
        self._since = self._base.lsn
        if line is not None and line.version == self._base.version:
            self._since = max(self._since, line.lsn)

    def run(self) -> TableRefresh:
        base, log = self._base, self._log
        is_same = base.place == self._place
        added = new_columns(base.fields, self._fields)
        tail = log.tail(self._session, self._since) if base.lsn and is_same else None
        files = base.files(self._key)
        ordered = in_key_order(files) if self._key.columns else None
        answer = what_to_do(
            is_built=base.lsn > 0,
            is_same_generation=is_same,
            has_changes=tail is not None,
            has_truncate=tail is not None and _has(tail.frame, "_change_type = 'truncate'"),
            columns_fit=added is not None,
            has_ranges=bool(ordered),
        )
        if answer is Answer.BUILD:
            snapshot, tail = log.snapshot(self._session), log.tail(self._session)
            return self._write_all(Answer.BUILD, snapshot, tail, len(files))
        if answer is Answer.REWRITE:
            return self._rewrite(files, tail)
        base.describe(self._about)
        base.add_columns(added or [])
        if answer is Answer.KEEP or tail is None or ordered is None:
            return TableRefresh(self._label, Answer.KEEP, base.version, n_files_kept=len(files))
        return self._swap(ordered, tail)

    # -- all files -------------------------------------------------------------------------------------

    def _rewrite(self, files: Sequence[BaseFile], tail: LogRows | None) -> TableRefresh:
        rows = LogRows(self._read(files), sum(file.size_bytes for file in files))
        return self._write_all(Answer.REWRITE, rows, tail, len(files))

    def _write_all(self, answer: Answer, rows: LogRows, tail: LogRows | None, n_removed: int) -> TableRefresh:
        n_bytes = rows.n_bytes + (0 if tail is None else tail.n_bytes)
        rewrite.set_shuffle_partitions(self._session, n_bytes)
        has_text = any(_has(each.frame, "_text is not null") for each in (rows, tail) if each is not None)
        folded = rows.frame if tail is None else fold(rows.frame, tail.frame, self._shape)
        fields = [*self._fields, TEXT_FIELD] if has_text else self._fields
        folded = _conformed(folded, fields)
        n_files = n_files_for(n_bytes, self._file_bytes)
        reach("writing_base")
        directory = _new_directory()
        paths = rewrite.write_files(
            rewrite.cut(folded, self._shape.key, n_files), self._base.location, directory
        )
        new = self._new_files(paths)
        self._base.replace_all(new, self._key, fields, self._lsn, self._place)
        self._base.describe(self._about)
        return self._done(answer, new, n_removed, 0)

    # -- touched files ---------------------------------------------------------------------------------

    def _swap(self, files: Sequence[BaseFile], tail: LogRows) -> TableRefresh:
        finder = rewrite.SlotFinder(self._key, files)
        rewrite.set_shuffle_partitions(self._session, tail.n_bytes)
        net = net_changes(self._read(files), tail.frame, self._shape).withColumn(rewrite.SLOT, finder.slot())
        # What is kept is kept in portions with statistics. So each group decodes little more than its own rows.
        net = net.sortWithinPartitions(rewrite.SLOT)
        with _on_disk(net):
            counts = finder.counts(net, self._shape.key or ())
            if counts.n_null_keys:
                return self._rewrite(files, tail)
            if counts.n_texts and not self._base.has_text:
                self._base.add_columns([TEXT_FIELD])
            fields = self._base.fields
            groups = plan_swap(files, counts.touched, counts.arriving, self._file_bytes)
            paths = []
            reach("writing_base")
            for portion in jobs(groups):
                directory = _new_directory()
                frame = self._frame(portion, files, net, fields, counts.n_keys)
                paths += rewrite.write_files(frame, self._base.location, directory)
            new = self._new_files(paths)
        gone = removed(files, groups)
        if not new and not gone:
            # All that is new had no effect, or was in the snapshot already. The next refresh begins behind it.
            return TableRefresh(self._label, Answer.KEEP, self._base.version, n_files_kept=len(files))
        self._base.replace(new, self._key, gone, self._lsn, self._place)
        return self._done(Answer.SWAP, new, len(gone), len(files) - len(gone))

    def _frame(
        self,
        groups: Sequence[Group],
        files: Sequence[BaseFile],
        net: DataFrame,
        fields: Sequence[pa.Field],
        n_keys: int,
    ) -> DataFrame:
        base = [self._read([files[i] for i in group.files], fields) for group in groups]
        names = [field.name for field in fields]
        return rewrite.group_frame(groups, base, net, self._shape.key or (), names, n_keys)

    # -- both ------------------------------------------------------------------------------------------

    def _read(self, files: Sequence[BaseFile], fields: Sequence[pa.Field] | None = None) -> DataFrame:
        """The rows of files in the base's own columns and ``_text``, or in ``fields``."""
        if fields is None:
            fields = self._base.fields if self._base.has_text else [*self._base.fields, TEXT_FIELD]
        paths = [self._base.absolute(file.path) for file in files]
        return rewrite.read_files(self._session, pa.schema(list(fields)), paths)

    def _new_files(self, paths: Sequence[str]) -> list[NewFile]:
        found = []
        for path in paths:
            absolute = self._base.absolute(path)
            found.append(NewFile(path, os.path.getsize(absolute), self._key.facts_of(absolute)))
        return [file for file in found if file.facts.n_rows]

    def _done(self, answer: Answer, new: Sequence[NewFile], n_removed: int, n_kept: int) -> TableRefresh:
        n_bytes = sum(file.size_bytes for file in new)
        return TableRefresh(self._label, answer, self._base.version, len(new), n_bytes, n_removed, n_kept)


def directory_of(log: TableAt) -> str:
    """Of the base table, below ``current``: as that of the log's table, below the root."""
    return os.path.basename(log.log_table.location.uri)


def arrow_fields(shape: TableShape) -> list[pa.Field]:
    """The base table's columns."""
    from pyspark.sql.pandas.types import to_arrow_type

    return [pa.field(name, to_arrow_type(column.type)) for name, column in shape.columns.items()]


def _conformed(rows: DataFrame, fields: Sequence[pa.Field]) -> DataFrame:
    from pyspark.sql import functions

    from xidstream.pipeline.spark.spark_schemas import quoted, spark_schema

    there = set(rows.columns)
    types = spark_schema(pa.schema(list(fields)))
    columns = [
        (functions.col(quoted(f.name)) if f.name in there else functions.lit(None))
        .cast(f.dataType)
        .alias(f.name)
        for f in types.fields
    ]
    return rows.select(*columns)


def _has(rows: DataFrame, condition: str) -> bool:
    return bool(rows.where(condition).limit(1).count())


def _new_directory() -> str:
    return f"refresh-{uuid.uuid4().hex}"


@contextmanager
def _on_disk(rows: DataFrame) -> Iterator[None]:
    """Keep ``rows`` on the executors' disks meanwhile: they are used several times, and memory is the sink's."""
    from pyspark import StorageLevel as Levels

    level: StorageLevel = Levels.DISK_ONLY
    rows.persist(level)
    try:
        yield
    finally:
        rows.unpersist()
