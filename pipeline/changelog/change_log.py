"""The change log of a sink's tables as a user reads it: its tables as they are, as they were, and what changed between.

One LSN bounds all tables. It comes from ``_transactions``, which the sink commits last: what has a commit LSN up to its
greatest one is whole in every table. So it is read first, and the tables after it. They may be ahead of it, and what is
ahead is left out.

A second LSN bounds states, though not changes: up to there it is proven that a table's snapshot and the stream together
are the table (``pipeline.snapshot.proven``). It follows the first one by a second or two, and is told beside it.

Users import ``ChangeLog`` from ``xidstream``. What stands where: ``generations`` (which snapshot counts), ``shapes``
(which columns), ``table_at`` (base and tail), ``fold``.

Only plans are made here, but for small jobs: the fold's look at a tail, and the search in ``_transactions``
(``transactions_table``).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from xidstream.pipeline.changelog.consumers import Consumer, ConsumerPosition, read_positions
from xidstream.pipeline.changelog.generations import (
    StoredGenerations,
    TableGeneration,
    generation_at,
)
from xidstream.pipeline.changelog.log_fold import fold_of
from xidstream.pipeline.changelog.log_root import LogRoot, root_of
from xidstream.pipeline.changelog.log_table import MAX_LSN, LogTable, reading
from xidstream.pipeline.changelog.manifest import Base, base_at, base_of, read_lines
from xidstream.pipeline.changelog.net import log_rows, net_rows
from xidstream.pipeline.changelog.shape import TableShape, chosen_columns, narrowed
from xidstream.pipeline.changelog.shapes import shape_at
from xidstream.pipeline.changelog.shortening import oldest_state, stretches_of
from xidstream.pipeline.changelog.slots import chosen_slot
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.changelog.transactions_table import TransactionsTable
from xidstream.pipeline.errors import PreconditionMissing, Unsupported, UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.generation_lines import SNAPSHOTS_SCHEMA
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import SOURCE
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import labelled_table, table_label
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from xidstream.pipeline.log_tables.batch_parts import TableName


_CONSUMERS: Final = "positions of consumers need"
_INSTEAD: Final = (
    "use a log that a run with --sink delta:URI writes; states (as_of) and changes of this one can be read"
)
_KEEPS_ITS_PLACE: Final = (
    "keep the last commit LSN that you have processed yourself, and go on with changes(since=LSN): no run removes "
    "changes from such a log, so nobody has to be waited for"
)


class ChangeLog:
    """The tables that a sink writes: what they hold at any commit, and what changed.

    ``uri``: of Delta tables, or the setting ``sink`` of the run, such as ``iceberg:CATALOG/namespace``. ``slot``: whose
    log is read, where several slots write there. ``storage_options`` are deltalake's, for Delta tables. Nothing is
    written, and a run may go on meanwhile.
    """

    def __init__(
        self, uri: str, slot: str | None = None, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._begin(root_of(uri, storage_options), slot)

    @classmethod
    def of(cls, root: LogRoot, slot: str | None) -> ChangeLog:
        """The log below a root that is there already."""
        log = cls.__new__(cls)
        log._begin(root, slot)
        return log

    def _begin(self, root: LogRoot, slot: str | None) -> None:
        self._stored = root
        transactions = self._open(locations.TRANSACTIONS)
        with reading(f"the log of {locations.TRANSACTIONS}"):
            self._slots = transactions.slots()
        self._slot = chosen_slot(self._slots, slot)

    def __repr__(self) -> str:
        return f"ChangeLog({self._stored.name}, slot {self._slot!r})"

    @property
    def last_commit_lsn(self) -> Lsn:
        """The LSN of the newest complete commit. Every table has all rows up to it. It is read anew each time."""
        return self._bounds()[0]

    @property
    def proven_lsn(self) -> Lsn:
        """The LSN up to which states are proven: no DDL up to it has changed a table behind the stream's back, unless
        its snapshot has ended. 0/0 where no run has looked yet. It is read anew each time."""
        return self._bounds()[1]

    @property
    def readable_lsn(self) -> Lsn:
        """The greatest LSN at which the tables' states can be read now: ``as_of`` without an argument reads there."""
        return min(self._bounds())

    def wait(self, lsn: Lsn | int | str | None = None, timeout_s: float = 60.0) -> Lsn:
        """Return when states at ``lsn`` can be read, as far as that takes time alone: when a run has delivered and
        proven everything up to it. ``lsn``: None is the newest complete commit of now. Returns it. Raises
        PreconditionMissing after ``timeout_s``."""
        if lsn is None:
            lsn = self.last_commit_lsn
        wanted = Lsn.parse(lsn) if isinstance(lsn, str) else Lsn(lsn)
        deadline_s = time.monotonic() + timeout_s
        # A proof goes no further than the log is whole.
        while (found := self._bounds())[1] < wanted:
            if time.monotonic() > deadline_s:
                raise PreconditionMissing(
                    f"the change log was not readable at {wanted} after {timeout_s:.0f} s: it is complete up to "
                    f"{found[0]}, and proven up to {found[1]}",
                    remedy="see whether a run of the slot is going on, and what it waits for: `xidstream status`",
                )
            time.sleep(_WAIT_S)
        return wanted

    def tables(self) -> list[str]:
        """The tables that the log has rows of, as ``schema.table``, sorted."""
        return sorted(table_label(*name) for name in self.table_names())

    def oldest_lsn(self, table: str | TableName) -> Lsn | None:
        """The first LSN whose state of the table can be read, by its snapshots, base tables and changes that are there.
        None where none can. Where snapshots ended, some behind it may not be known either. Read anew each time."""
        name, log_table = self._log_table(table)
        return self._oldest(name, log_table)

    def cut_lsn(self, table: str | TableName) -> Lsn:
        """Up to this LSN changes of the table are gone from the log: ``changes`` takes it as ``since``, and none below
        it. 0/0 where nothing was cut. Read anew each time."""
        return self._cut_of(self._log_table(table)[1])

    def consumer(self, name: str) -> Consumer:
        """A reader that goes on from where it has come to, by a name of its own. What it has not read yet is not
        removed (``log_retention``), once it has told a position."""
        return Consumer(self.delta_location(_CONSUMERS, _KEEPS_ITS_PLACE), self._slot, name)

    def consumers(self) -> list[ConsumerPosition]:
        """Where all consumers of the slot's log have come to, by name."""
        return read_positions(self.delta_location(_CONSUMERS, _KEEPS_ITS_PLACE), self._slot)

    def transactions(
        self,
        spark: SparkSession,
        *,
        since: Lsn | int | str | None = None,
        until: Lsn | int | str | None = None,
    ) -> DataFrame:
        """One row for each complete transaction behind ``since`` and up to ``until``, as ``changes`` takes them: of all
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
        ``xid``: right behind this transaction. Raises UsageError where nothing such is in the log.
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
    ) -> DataFrame:
        """The changes of a table behind ``since`` and up to ``until``, in the source's columns and the contract's.

        ``since`` is exclusive, and None is the beginning; ``until`` is inclusive, and None is the newest complete
        commit, or with ``net`` the newest that can be read as a state. Keep the one for the next call's other. Raises
        PreconditionMissing for a ``since`` below ``cut_lsn``: after a cut, None is one.

        With ``net`` there is one row for each key that is not as it was: ``_change_type`` is ``insert``, ``update`` or
        ``delete``, and the values are the last ones; a deleted row has its key alone. Unchanged values are filled in
        from the state at ``since``. Where that is not known, ``_unchanged`` names what is missing.

        ``columns``: of the source's, in this order, with the contract's behind them; None is all. From an object store
        no others are read, but the key's with ``net``. Raises UsageError where the table has not each of them.
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
            rows = log_rows(spark, log_table, narrowed(shape, names), behind, upto)
            return rows if columns is None else _with_contract(rows, names, shape)
        at = self.table_at(table, upto)
        # Changes from before the snapshot may be among them.
        at = replace(at, shape=self._layout_at(table, upto, at.shape.key)[1])
        if at.shape.key is None:
            raise UsageError(f"table {at.shape.table} has no key: its rows have no net changes")
        whole = at.shape
        names = list(whole.columns) if columns is None else chosen_columns(whole, columns)
        at = replace(at, shape=narrowed(whole, names))
        known = behind >= at.generation.bounds.valid_from
        before = replace(self.table_at(table, behind), shape=at.shape).state(spark) if known else None
        rows = net_rows(spark, at, behind, before)
        return rows if columns is None else _with_contract(rows, names, whole)

    # -- for this package and the mirror -----------------------------------------------------------------

    def table_names(self) -> list[TableName]:
        """The tables that the log has rows of, sorted."""
        return sorted(self._stored.table_names())

    def tables_between(self, since: Lsn, until: Lsn) -> set[str]:
        """The tables that commits behind ``since`` and up to ``until`` have rows of, as ``schema.table``."""
        rows = self.transactions_table().between(int(since), int(until), ["tables"])
        return {name for tables in rows["tables"].to_pylist() for name in tables or ()}

    def transactions_table(self) -> TransactionsTable:
        """``_transactions`` as it is now. Raises as ``TransactionsTable``."""
        return TransactionsTable(self._stored)

    @property
    def name(self) -> str:
        """Where the log is, for people: without credentials."""
        return self._stored.name

    @property
    def laid_out_lsn(self) -> Lsn:
        """Up to here tables may have got other columns without any transaction of theirs."""
        return Lsn(self._open(locations.TRANSACTIONS).watermark(locations.layouts_id(self._slot)) or 0)

    @property
    def root(self) -> Location:
        """Where the log's Delta tables are, and base tables beside them. Raises Unsupported where it has none."""
        return self.delta_location("base tables need")

    def delta_location(self, what_needs: str, instead: str = _INSTEAD) -> Location:
        """Where the log's Delta tables are. Raises Unsupported where it has none, and says ``what_needs`` them, and
        what to do ``instead``."""
        found = self._stored.delta_location
        if found is None:
            raise Unsupported(
                f"{what_needs} a change log in Delta tables, and {self.name} is none",
                remedy=instead,
            )
        return found

    @property
    def application_id(self) -> str:
        """The slot's: system identifier/database/slot."""
        return self._slot

    def generations(self) -> Mapping[str, list[TableGeneration]]:
        """By table, in the order of their snapshots. Read anew each time."""
        table = self._stored.open(locations.SNAPSHOTS)
        if table is None:
            return {}
        with reading(self._stored.title(locations.SNAPSHOTS)):
            # A table of an earlier xidstream lacks some, until a run has it.
            names = [name for name in SNAPSHOTS_SCHEMA.names if name in table.schema.names]
            return StoredGenerations(table.read(names))

    def table_at(
        self, table: str | TableName, lsn: Lsn, generations: Mapping[str, list[TableGeneration]] | None = None
    ) -> TableAt:
        """What stands for one table at ``lsn``, which is at most what ``readable_lsn`` was before ``generations`` were
        read. Raises UsageError for an unknown table, PreconditionMissing where its state there is not known."""
        name, log_table = self._log_table(table)
        known = self.generations() if generations is None else generations
        generation = generation_at(name, known.get(name, []), lsn)
        columns, properties = log_table.columns, log_table.properties
        bounds = generation.bounds
        shape = shape_at(name, columns, properties, generation.key, int(lsn), self._slot, bounds)
        place = int(bounds.place)

        cut = self._cut_of(log_table)

        def find_base() -> Base | None:
            base = self.base_at(name, generation, lsn)
            return None if base is None or base.lsn < cut else base

        def find_oldest() -> str:
            oldest = self._oldest(name, log_table, known)
            return (
                ""
                if oldest is None
                else f"; the oldest state that it has is that of {self._with_time(oldest)}"
            )

        fold = fold_of(log_table.watermark, self._slot)
        if fold is not None and (fold.place != place or fold.lsn > lsn or fold.lsn < cut):
            fold = None
        return TableAt(
            log_table, generation, shape, lsn, find_base, cut=int(cut), find_oldest=find_oldest, fold=fold
        )

    def base_at(self, name: str, generation: TableGeneration, lsn: Lsn) -> Base | None:
        """The newest base table of the generation of ``schema.table`` at or below ``lsn``; None where there is none."""
        root, place = self._stored.delta_location, int(generation.bounds.place)
        return None if root is None else base_at(root, self._slot, name, generation.number, int(lsn), place)

    def is_cut_off(self, name: str, generation: TableGeneration, lsn: Lsn) -> bool:
        """Whether the table's state at ``lsn``, at which the generation stands, is gone from the log."""
        try:
            found, bounds = self._log_table(name)[1], generation.bounds
            cut, fold = self._cut_of(found), fold_of(found.watermark, self._slot)
        except (UsageError, Unsupported):
            return False  # whoever reads the table is told
        if bounds.contained_upto >= cut:
            return False
        if fold is not None and fold.place == bounds.place and cut <= fold.lsn <= lsn:
            return False
        base = self.base_at(name, generation, lsn)
        return base is None or base.lsn < cut

    def log_table(self, table: str | TableName) -> tuple[str, LogTable]:
        """``schema.table`` and its table in the log, as it is now. Raises UsageError for an unknown table, Unsupported
        for one that is not this slot's alone."""
        return self._log_table(table)

    # -- inside ------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[Lsn, Lsn]:
        """The newest complete commit, and what is proven: of one moment."""
        table = self._open(locations.TRANSACTIONS)
        last, proven = table.watermark(self._slot), table.watermark(locations.proven_id(self._slot))
        return Lsn(last or 0), Lsn(proven or 0)

    def _cut_of(self, table: LogTable) -> Lsn:
        return Lsn(table.watermark(locations.cut_id(self._slot)) or 0)

    def _check_since(self, table: str | TableName, behind: Lsn) -> None:
        name, log_table = self._log_table(table)
        cut = self._cut_of(log_table)
        if behind < cut:
            raise PreconditionMissing(
                f"changes of table {name} after {behind} are gone: its change log was shortened up to "
                f"{self._with_time(cut)} (log_retention)",
                remedy=f"ask with since={str(cut)!r} or later; what the table held there, ChangeLog.as_of tells",
            )

    def _oldest(
        self,
        name: str,
        log_table: LogTable,
        generations: Mapping[str, list[TableGeneration]] | None = None,
    ) -> Lsn | None:
        known = self.generations() if generations is None else generations
        cut, fold = self._cut_of(log_table), fold_of(log_table.watermark, self._slot)
        bases: dict[int, int] = {}
        root = self._stored.delta_location
        for line in [] if root is None else read_lines(root, self._slot):
            # By LSN: the first of each snapshot that is still there.
            if (
                line.table == name
                and line.lsn >= cut
                and line.place not in bases
                and root is not None
                and base_of(root, line)
            ):
                bases[line.place] = line.lsn
        starts = [*bases.items(), *([] if fold is None else [(fold.place, fold.lsn)])]
        oldest = oldest_state(stretches_of(known.get(name, []), starts), int(cut))
        return None if oldest is None else Lsn(oldest)

    def _with_time(self, lsn: Lsn) -> str:
        """``lsn``, and when the first transaction behind it committed, where that is known."""
        behind = self.transactions_table().between(int(lsn), MAX_LSN, [_TIMESTAMP], at_most=1)
        times = behind[_TIMESTAMP].to_pylist()
        return f"{lsn} (the next commit is of {times[0].isoformat()})" if times and times[0] else str(lsn)

    def _layout_at(
        self, table: str | TableName, lsn: Lsn, key: tuple[str, ...] | None = None
    ) -> tuple[LogTable, TableShape]:
        name, log_table = self._log_table(table)
        shape = shape_at(name, log_table.columns, log_table.properties, key, int(lsn), self._slot)
        return log_table, shape

    def _log_table(self, table: str | TableName) -> tuple[str, LogTable]:
        parts = labelled_table(table) if isinstance(table, str) else table
        if parts is None:
            raise UsageError(
                f"{table!r} is no table's name", remedy='give "schema.table", or a pair (schema, table)'
            )
        name = table_label(*parts)
        found = self._stored.open(self._stored.key_of(*parts))
        if found is None:
            raise UsageError(
                f"the change log has no table {name}",
                remedy="ChangeLog.tables() lists them; put a name that contains a dot in double quotes",
            )
        source = found.properties.get(SOURCE, name)
        if source not in (name, ".".join(parts)):  # the second one is of earlier versions
            raise Unsupported(
                f"the {found.format} table in the place of {name} is one of {source}: somebody has copied or moved it",
                remedy="move it away from the sink's tables",
            )
        others = [slot for slot in self._slots if slot != self._slot and found.watermark(slot) is not None]
        if others:
            raise Unsupported(
                f"the {found.format} table of {name} has rows of more than one slot: "
                f"{', '.join([self._slot, *others])}",
                remedy="give each slot a root of its own",
            )
        return name, found

    def _open(self, key: str) -> LogTable:
        found = self._stored.open(key)
        if found is None:
            raise UsageError(
                f"there is no change log at {self.name}: it has no {self._stored.title(key)}",
                remedy="give what the option --sink of `xidstream run` has",
            )
        return found

    def _refuse_several_slots(self, what: str) -> None:
        if len(self._slots) > 1:
            raise Unsupported(
                f"several slots write to {locations.TRANSACTIONS} below {self.name}, which does not "
                f"record whose a transaction is: it cannot give the {what} of one slot",
                remedy="ask by LSN, and give each slot a root of its own",
            )

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


_WAIT_S: Final = 0.1
_OPENED_AT_A_TIME: Final = 16
_TIMESTAMP: Final = "commit_timestamp"
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

    def __init__(self, log: ChangeLog, spark: SparkSession, lsn: Lsn) -> None:
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

    def table(self, table: str | TableName, columns: Sequence[str] | None = None) -> DataFrame:
        """``state[table]``, in these columns, in this order; None is all.

        From an object store no others are read, but the key's: Spark does not say there which columns a query uses.
        Raises UsageError where the table has not each of them.
        """
        frame = self.with_text(table, columns)
        return frame.select(*[quoted(name) for name in frame.columns[:-1]])

    def with_text(self, table: str | TableName, columns: Sequence[str] | None = None) -> DataFrame:
        """``table(table, columns)`` with a column ``_text`` at its end: column → PostgreSQL's text, of values that the
        type cannot hold."""
        at = self._log.table_at(table, self._lsn, self._generations)
        names = None if columns is None else chosen_columns(at.shape, columns)
        return at.state(self._spark, names)
