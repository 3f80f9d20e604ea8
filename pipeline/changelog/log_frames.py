"""The change log as a user reads it: its tables as they are, as they were, and what changed between, as DataFrames.

Users import it as ``ChangeLog`` from ``xidstream``, with ``verify`` (``verify.change_log``). It is a ``SlotLog``, which
knows where everything is, and adds what needs Spark. It is no holder of one, because half of what users ask for
(``tables``, ``cut_lsn``, ``wait``) is the ``SlotLog``'s: each would be written twice.

Only plans are made here, but for small jobs: the fold's look at a tail, and the search in ``_transactions``
(``transactions_table``).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from xidstream.pipeline.changelog.generations import (
    generation_at,
)
from xidstream.pipeline.changelog.key_spans import Keys, KeySpans
from xidstream.pipeline.changelog.log_root import root_of
from xidstream.pipeline.changelog.log_table import LogTable
from xidstream.pipeline.changelog.net import log_rows, net_rows
from xidstream.pipeline.changelog.shape import TableShape, chosen_columns, narrowed
from xidstream.pipeline.changelog.shapes import shape_at
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import PreconditionMissing, UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from xidstream.pipeline.log_tables.batch_parts import TableName


class LogFrames(SlotLog):
    """The tables that a sink writes: what they hold at any commit, and what changed.

    ``uri``: of Delta tables, or the setting ``sink`` of the run, such as ``iceberg:CATALOG/namespace``. ``slot``: whose
    log is read, where several slots write there. ``storage_options`` are deltalake's, for Delta tables. Nothing is
    written, and a run may go on meanwhile.
    """

    def __init__(
        self, uri: str, slot: str | None = None, storage_options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(root_of(uri, storage_options), slot)

    def transactions(
        self,
        spark: SparkSession,
        *,
        since: Lsn | int | str | None = None,
        until: Lsn | int | str | None = None,
    ) -> DataFrame:
        """One row for each complete transaction after ``since`` and up to ``until``, as ``changes`` takes them: of all
        without them, which are more with each day. Only files with rows of the range are read.

        Its columns: xid, commit_lsn, end_lsn, commit_timestamp, gid, origin, streamed, rows, tables.
        """
        from pyspark.sql import functions as f

        self._refuse_several_slots("transactions")
        table = self._open(locations.TRANSACTIONS)
        last = Lsn(table.watermark(self._slot) or 0)
        behind = Lsn(0) if since is None else self._bounded(since, last)
        cut = self._cut_of(table)
        if since is not None and behind < cut:
            raise PreconditionMissing(
                f"transactions after {behind} are not known: the change log was shortened up to {cut} (log_retention)",
                remedy=f"ask with since={str(cut)!r} or later",
            )
        upto = last if until is None else self._bounded(until, last)
        lsn, its_lsn = f.col("commit_lsn"), pc.field("commit_lsn")
        wanted = (its_lsn > int(behind)) & (its_lsn <= int(upto))
        rows = table.rows(spark, table.files(behind + 1, upto, column="commit_lsn"), wanted=wanted)
        return rows.filter((lsn > int(behind)) & (lsn <= int(upto)))

    def as_of(
        self,
        spark: SparkSession,
        *,
        lsn: Lsn | int | str | None = None,
        timestamp: datetime.datetime | str | None = None,
        xid: int | None = None,
    ) -> LogState:
        """All tables at one moment: at the newest commit that can be read (``readable_lsn``), or at the one that is
        named.

        ``lsn``: a commit LSN, or any position before the newest one, as ``Lsn``, number or text. ``timestamp``: what
        had committed before the first commit with a later timestamp; a datetime with a time zone, or its ISO text.
        ``xid``: right after this transaction. Raises UsageError where nothing such is in the log.
        """
        if sum(each is not None for each in (lsn, timestamp, xid)) > 1:
            raise UsageError("as_of takes one of lsn, timestamp and xid")
        last, proven = self._bounds()
        at = min(last, proven)
        if lsn is not None:
            at = self._bounded(lsn, max(last, proven))
        elif timestamp is not None:
            at = self._before(timestamp, last)
        elif xid is not None:
            at = self._commit_of(xid, last)
        return LogState(self, spark, _proven(at, proven))

    def changes(
        self,
        spark: SparkSession,
        table: str | TableName,
        *,
        since: Lsn | int | str | None = None,
        until: Lsn | int | str | None = None,
        net: bool = False,
        columns: Sequence[str] | None = None,
        keys: Keys | None = None,
    ) -> DataFrame:
        """The changes of a table after ``since`` and up to ``until``, in the source's columns and the contract's.

        ``since`` is exclusive, and None is the beginning; ``until`` is inclusive, and None is the newest complete
        commit, or with ``net`` the newest that can be read as a state. Pass this call's ``until`` as the next call's
        ``since``. Raises PreconditionMissing for a ``since`` below ``cut_lsn``: after a cut, None is one.

        With ``net`` there is one row for each key that is not as it was: ``_change_type`` is ``insert``, ``update`` or
        ``delete``, and the values are the last ones; a deleted row has its key alone. Unchanged values are filled in
        from the state at ``since``. Where that is not known, ``_unchanged`` names what is missing.

        ``columns``: of the source's, in this order, with the contract's after them; None is all. From an object store
        no others are read, but the key's with ``net``. Raises UsageError where the table has not each of them.

        ``keys``: as ``LogState.table`` takes them. Without ``net`` a row that has no value there comes, too, as a
        TRUNCATE has none; so any column may be named, and row groups without such rows are not read. With ``net`` the
        key's may, and all changes are read: keys may have changed.
        """
        last, proven = self._bounds()
        newest = min(last, proven) if net else last
        upto = newest if until is None else self._bounded(until, max(last, proven))
        if net:
            _proven(upto, proven)
        behind = Lsn(0) if since is None else self._bounded(since, max(last, proven))
        self._check_since(table, behind)
        if not net:
            log_table, shape = self._layout_at(table, upto)
            names = list(shape.columns) if columns is None else chosen_columns(shape, columns)
            spans = None if keys is None else KeySpans.of(shape, keys, shape.columns)
            read = [*names, *(() if spans is None else spans.columns)]
            rows = log_rows(spark, log_table, narrowed(shape, read), behind, upto, spans)
            return rows if columns is None else _with_contract(rows, names, shape)
        at = self.table_at(table, upto)
        # Changes from before the snapshot may be among them.
        at = replace(at, shape=self._layout_at(table, upto, at.shape.key)[1])
        if at.shape.key is None:
            raise UsageError(f"table {at.shape.table} has no key: its rows have no net changes")
        whole = at.shape
        names = list(whole.columns) if columns is None else chosen_columns(whole, columns)
        spans = None if keys is None else KeySpans.of(whole, keys, whole.key)
        at = replace(at, shape=narrowed(whole, names))
        known = behind >= at.generation.bounds.valid_from
        before = replace(self.table_at(table, behind), shape=at.shape).state(spark) if known else None
        rows = net_rows(spark, at, behind, before)
        rows = rows if spans is None else rows.filter(spans.within())
        return rows if columns is None else _with_contract(rows, names, whole)

    def _check_since(self, table: str | TableName, behind: Lsn) -> None:
        name, log_table = self.log_table(table)
        cut = self._cut_of(log_table)
        if behind < cut:
            raise PreconditionMissing(
                f"changes of table {name} after {behind} are gone: its change log was shortened up to "
                f"{self._with_time(cut)} (log_retention)",
                remedy=f"ask with since={str(cut)!r} or later; what the table held there, ChangeLog.as_of tells",
            )

    def _layout_at(
        self, table: str | TableName, lsn: Lsn, key: tuple[str, ...] | None = None
    ) -> tuple[LogTable, TableShape]:
        name, log_table = self.log_table(table)
        shape = shape_at(name, log_table.columns, log_table.properties, key, int(lsn), self._slot)
        return log_table, shape

    def _bounded(self, lsn: Lsn | int | str, last: Lsn) -> Lsn:
        found = Lsn.parse(lsn) if isinstance(lsn, str) else Lsn(lsn)
        if found > last:
            raise UsageError(
                f"{found} lies beyond {last}, the newest complete commit of the change log",
                remedy="ask for an LSN up to ChangeLog.last_commit_lsn",
            )
        return found

    def _before(self, timestamp: datetime.datetime | str, last: Lsn) -> Lsn:
        moment = _moment(timestamp) if isinstance(timestamp, str) else timestamp
        if moment.tzinfo is None:
            raise UsageError("a timestamp needs a time zone", remedy="such as 2026-05-04T12:00:00+00:00")
        self._refuse_several_slots("transactions")
        # A commit that is gone may have been the first with a later timestamp.
        cut_us = self._open(locations.TRANSACTIONS).watermark(locations.cut_time_id(self._slot))
        if cut_us is not None and moment < (cut := _EPOCH + datetime.timedelta(microseconds=cut_us)):
            raise PreconditionMissing(
                f"what had committed before {moment.isoformat()} is not known: the change log was shortened, and knows "
                f"the commits after {cut.isoformat()} (log_retention)",
                remedy="ask for a later time, or by LSN",
            )
        found = self.transactions_table().first_later(moment, int(last))
        # Between two commits the state is that of the former one.
        return last if found is None else Lsn(found - 1)

    def _commit_of(self, xid: int, last: Lsn) -> Lsn:
        self._refuse_several_slots("transactions")
        found = self.transactions_table().of_xids([int(xid)], int(last))
        lsns = found["commit_lsn"].to_pylist()
        if not lsns:
            raise UsageError(
                f"the change log has no transaction {xid}",
                remedy="give the xid of a committed top-level transaction with rows in a published table, behind what "
                "log_retention has removed",
            )
        if len(lsns) > 1:
            raise UsageError(
                f"transaction id {xid} was used more than once: commits at {', '.join(str(Lsn(n)) for n in lsns)}",
                remedy="ask by LSN",
            )
        return Lsn(lsns[0])


def _with_contract(rows: DataFrame, names: Sequence[str], shape: TableShape) -> DataFrame:
    """``rows`` in these of the source's columns, and the contract's."""
    contract = [name for name in rows.columns if name not in shape.columns]
    return rows.select(*map(quoted, [*names, *contract]))


_OPENED_AT_A_TIME: Final = 16
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def _proven(lsn: Lsn, proven_lsn: Lsn) -> Lsn:
    if lsn > proven_lsn:
        raise PreconditionMissing(
            f"states at {lsn} are not known yet: a run of the slot has looked for DDL up to {proven_lsn} only",
            remedy="wait for it (ChangeLog.wait), or ask for an LSN up to ChangeLog.proven_lsn; only a run of the slot "
            "moves that on, once a second while something commits",
        )
    return lsn


def _moment(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"not an ISO timestamp: {text!r}", remedy="such as 2026-05-04T12:00:00+00:00"
        ) from None


class LogState:
    """All tables of a ``ChangeLog`` at one LSN: ``state["public.orders"]`` is a DataFrame.

    It stays at that LSN, whatever is committed afterwards.
    """

    def __init__(self, log: LogFrames, spark: SparkSession, lsn: Lsn) -> None:
        self._log = log
        self._spark = spark
        self._lsn = lsn
        self._generations = log.generations()

    def __repr__(self) -> str:
        return f"LogState({self._log!r} at {self._lsn})"

    @property
    def lsn(self) -> Lsn:
        """The transactions with a commit LSN up to this one are in the tables, and no others."""
        return self._lsn

    def tables(self) -> list[str]:
        """The tables whose state is known at this LSN, as ``schema.table``, sorted."""

        def is_known(name: str) -> bool:
            try:
                generation = generation_at(name, self._generations[name], self._lsn)
            except PreconditionMissing:
                return False
            return not self._log.is_cut_off(name, generation, self._lsn)

        # Each table's own log says how far it was cut. A store lets each of them wait.
        names = sorted(self._generations)
        with ThreadPoolExecutor(_OPENED_AT_A_TIME, thread_name_prefix="log-tables") as threads:
            return [name for name, known in zip(names, threads.map(is_known, names), strict=True) if known]

    def __getitem__(self, table: str | TableName) -> DataFrame:
        """The rows of ``schema.table`` (or a pair), in the source's columns and types; lazy, but for a small job.

        A value that the column's type cannot hold (an infinite timestamp) is null: ``with_text`` has its text. Raises
        PreconditionMissing where the table's state at this LSN is not known, and says why.
        """
        return self.table(table)

    def table(
        self,
        table: str | TableName,
        columns: Sequence[str] | None = None,
        keys: Keys | None = None,
    ) -> DataFrame:
        """``state[table]``, in these columns, in this order; None is all.

        From an object store no others are read, but the key's: Spark does not say there which columns a query uses.
        Raises UsageError where the table has not each of them.

        ``keys``: columns of the key, each with its least and greatest value, both included, or None for no bound:
        ``{"id": (1_000, 1_999)}``. The rows are those of a filter. Files of a base table and row groups that have none
        of these keys are not read. Raises UsageError for other columns, for a table without a key, and for a value
        that is none of its column's.
        """
        frame = self.with_text(table, columns, keys)
        return frame.select(*[quoted(name) for name in frame.columns[:-1]])

    def with_text(
        self,
        table: str | TableName,
        columns: Sequence[str] | None = None,
        keys: Keys | None = None,
    ) -> DataFrame:
        """``table(table, columns, keys)`` with a column ``_text`` at its end: column → PostgreSQL's text, of values
        that the type cannot hold."""
        at = self._log.table_at(table, self._lsn, self._generations)
        names = None if columns is None else chosen_columns(at.shape, columns)
        spans = None if keys is None else KeySpans.of(at.shape, keys, at.shape.key)
        return at.state(self._spark, names, spans)
