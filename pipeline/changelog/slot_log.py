"""One slot's change log: its tables, how far it is whole, proven and cut, and what stands for a table at an LSN.

One LSN bounds all tables. It comes from ``_transactions``, which the sink commits last: what has a commit LSN up to its
greatest one is whole in every table. So it is read first, and the tables after it. They may be ahead of it, and what is
ahead is left out.

A second LSN bounds states, though not changes: up to there it is proven that a table's snapshot and the stream together
are the table (``pipeline.snapshot.proven``). It follows the first one by a second or two, and is told beside it.

What stands where: ``generations`` (which snapshot counts), ``shapes`` (which columns), ``table_at`` (base and tail),
``shortening`` (what a cut leaves). Nothing here needs Spark: the mirror, the log's shortening, an erasure and the data
source ask a ``SlotLog``. ``ChangeLog`` makes DataFrames of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.consumers import Consumer, ConsumerPosition, read_positions
from xidstream.pipeline.changelog.generations import (
    StoredGenerations,
    TableGeneration,
    generation_at,
)
from xidstream.pipeline.changelog.log_fold import fold_of
from xidstream.pipeline.changelog.log_root import LogRoot
from xidstream.pipeline.changelog.log_table import MAX_LSN, LogTable, reading
from xidstream.pipeline.changelog.manifest import Base, base_at, base_of, read_lines
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

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.batch_parts import TableName


_WAIT_S: Final = 0.1
_CONSUMERS: Final = "positions of consumers need"
_INSTEAD: Final = (
    "use a log that a run with --sink delta:URI writes; states (as_of) and changes of this one can be read"
)
_KEEPS_ITS_PLACE: Final = (
    "keep the last commit LSN that you have processed yourself, and go on with changes(since=LSN): log_retention does "
    "not wait for it, so have that keep more than you may be behind"
)
_TIMESTAMP: Final = "commit_timestamp"


class SlotLog:
    """The tables below ``root`` as one slot wrote them.

    ``slot``: whose log it is, where several slots write there. Nothing is written, and a run may go on meanwhile.
    """

    _stored: LogRoot
    _slots: list[str]
    """The slots that write below this root, as application ids."""
    _slot: str
    """The application id of the slot whose log this is."""

    def __init__(self, root: LogRoot, slot: str | None = None) -> None:
        self._stored = root
        transactions = self._open(locations.TRANSACTIONS)
        with reading(f"the log of {locations.TRANSACTIONS}"):
            self._slots = transactions.slots()
        self._slot = chosen_slot(self._slots, slot)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stored.name}, slot {self._slot!r})"

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

    def table_names(self) -> list[TableName]:
        """The tables that the log has rows of, sorted."""
        return sorted(self._stored.table_names())

    @property
    def name(self) -> str:
        """Where the log is, for people: without credentials."""
        return self._stored.name

    @property
    def application_id(self) -> str:
        """The slot's: system identifier/database/slot."""
        return self._slot

    @property
    def stored(self) -> LogRoot:
        """Where its tables are, whatever their format."""
        return self._stored

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

    def oldest_lsn(self, table: str | TableName) -> Lsn | None:
        """The first LSN whose state of the table can be read, by its snapshots, base tables and changes that are there.
        None where none can. Where snapshots ended, some after it may not be known either. Read anew each time."""
        name, log_table = self.log_table(table)
        return self._oldest(name, log_table)

    def cut_lsn(self, table: str | TableName) -> Lsn:
        """Up to this LSN changes of the table are gone from the log: ``changes`` takes it as ``since``, and none below
        it. 0/0 where nothing was cut. Read anew each time."""
        return self._cut_of(self.log_table(table)[1])

    @property
    def laid_out_lsn(self) -> Lsn:
        """Up to here tables may have got other columns without any transaction of theirs."""
        return Lsn(self._open(locations.TRANSACTIONS).watermark(locations.layouts_id(self._slot)) or 0)

    def tables_between(self, since: Lsn, until: Lsn) -> set[str]:
        """The tables that commits after ``since`` and up to ``until`` have rows of, as ``schema.table``."""
        rows = self.transactions_table().between(int(since), int(until), ["tables"])
        return {name for tables in rows["tables"].to_pylist() for name in tables or ()}

    def transactions_table(self) -> TransactionsTable:
        """``_transactions`` as it is now. Raises as ``TransactionsTable``."""
        return TransactionsTable(self._stored)

    def generations(self) -> Mapping[str, list[TableGeneration]]:
        """By table, in the order of their snapshots. Read anew each time."""
        table = self._stored.open(locations.SNAPSHOTS)
        if table is None:
            return {}
        with reading(self._stored.title(locations.SNAPSHOTS)):
            # A table of an earlier xidstream lacks some, until a run has it.
            names = [name for name in SNAPSHOTS_SCHEMA.names if name in table.schema.names]
            return StoredGenerations(table.read(names))

    def log_table(self, table: str | TableName) -> tuple[str, LogTable]:
        """``schema.table`` and its table in the log, as it is now. Raises UsageError for an unknown table, Unsupported
        for one that is not this slot's alone."""
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

    def table_at(
        self, table: str | TableName, lsn: Lsn, generations: Mapping[str, list[TableGeneration]] | None = None
    ) -> TableAt:
        """What stands for one table at ``lsn``, which is at most what ``readable_lsn`` was before ``generations`` were
        read. Raises UsageError for an unknown table, PreconditionMissing where its state there is not known."""
        name, log_table = self.log_table(table)
        known = self.generations() if generations is None else generations
        generation = generation_at(name, known.get(name, []), lsn)
        columns, properties = log_table.columns, log_table.properties
        bounds = generation.bounds
        shape = shape_at(name, columns, properties, generation.key, int(lsn), self._slot, bounds)
        snapshot_lsn = int(bounds.snapshot_lsn)

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
        if fold is not None and (
            fold.snapshot_lsn != snapshot_lsn or fold.answers_from > lsn or fold.lsn < cut
        ):
            fold = None
        return TableAt(
            log_table, generation, shape, lsn, find_base, cut=int(cut), find_oldest=find_oldest, fold=fold
        )

    def base_at(self, name: str, generation: TableGeneration, lsn: Lsn) -> Base | None:
        """The newest base table of the generation of ``schema.table`` at or below ``lsn``; None where there is none."""
        bases, snapshot_lsn = self._stored.bases(), int(generation.bounds.snapshot_lsn)
        return base_at(bases, self._slot, name, generation.number, int(lsn), snapshot_lsn)

    def is_cut_off(self, name: str, generation: TableGeneration, lsn: Lsn) -> bool:
        """Whether the table's state at ``lsn``, at which the generation stands, is gone from the log."""
        try:
            found, bounds = self.log_table(name)[1], generation.bounds
            cut, fold = self._cut_of(found), fold_of(found.watermark, self._slot)
        except (UsageError, Unsupported):
            return False  # whoever reads the table is told
        if bounds.contained_upto >= cut:
            return False
        if (
            fold is not None
            and fold.snapshot_lsn == bounds.snapshot_lsn
            and cut <= fold.lsn
            and fold.answers_from <= lsn
        ):
            return False
        base = self.base_at(name, generation, lsn)
        return base is None or base.lsn < cut

    def consumer(self, name: str) -> Consumer:
        """A reader that goes on from where it has come to, by a name of its own. What it has not read yet is not
        removed (``log_retention``), once it has told a position."""
        return Consumer(self.delta_location(_CONSUMERS, _KEEPS_ITS_PLACE), self._slot, name)

    def consumers(self) -> list[ConsumerPosition]:
        """Where all consumers of the slot's log have come to, by name."""
        return read_positions(self.delta_location(_CONSUMERS, _KEEPS_ITS_PLACE), self._slot)

    # -- inside, and for ChangeLog --------------------------------------------------------------------------

    def _bounds(self) -> tuple[Lsn, Lsn]:
        """The newest complete commit, and what is proven: of one moment."""
        table = self._open(locations.TRANSACTIONS)
        last, proven = table.watermark(self._slot), table.watermark(locations.proven_id(self._slot))
        return Lsn(last or 0), Lsn(proven or 0)

    def _cut_of(self, table: LogTable) -> Lsn:
        return Lsn(table.watermark(locations.cut_id(self._slot)) or 0)

    def _oldest(
        self,
        name: str,
        log_table: LogTable,
        generations: Mapping[str, list[TableGeneration]] | None = None,
    ) -> Lsn | None:
        known = self.generations() if generations is None else generations
        cut, fold = self._cut_of(log_table), fold_of(log_table.watermark, self._slot)
        bases: dict[int, int] = {}
        stored = self._stored.bases()
        for line in read_lines(stored, self._slot):
            # By LSN: the first of each snapshot that is still there.
            if (
                line.table == name
                and line.lsn >= cut
                and line.snapshot_lsn not in bases
                and base_of(stored, line)
            ):
                bases[line.snapshot_lsn] = line.lsn
        oldest = oldest_state(stretches_of(known.get(name, []), bases.items(), fold), int(cut))
        return None if oldest is None else Lsn(oldest)

    def _with_time(self, lsn: Lsn) -> str:
        """``lsn``, and when the first transaction after it committed, where that is known."""
        behind = self.transactions_table().between(int(lsn), MAX_LSN, [_TIMESTAMP], at_most=1)
        times = behind[_TIMESTAMP].to_pylist()
        return f"{lsn} (the next commit is of {times[0].isoformat()})" if times and times[0] else str(lsn)

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
