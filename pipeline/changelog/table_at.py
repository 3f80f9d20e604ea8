"""One table at one LSN: its base, the log after it, and its shape. What the fold and the mirror are given.

The base is the newest base table at or below the LSN (``manifest``), else the snapshot's rows. After a base table are
the changes with a greater commit LSN than its own. After the snapshot are all changes that it does not contain,
wherever they stand in the log (``contained``), but for the part up to which it is known to contain all.

Where the log was cut, its commit may have left the table's rows at the cut (``log_fold``). These take the place of the
snapshot's, and all after them is needed.

The rows of a snapshot are counted, by what the table says of its files. If another tool took some of them away, an
error says so: without them the table would look like one that has few rows, or none. What an erasure took is told by
its own commits (``log_tables.erased_rows``).

A reader may want a range of keys (``key_spans``). Base and tail are then read for these keys alone, unless keys change
in a tail that lacks values: a row has such a value from where it was before, under a key that may lie outside.

A session's snapshot may lack transactions whose commit LSN lies below it. ``unseen_lsns`` are the commit LSNs of those,
where the table is wanted as that session sees it (``pipeline.verify``).

Called by ``change_log``, and by the mirror. Frames are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from xidstream.pipeline.changelog.arrow_rows import TEXT
from xidstream.pipeline.changelog.fold import base_alone, fold
from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.internal_columns import texts_of
from xidstream.pipeline.changelog.key_spans import KeySpans
from xidstream.pipeline.changelog.log_fold import LogFold
from xidstream.pipeline.changelog.log_table import LogFile, LogTable
from xidstream.pipeline.changelog.manifest import Base
from xidstream.pipeline.changelog.shape import TableShape, narrowed, shaped
from xidstream.pipeline.changelog.tail import TailFacts, tail_facts
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.log_tables.erased_marks import erased_id
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS
from xidstream.pipeline.schema.rows import SNAPSHOT
from xidstream.pipeline.spark.snapshot_visibility import without_contained
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_OF_SNAPSHOT: Final = ("_change_type", "_commit_lsn", TEXT)
"""The contract's columns that its rows are known by, and what they say."""


def _no_base() -> None:
    return None


@dataclass(frozen=True)
class LogRows:
    """Rows in the contract's columns and the shape's. ``n_bytes`` and ``n_rows``: of the files they are read from."""

    frame: DataFrame
    n_bytes: int
    n_rows: int


