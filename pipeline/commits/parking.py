"""Which tables are parked, decided in commit order: what is left out of each unit, and how much that was.

``CommitOrder`` gives every unit to ``settle`` as soon as its content and that of all units before it is there, so
before any of it is released or written to the journal. What a unit's buffer found begins a park; what a park covers is
taken out of the unit. So the same stream is parked at the same commits, however it is cut into units: within a unit
the buffer has cut the table at the transaction itself, and the units after it are behind it as a whole.

``tables`` is for the record: each with the count that belongs to the confirmed position, so that what the server sends
again is not counted twice. A new park must be recorded before a unit after it is released (``version``): else a run
that comes later, with a decoder that takes the change, would go on as if nothing were missing.

A table is resumed when an epoch begins (``pipeline.parked.resumed``), and never here: at no other time is it known that
no unit will be cut anew across the place. The server may send again what commits before that place, after a crash: a
unit that lies wholly before it parks nothing, and still has no row of the table. A unit across it may lack rows from
after it, so it parks the table again.

Plain Python for one thread, ``order``'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.exchange import MemoryPart, Sealed, SegmentPart, UnitEnd
from xidstream.pipeline.parked import BadTable, ParkedTable, behind_sink
from xidstream.pipeline.pg import INVALID_LSN, Lsn


@dataclass(frozen=True)
class ParkedRows:
    """Rows of one parked table that one unit had."""

    relid: int
    n_transactions: int
    n_changes: int


@dataclass(frozen=True)
class Settled:
    """``content`` without the rows of parked tables; ``parked_rows`` counts those; ``keys`` name the segments that
    nobody needs any more."""

    content: Sealed
    parked_rows: tuple[ParkedRows, ...] = ()
    keys: tuple[str, ...] = ()


class Parking:
    """``tables``: what was recorded, in the order in which they were parked. Their counts have all up to
    ``confirmed_lsn``."""

    def __init__(self, tables: Iterable[ParkedTable] = (), confirmed_lsn: Lsn = INVALID_LSN) -> None:
        self._tables = list(tables)
        self._counted_lsn = confirmed_lsn
        self._by_relid = {each.relid: i for i, each in enumerate(self._tables) if each.is_parked}
        self.version = 0
        """Changes whenever ``tables`` do, but for their counts."""

    @property
    def tables(self) -> tuple[ParkedTable, ...]:
        return tuple(self._tables)

    def parked_up_to(self, commit_lsn: Lsn) -> tuple[ParkedTable, ...]:
        """The tables whose rows are missing in a sink that has everything up to here."""
        return tuple(each for each in self._tables if each.since_lsn <= commit_lsn) if self._tables else ()

    def settle(self, content: Sealed, end: UnitEnd) -> Settled:
        """The unit's turn in the order of commits. A unit that may not be released is settled, too."""
        for bad in sorted(content.bad_tables, key=lambda each: each.commit_lsn):
            if not self._was_parked(bad.relid, bad.commit_lsn, end):
                self._park(bad)
        if not self._tables:
            return Settled(content)
        memory = [part for part in content.memory if self._covers(part, end)]
        segments = [part for part in content.segments if self._covers(part, end)]
        dropped: list[MemoryPart | SegmentPart] = [*memory, *segments]
        if not dropped and not content.bad_tables:
            return Settled(content)
        n_bytes = sum(part.n_bytes for part in memory) + sum(part.segment.n_bytes for part in segments)
        settled = dataclasses.replace(
            content,
            memory=tuple(part for part in content.memory if not self._covers(part, end)),
            segments=tuple(part for part in content.segments if not self._covers(part, end)),
            n_rows=content.n_rows - sum(each.n_rows for each in dropped),
            n_bytes=content.n_bytes - n_bytes,
            bad_tables=(),
        )
        keys = tuple(part.segment.key for part in segments)
        return Settled(settled, self._parked_rows_of(content, dropped, end), keys)

    def may_join(self, end: UnitEnd) -> bool:
        """Whether units from this one on may become one before their turn. What an earlier unit may still park covers
        all of them. A table that is parked or was resumed may cover some, and so may what was counted before."""
        return not self._tables and end.end_lsn > self._counted_lsn

    def count(self, parked_rows: Iterable[ParkedRows]) -> None:
        """A unit is confirmed that had these."""
        for each in parked_rows:
            index = self._by_relid[each.relid]
            table = self._tables[index]
            self._tables[index] = dataclasses.replace(
                table,
                n_transactions=table.n_transactions + each.n_transactions,
                n_changes=table.n_changes + each.n_changes,
            )

    def sink_opened(self, watermark: Lsn) -> None:
        """The sink holds every commit up to ``watermark``, and takes none of them again."""
        moved = list(behind_sink(self._tables, watermark))
        if moved != self._tables:
            self._tables = moved
            self.version += 1

    # -- inside ----------------------------------------------------------------------------------------

    def _park(self, bad: BadTable) -> None:
        if bad.relid in self._by_relid:
            return
        self._by_relid[bad.relid] = len(self._tables)
        self._tables.append(ParkedTable(bad.relid, bad.table, bad.commit_lsn, bad.xid, bad.what))
        self.version += 1

    def _covers(self, part: MemoryPart | SegmentPart, end: UnitEnd) -> bool:
        """Whether all of it is of a table that was parked before it. Of a part that begins before, its buffer has left
        out the rest."""
        relid = part.relation.relid
        lsn = part.first_commit_lsn if isinstance(part, MemoryPart) else part.commit.commit_lsn
        index = self._by_relid.get(relid)
        is_parked = index is not None and self._tables[index].covers(lsn)
        return is_parked or self._was_parked(relid, lsn, end)

    def _was_parked(self, relid: int, commit_lsn: int, end: UnitEnd) -> bool:
        """Whether the table was parked at this commit, and the whole unit lies before the place where it is resumed."""
        return any(
            each.relid == relid
            and each.until_lsn is not None
            and each.since_lsn <= commit_lsn
            and end.last_commit_lsn < each.until_lsn
            for each in self._tables
        )

    def _parked_rows_of(
        self, content: Sealed, dropped: Iterable[MemoryPart | SegmentPart], end: UnitEnd
    ) -> tuple[ParkedRows, ...]:
        """What is to be counted. The server sends again what an earlier epoch has counted, and what is resumed."""
        if end.end_lsn <= self._counted_lsn:
            return ()
        n_changes = {bad.relid: bad.n_changes for bad in content.bad_tables}
        names = {each.relation.relid: each.relation.name for each in dropped}
        names |= {bad.relid: bad.table for bad in content.bad_tables}
        for each in dropped:
            relid = each.relation.relid
            n_changes[relid] = n_changes.get(relid, 0) + each.n_rows
        return tuple(
            ParkedRows(relid, self._n_transactions(relid, names[relid], content.transactions), n)
            for relid, n in n_changes.items()
            if relid in self._by_relid
        )

    def _n_transactions(self, relid: int, name: str, transactions: pa.RecordBatch) -> int:
        since_lsn = self._tables[self._by_relid[relid]].since_lsn
        lsns = transactions.column("commit_lsn").to_pylist()
        tables = transactions.column("tables").to_pylist()
        return sum(lsn >= since_lsn and name in named for lsn, named in zip(lsns, tables, strict=True))
