"""What a user's function gets: a batch with what docs/python.md promises, and nothing beside it.

``SinkBatch`` (``pipeline.spark.frames``) does the work, and has more, for sinks: parts, segments, references.
``ForeachSink`` makes a ``SparkBatch`` of it for each call of the function. Rejected: one class for both with the rest
marked as private, because the sinks are other modules than the one that would have the private names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from xidstream.pipeline.log_tables.batch_parts import TableName
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.spark.snapshot_visibility import without_contained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from xidstream.pipeline.spark.frames import SinkBatch


@dataclass(frozen=True)
class TableSnapshot:
    """``table``: ``schema.table``. ``generation`` counts from 1; each one replaces all earlier rows of the table.
    ``valid_from``: from this LSN on the rows, with the changes after them, are the table. ``key``: the columns that
    name a row, None where only the whole row does."""

    table: str
    generation: int
    valid_from: Lsn
    key: tuple[str, ...] | None


class SparkBatch:
    """What a function of ``foreachBatch`` gets: consecutive whole transactions in commit order, none of them torn.

    At least once: after a crash the same transactions come again, perhaps cut into other batches. Deduplicate
    rows by (``_commit_lsn``, ``_seq``). Nothing runs before an action on a DataFrame.
    """

    def __init__(
        self, batch: SinkBatch, contained: Mapping[TableName, SnapshotBounds] = MappingProxyType({})
    ) -> None:
        """``contained``: by table, the snapshot that the function had of it."""
        self._batch = batch
        self._contained = contained

    def __repr__(self) -> str:
        n_transactions, n_rows = self._batch.content.n_transactions, self._batch.content.n_rows
        return (
            f"SparkBatch({self.first_commit_lsn}..{self.last_commit_lsn}, "
            f"{counted(n_transactions, 'transaction')}, {counted(n_rows, 'row')})"
        )

    @property
    def tables(self) -> list[str]:
        """The tables that have rows, as ``schema.table``, sorted."""
        return self._batch.tables

    def dataframe(self, table: str | TableName) -> DataFrame:
        """The rows of ``schema.table``, with the columns of docs/rows.md.

        A name with a dot in it stands in double quotes; a ``(schema, table)`` pair is taken as well. Raises UsageError
        where the batch has no row of that table.
        """
        frame = self._batch.dataframe(table)
        for (schema, name), bounds in self._contained.items():
            if (
                table in ((schema, name), table_label(schema, name))
                and self.first_commit_lsn <= bounds.valid_from
            ):
                frame = without_contained(frame, bounds)
        return frame

    @property
    def snapshot(self) -> TableSnapshot | None:
        """The snapshot that the batch holds: ``table``, ``generation``, ``valid_from``, ``key``. The batch then has the
        rows that the table had before its stream.

        None in every other batch. See docs/snapshots.md.
        """
        return None

    @property
    def transactions(self) -> DataFrame:
        """One row for each transaction.

        Its columns: xid, commit_lsn, end_lsn, commit_timestamp, gid, origin, streamed, rows, tables.
        """
        return self._batch.transactions

    @property
    def messages(self) -> DataFrame:
        """The logical messages: commit_lsn (null outside of transactions), lsn, xid, transactional, prefix, content.

        In no particular order; ``commit_lsn`` and ``lsn`` give one.
        """
        return self._batch.messages

    @property
    def first_commit_lsn(self) -> Lsn:
        """The commit LSN of the batch's first transaction."""
        return self._batch.first_commit_lsn

    @property
    def last_commit_lsn(self) -> Lsn:
        """The commit LSN of the batch's last transaction. Store it with your result; skip rows at or below it when they
        come again."""
        return self._batch.last_commit_lsn

    @property
    def number(self) -> int:
        """From 0 in each epoch."""
        return self._batch.number

    @property
    def spark(self) -> SparkSession:
        """The session."""
        return self._batch.spark