@dataclass(frozen=True)
class TableAt:
    """``generation`` stands at ``lsn``. ``find_base``: the newest base table of it at or below that LSN, if any."""

    log_table: LogTable
    generation: TableGeneration
    shape: TableShape
    lsn: Lsn
    find_base: Callable[[], Base | None] = _no_base
    unseen_lsns: tuple[Lsn, ...] = ()
    cut: int = 0
    """Up to this LSN changes are gone from the log (``shortening``)."""
    find_oldest: Callable[[], str] = str
    """What an error says of the oldest state that can be read."""
    fold: LogFold | None = None
    """The generation's fold at or below ``lsn``; None: it has none."""

    @property
    def snapshot_lsn(self) -> int:
        """The ``_commit_lsn`` of the rows that the state begins with, if no base table is wanted."""
        return int(self.generation.bounds.snapshot_lsn) if self.fold is None else self.fold.lsn

    @property
    def contained_upto(self) -> int:
        """The LSN up to which the rows at ``snapshot_lsn`` have all changes."""
        return int(self.generation.bounds.contained_upto) if self.fold is None else self.fold.lsn

    def snapshot(self, spark: SparkSession, spans: KeySpans | None = None) -> LogRows:
        """The rows that the state begins with: the generation's, or those of the fold. Of all keys, or of these."""
        from pyspark.sql import functions as f

        snapshot_lsn = self.snapshot_lsn
        files = self.snapshot_files()
        names = [*_OF_SNAPSHOT, *self.shape.held_in]
        wanted = _wanted(pc.field("_commit_lsn") == snapshot_lsn, spans, self.log_table)
        rows = self.log_table.rows(spark, files, names, wanted)
        rows = rows.filter((f.col("_commit_lsn") == snapshot_lsn) & (f.col("_change_type") == SNAPSHOT))
        return self._log_rows(rows, files, spans)

    def snapshot_files(self) -> list[LogFile]:
        """The files that may have such rows. Raises PreconditionMissing where some of them are gone."""
        self._check_cut(self.contained_upto)
        files = self.log_table.files(self.snapshot_lsn, self.snapshot_lsn)
        self._check_whole(files)
        return files

    def _check_cut(self, since: int) -> None:
        """Raises PreconditionMissing where changes after ``since`` are gone."""
        if since < self.cut:
            raise PreconditionMissing(
                f"table {self.generation.table} cannot be read at {self.lsn}: its change log was shortened up to "
                f"{Lsn(self.cut)} (log_retention){self.find_oldest()}",
                remedy="ask for a later LSN; ChangeLog.oldest_lsn tells the first one of a table",
            )

    def _check_whole(self, files: Sequence[LogFile]) -> None:
        """Raises PreconditionMissing where the files have not the rows of the snapshot, or of the fold."""
        snapshot_lsn = self.snapshot_lsn
        n_rows = self.generation.n_rows if self.fold is None else self.fold.n_rows
        if n_rows is None:
            return
        n_rows -= self.log_table.watermark(erased_id(snapshot_lsn)) or 0
        if all(file.min_lsn == file.max_lsn == snapshot_lsn and file.n_rows for file in files):
            there = sum(file.n_rows for file in files)
        else:  # another tool compacted the table
            there = self.log_table.count(snapshot_lsn)
        if there != n_rows:
            table = self.generation.table
            raise PreconditionMissing(
                f"table {table} cannot be read: its snapshot of {self._begins_at} had {n_rows} rows, and its "
                f"{self.log_table.format} table has {there} of them: another tool has changed it",
                remedy=f"restore the {self.log_table.format} table to the version before, or take a new snapshot of "
                f"the table: `xidstream snapshot request --table {table}`",
            )

    @property
    def _begins_at(self) -> Lsn:
        return self.generation.bounds.valid_from if self.fold is None else Lsn(self.fold.lsn)

    def tail_files(self, since: int) -> list[LogFile]:
        """The files that may have changes after ``since``, up to the LSN. Raises PreconditionMissing where some of
        these changes are gone."""
        self._check_cut(max(since, self.contained_upto))
        files = self.log_table.files(since + 1, self.lsn)
        # No commit has the place of a snapshot, so that file has its rows alone.
        return [file for file in files if not file.min_lsn == file.max_lsn == self.snapshot_lsn]

    def tail(self, spark: SparkSession, since: int = 0, spans: KeySpans | None = None) -> LogRows | None:
        """The changes after ``since``, up to the LSN, that the snapshot does not contain; None where no file has any.

        ``since``: 0 for all of them, or the LSN of a base of this generation. ``spans``: changes of these keys alone,
        and no TRUNCATE.
        """
        from pyspark.sql import functions as f

        since = max(since, self.contained_upto)
        files = self.tail_files(since)
        if not files:
            return None
        lsn, its_lsn = f.col("_commit_lsn"), pc.field("_commit_lsn")
        names = [*CONTRACT_COLUMNS, *self.shape.held_in]
        wanted = _wanted((its_lsn > since) & (its_lsn <= int(self.lsn)), spans, self.log_table)
        rows = self.log_table.rows(spark, files, names, wanted)
        rows = rows.filter((lsn > since) & (lsn <= int(self.lsn)) & (f.col("_change_type") != SNAPSHOT))
        if since < self.generation.bounds.valid_from:
            rows = without_contained(rows, self.generation.bounds)
        if self.unseen_lsns:
            rows = rows.filter(~lsn.isin([int(each) for each in self.unseen_lsns]))
        return self._log_rows(rows, files, spans)

    def _log_rows(self, rows: DataFrame, files: Sequence[LogFile], spans: KeySpans | None) -> LogRows:
        n_bytes, n_rows = sum(file.n_bytes for file in files), sum(file.n_rows for file in files)
        frame = shaped(rows, self.shape)
        return LogRows(frame if spans is None else frame.filter(spans.within()), n_bytes, n_rows)

    def state(
        self, spark: SparkSession, names: Sequence[str] | None = None, spans: KeySpans | None = None
    ) -> DataFrame:
        """The table's rows, or those with keys in ``spans``: the source's columns, or of these ``names``, in their
        order; and ``_text``."""
        from pyspark.sql import functions as f

        found = self.find_base()
        since = 0 if found is None else found.lsn
        narrow = self if names is None else replace(self, shape=narrowed(self.shape, names))
        rows = narrow._folded(spark, found, since, None if names is None else self, spans)
        rows = rows if spans is None else rows.filter(spans.within())
        if names is None:
            return rows
        texts = texts_of(f.col("_text"), names).alias("_text")
        return rows.select(*map(quoted, names), texts)

    def _folded(
        self,
        spark: SparkSession,
        found: Base | None,
        since: int,
        whole: TableAt | None,
        spans: KeySpans | None,
    ) -> DataFrame:
        """The rows in the shape's columns, or in those of ``whole`` where rows have to be compared as a whole. Rows
        outside of ``spans`` may be among them."""
        tail = self.tail(spark, since)
        if tail is None:
            return base_alone(self._base(spark, found, spans), self.shape)
        facts = None
        if self.shape.key is None:
            facts = tail_facts(tail.frame, self.shape)
            if facts.n_removals and whole is not None:
                return whole._folded(spark, found, since, None, None)
        elif self.log_table.is_opaque or spans is not None:
            facts = self.facts_by_key(spark, since)
        if spans is not None and facts is not None:
            if facts.n_preimages and facts.unchanged:
                spans = None
            else:  # the facts are of all changes: of a TRUNCATE, too, which has no key
                tail = self.tail(spark, since, spans) or tail
        return fold(self._base(spark, found, spans), tail.frame, self.shape, facts)

    def _base(self, spark: SparkSession, found: Base | None, spans: KeySpans | None) -> DataFrame:
        if found is None:
            return self.snapshot(spark, spans).frame
        table = found.at.open()
        names, held = [TEXT, *self.shape.columns], None if spans is None else spans.in_base(table.schema)
        if held is None:
            return table.rows(spark, table.files(), names)
        rows = table.rows(spark, held.files_of_base(table), names, held.wanted(table.schema))
        return rows.filter(held.within())

    @property
    def by_key(self) -> TableAt:
        """This table with no columns but the key's, beside the contract's. A job over such rows reads no more: in a
        store Spark cannot leave out columns by itself."""
        return replace(self, shape=narrowed(self.shape, ()))

    def facts_by_key(self, spark: SparkSession, since: int) -> TailFacts | None:
        """The tail's facts as a fold needs them, of a table with a key; None where there is no tail."""
        by_key = self.by_key
        tail = by_key.tail(spark, since)
        return None if tail is None else tail_facts(tail.frame, by_key.shape)


def _wanted(wanted: pc.Expression, spans: KeySpans | None, table: LogTable) -> pc.Expression:
    by_key = None if spans is None else spans.wanted(table.schema)
    return wanted if by_key is None else wanted & by_key
