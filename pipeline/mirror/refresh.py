"""A refresh: all base tables of a slot, brought to the newest complete commit of the log, and then named at once.

The order is what makes it safe. First each table is brought to the LSN by one commit of its own, which names the LSN
and the generation it came from. Last, the manifest names all versions in one commit. A refresh that ends anywhere in
between has changed nothing for whoever reads by the manifest. The next one looks at each table: where it stands, its
own last commit says. A table that is ahead of the manifest is gone on with from there.

Small tables, and most swaps, need no job of Spark: this process does them (``here``), several at a time. A job takes a
second whatever its size, and a schema has hundreds of small tables. For the others ``here`` answers None, and Spark
does them one after the other (``run``).

For each table there is one of four answers, and ``what_to_do`` decides it:

- *keep*: the log has nothing new of it. No commit; the manifest repeats the version.
- *build*: there is no base yet, or it comes from an earlier snapshot. The fold of the snapshot and all after it.
- *rewrite*: the fold of the base and what is behind it, all files written anew. For tables without a key (a multiset:
  no range tells where a row is), after a TRUNCATE, after a change of columns other than an addition, and where a key
  has no ranges (``pipeline.mirror.key_ranges``).
- *swap*: the usual one, only touched files (``pipeline.mirror.swap``).

An example. The manifest names LSN 500 with ``customers`` at version 7, ``orders`` at 12 and ``items`` at 4. The log is
complete up to 900. It has nothing new of ``customers``, updates of ``orders``, and a TRUNCATE of ``items``::

    table        answer     what it commits         the manifest's line
    customers    keep       nothing                 version 7
    orders       swap       version 13, LSN 900     version 13
    items        rewrite    version 5, LSN 900      version 5

If this process dies before the manifest's commit, readers by the manifest still get 7, 12 and 4. The next refresh, to
950, finds in the last commit of ``orders`` that it stands at 900, and reads the log after that alone.

Another mirror of the slot makes itself known in the manifest, and this one ends with Superseded at its next look. What
it has in hand then no table takes (``pipeline.mirror.base_table``).

Rejected: upserting every batch of the sink. It writes files anew at each commit, keeps the sink from its next batch,
and readers of two tables see two moments.

Called by ``pipeline.mirror.base_tables``, on the driver: ``here`` on several threads, ``run`` on one.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.changelog.base_stores import BaseStore
from xidstream.pipeline.changelog.fold import base_alone, fold
from xidstream.pipeline.changelog.log_table import DeltaLogTable, LogFile
from xidstream.pipeline.changelog.manifest import ManifestLine
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.small_fold import SmallTable, small_table
from xidstream.pipeline.changelog.table_at import LogRows, TableAt
from xidstream.pipeline.changelog.tail import TailFacts, tail_facts
from xidstream.pipeline.delta.kept_tables import KeptTables
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.erased_marks import ERASURES
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.table_metadata import TYPES
from xidstream.pipeline.mirror import rewrite
from xidstream.pipeline.mirror.base_table import (
    TEXT_FIELD,
    BaseFacts,
    BaseTable,
    MirrorMarks,
    NewFile,
    about_base,
)
from xidstream.pipeline.mirror.file_chunks import footer_of, repeating_texts
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.local_swap import write_file
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.mirror.plan import (
    FILE_ROWS,
    BaseFile,
    in_key_order,
    n_files_for,
    removed,
)
from xidstream.pipeline.mirror.swap import Swap, base_rows, new_directory
from xidstream.pipeline.mirror.tail_rows import net_of
from xidstream.pipeline.pg_rules import labelled_table
from xidstream.pipeline.spark.parquet_frames import is_read_as_named
from xidstream.pipeline.spark.spark_schemas import arrow_type, quoted, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Answer(enum.Enum):
    """What a refresh does with one table."""

    KEEP = "keep"
    BUILD = "build"
    REWRITE = "rewrite"
    SWAP = "swap"


@dataclass(frozen=True)
class TableRefresh:
    """What was done with one table. ``version``: of the base table. The bytes and the counts are of the new and of the
    removed files."""

    table: str
    answer: Answer
    version: int
    n_files_written: int = 0
    bytes_written: int = 0
    n_files_removed: int = 0
    facts: BaseFacts | None = field(default=None, compare=False, repr=False)
    """None: the table was not opened."""


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


class _SparkIsNeeded(Exception):
    """This process cannot do it alone."""


class TableRefresher:
    """Refreshes one table to the LSN of ``log``, once. ``line``: the table's in the manifest, or None. ``check`` raises
    where the refresh is to be given up. ``kept``: the handles of the log's table and of the base are of these."""

    def __init__(
        self,
        bases: BaseStore,
        marks: MirrorMarks,
        log: TableAt,
        line: ManifestLine | None,
        file_bytes: int,
        check: Callable[[], None],
        kept: KeptTables | None = None,
    ) -> None:
        self._check = check
        self._kept = kept
        self._spark: SparkSession | None = None
        """Given to ``run``; None while the refresh is tried without Spark (``here``)."""
        self._log = log
        self._lsn = lsn = int(log.lsn)
        self._snapshot_lsn = int(log.generation.bounds.snapshot_lsn)
        self._file_bytes = file_bytes
        self._shape = log.shape
        self._fields = arrow_fields(log.shape)
        """The columns of the base table, as the log has them at the LSN."""
        types = {field.name: field.type for field in self._fields}
        self._key = RangedKey.of(log.shape.key, types, any_name=bases.bounds_any_name)
        self._label = log.shape.table
        if not self._fields:
            raise Unsupported(f"table {self._label} has no columns")  # Delta has no such tables.
        if not is_read_as_named(types):
            raise Unsupported(
                f"table {self._label}: Spark cannot write a column with ${{ in its name; `ChangeLog.as_of` reads it"
            )
        about = about_base(self._label, log.shape.key, self._key, types_of(log))
        key = directory_of(bases, log)
        self._base = BaseTable.open_or_create(bases, key, self._label, self._fields, about, marks)
        if self._base.lsn > lsn:
            raise SnapshotOutdated(self._label)  # A refresh that went further: look at the log again.
        self._about = about
        """What the base table is to say about itself: its description and properties."""
        self._since = self._base.lsn
        """The base table has all commits up to this LSN; the log's tail is read from there."""
        if line is not None and line.version == self._base.version:
            self._since = max(self._since, line.lsn)
        self._base.leave_out(None)

    def here(self) -> TableRefresh | None:
        """None: Spark has to do it (``run``)."""
        try:
            return self._run()
        except _SparkIsNeeded:
            return None

    def run(self, session: SparkSession) -> TableRefresh:
        """With jobs of Spark for what ``here`` could not do."""
        self._spark = session
        return self._run()

    @property
    def _session(self) -> SparkSession:
        if self._spark is None:
            raise _SparkIsNeeded
        return self._spark

    @cached_property
    def _files(self) -> list[BaseFile]:
        return self._base.files(self._key)

    @cached_property
    def _ordered(self) -> list[BaseFile] | None:
        """In the order of the key; None where some have no range."""
        return in_key_order(self._files) if self._key.columns else None

    @cached_property
    def _log_files(self) -> list[LogFile]:
        """With what may be new."""
        is_same = self._base.snapshot_lsn == self._snapshot_lsn
        return self._log.tail_files(self._since) if self._base.lsn and is_same else []

    @cached_property
    def _added(self) -> list[pa.Field] | None:
        return new_columns(self._base.fields, self._fields)

    @cached_property
    def _net(self) -> NetRows | None:
        """What is new, by key, read by this process; None where it cannot."""
        if not self._log_files or not self._ordered or self._added is None:
            return None
        texts = self._texts(self._ordered[0])
        return net_of(self._log, self._log_files, self._since, self._fields, self._key, texts)

    @cached_property
    def _small(self) -> SmallTable | None:
        """All rows, read by this process; None where it cannot."""
        return small_table(self._log, self._fields, self._key.ahead_in(self._shape.key or ()))

    def _run(self) -> TableRefresh:
        base, log = self._base, self._log
        tail = facts = None
        if self._log_files and self._net is None:
            if self._small is not None:
                return self._write_small(Answer.REWRITE, self._small)
            tail, facts = self._tail(self._since)
        answer = what_to_do(
            is_built=base.lsn > 0,
            is_same_generation=base.snapshot_lsn == self._snapshot_lsn,
            has_changes=bool(self._log_files),
            has_truncate=facts is not None and facts.truncated_at is not None,
            columns_fit=self._added is not None,
            has_ranges=bool(self._ordered),
        )
        if answer in (Answer.BUILD, Answer.REWRITE) and self._small is not None:
            return self._write_small(answer, self._small)
        if answer is Answer.BUILD and log.contained_upto < log.cut and not base.is_as_made:
            raise Unsupported(
                f"the base table of {self._label} was changed by another program, and the log that it could be built "
                "from anew was shortened",
                remedy=f"take a new snapshot: `xidstream snapshot request --table {self._label}`",
            )
        if answer is Answer.BUILD:
            texts = log.by_key.snapshot(self._session).frame
            return self._write_all(answer, log.snapshot(self._session), texts, *self._tail(0))
        if answer is Answer.REWRITE:
            return self._rewrite(tail, facts)
        base.describe(self._about)
        base.add_columns(self._added or [])
        if answer is Answer.KEEP or self._ordered is None:
            return TableRefresh(self._label, Answer.KEEP, base.version, facts=base.facts)
        return self._swap(self._ordered, tail, facts)

    def _tail(self, since: int) -> tuple[LogRows | None, TailFacts | None]:
        """With facts of a job that reads the key alone, where the table has one."""
        tail = self._log.tail(self._session, since)
        if tail is None:
            return None, None
        if self._shape.key is None:
            return tail, tail_facts(tail.frame, self._shape)
        return tail, self._log.facts_by_key(self._session, since)

    def _texts(self, file: BaseFile) -> list[str]:
        footer = footer_of(self._base.location, file.path)
        return repeating_texts([footer], pa.schema(self._fields), self._shape.key or ())

    # -- all files -------------------------------------------------------------------------------------

    def _write_small(self, answer: Answer, small: SmallTable) -> TableRefresh:
        reach("writing_base")
        rows = small.rows
        fields = [*self._fields, TEXT_FIELD] if TEXT_FIELD.name in rows.column_names else self._fields
        schema = self._base.file_schema(fields)
        n_files = n_files_for(small.n_bytes, self._file_bytes)
        n_rows = -(-rows.num_rows // n_files)
        directory, paths = new_directory(), list[str]()
        for i in range(n_files):
            part = in_schema(rows.slice(i * n_rows, n_rows), schema)
            path = f"{directory}/{i:05d}.parquet"
            paths += write_file(self._base.location, path, [part], True, schema, self._check)
        self._base.location.sync_folders(paths)
        return self._replace_all(answer, paths, fields)

    def _rewrite(self, tail: LogRows | None, facts: TailFacts | None) -> TableRefresh:
        frame = base_rows(self._session, self._base, self._files)
        n_bytes, n_rows = (
            sum(file.size_bytes for file in self._files),
            sum(file.n_rows for file in self._files),
        )
        texts = (
            base_rows(self._session, self._base, self._files, [TEXT_FIELD]) if self._base.has_text else None
        )
        return self._write_all(Answer.REWRITE, LogRows(frame, n_bytes, n_rows), texts, tail, facts)

    def _write_all(
        self,
        answer: Answer,
        rows: LogRows,
        texts: DataFrame | None,
        tail: LogRows | None,
        facts: TailFacts | None,
    ) -> TableRefresh:
        """``texts``: ``rows`` in ``_text`` and few columns more; None where none has a text."""
        n_bytes = rows.n_bytes + (0 if tail is None else tail.n_bytes)
        rewrite.set_shuffle_partitions(self._session, n_bytes)
        has_text = texts is not None and _has_text(texts)
        if tail is not None and not has_text:
            # The facts do not tell: they are of the key alone, where the table has one.
            since = 0 if answer is Answer.BUILD else self._since
            by_key = self._log.by_key.tail(self._session, since)
            has_text = by_key is not None and _has_text(by_key.frame)
        if tail is None:
            folded = base_alone(rows.frame, self._shape)
        else:
            folded = fold(rows.frame, tail.frame, self._shape, facts)
        fields = [*self._fields, TEXT_FIELD] if has_text else self._fields
        folded = _conformed(folded, fields)
        n_rows = rows.n_rows + (0 if tail is None else tail.n_rows)
        n_files = max(n_files_for(n_bytes, self._file_bytes), n_files_for(n_rows, FILE_ROWS))
        reach("writing_base")
        directory = new_directory()
        paths = rewrite.write_files(
            rewrite.cut(folded, self._key.ahead_in(self._shape.key or ()), n_files),
            self._base.location,
            directory,
            self._base.file_schema(fields),
        )
        return self._replace_all(answer, paths, fields)

    def _replace_all(self, answer: Answer, paths: Sequence[str], fields: Sequence[pa.Field]) -> TableRefresh:
        new, n_removed = self._new_files(paths), len(self._files)
        self._check_erasures()
        self._base.replace_all(new, self._key, fields, self._lsn, self._snapshot_lsn)
        self._base.describe(self._about)
        return self._done(answer, new, n_removed)

    # -- touched files ---------------------------------------------------------------------------------

    def _swap(
        self,
        files: Sequence[BaseFile],
        tail: LogRows | None,
        facts: TailFacts | None,
    ) -> TableRefresh:
        swap = Swap(lambda: self._session, self._base, self._shape, self._key, self._file_bytes, self._check)
        swapped = None if self._net is None else swap.here(files, self._net)
        if swapped is None:
            self._net = None  # it is large, and Spark begins anew
            if tail is None or facts is None:
                tail, facts = self._tail(self._since)
            assert tail is not None and facts is not None
            by_key = self._log.by_key.tail(self._session, self._since)
            assert by_key is not None  # it has the files of the tail
            swapped = swap.by_spark(files, tail, facts, by_key)
        if swapped is None:
            return self._rewrite(tail, facts)
        new = self._new_files(swapped.paths)
        gone = removed(files, swapped.groups)
        if not new and not gone:
            # All that is new had no effect, or was in the snapshot already. The next refresh begins after it.
            return TableRefresh(self._label, Answer.KEEP, self._base.version, facts=self._base.facts)
        self._check_erasures()
        self._base.replace(new, self._key, gone, self._lsn, self._snapshot_lsn)
        return self._done(Answer.SWAP, new, len(gone))

    def _check_erasures(self) -> None:
        """Raise SnapshotOutdated where keys were erased from the log since it was opened. What comes after this look,
        the base table's own commit tells (``erased_base``)."""
        opened = self._log.log_table
        before = opened.watermark(ERASURES)  # asked first: the look moves the handle on
        if isinstance(opened, DeltaLogTable):
            now = DeltaLogTable(opened.location, kept=self._kept).watermark(ERASURES)
        else:
            now = opened.watermark_now(ERASURES)
        if now != before:
            raise SnapshotOutdated(self._label)

    # -- both ------------------------------------------------------------------------------------------

    def _new_files(self, paths: Sequence[str]) -> list[NewFile]:
        found = [NewFile.written(self._base.location, path, self._key) for path in paths]
        return [file for file in found if file.facts.n_rows]

    def _done(self, answer: Answer, new: Sequence[NewFile], n_removed: int) -> TableRefresh:
        n_bytes = sum(file.size_bytes for file in new)
        base = self._base
        return TableRefresh(self._label, answer, base.version, len(new), n_bytes, n_removed, base.facts)


def directory_of(bases: BaseStore, log: TableAt) -> str:
    """What the manifest calls the base table. It is named as the log's table is."""
    name = labelled_table(log.shape.table)
    assert name is not None, log.shape.table
    return bases.key_of(*name)


def types_of(log: TableAt) -> dict[str, str]:
    """Column → PostgreSQL's type, by the log's newest layout."""
    found: dict[str, str] = json.loads(log.log_table.properties.get(TYPES) or "{}")
    return {name: found[name] for name in log.shape.columns if name in found}


def arrow_fields(shape: TableShape) -> list[pa.Field]:
    """The base table's columns."""
    return [pa.field(name, arrow_type(column.type)) for name, column in shape.columns.items()]


def _conformed(rows: DataFrame, fields: Sequence[pa.Field]) -> DataFrame:
    from pyspark.sql import functions

    there = set(rows.columns)
    types = spark_schema(pa.schema(list(fields)))
    columns = [
        (functions.col(quoted(f.name)) if f.name in there else functions.lit(None))
        .cast(f.dataType)
        .alias(f.name)
        for f in types.fields
    ]
    return rows.select(*columns)


def _has_text(rows: DataFrame) -> bool:
    return bool(rows.where("_text is not null").limit(1).count())
