"""Tables that cannot be delivered, set aside so that the others go on (``on_poison = park``).

A ``BadTable`` is what a buffer finds: a table of one release unit, from its first transaction on that keeps a change
which cannot be delivered (``pipeline.poison``). The buffer leaves its rows out from there on, in this unit. The commit
sequencer then *parks* the table, in commit order (``commits.parking``): no row of it with this commit LSN or a later
one is delivered. They are counted, and a ``ParkedTable`` in the record of the slot tells the count, beside the position
that it belongs to. A person resumes the table; its rows are delivered again from ``until_lsn`` on. What lies between is
missing in the sink, so no snapshot from before stands for the table any more.

A table is known by its relid: a table that is made again under the same name is another one. PostgreSQL gives the oid
of a dropped table to a new one, some day. So a park ends where its table is gone, and is forgotten after that
(``without_gone``).

Rejected: to keep the rows of a parked table and to deliver them later. They would come after younger transactions of
the other tables, and the one that could not be delivered still could not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.quantities import counted, visible


@dataclass(frozen=True)
class BadTable:
    """``lsn`` is of the first change that cannot be delivered, ``what`` says why, without its value. ``n_changes`` of
    the table were left out, from the transaction ``xid`` on. ``commit_lsn`` is 0/0 while it is not known (PREPARE)."""

    relid: int
    table: str
    lsn: Lsn
    what: str
    n_changes: int
    xid: Xid
    commit_lsn: Lsn = INVALID_LSN

    def to_json(self) -> dict[str, Any]:
        return {
            "relid": int(self.relid),
            "table": self.table,
            "lsn": str(self.lsn),
            "what": self.what,
            "n_changes": int(self.n_changes),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], xid: Xid) -> BadTable:
        """Raises KeyError, TypeError, ValueError or UsageError for what ``to_json`` never writes."""
        return cls(
            int(value["relid"]),
            str(value["table"]),
            Lsn.parse(value["lsn"]),
            str(value["what"]),
            int(value["n_changes"]),
            xid,
        )


@dataclass(frozen=True)
class ParkedTable:
    """``table`` is ``schema.table``, as it was called then. The transaction ``xid``, with its commit at ``since_lsn``,
    is the first of which its rows are missing, and ``reason`` says why. ``n_transactions`` with ``n_changes`` of the
    table were left out up to the confirmed position. ``until_lsn``: rows with this commit LSN or a later one are
    delivered again; None while it is parked. ``awaits_sink``: ``until_lsn`` may rise, to where the sink is already.
    """

    relid: int
    table: str
    since_lsn: Lsn
    xid: Xid
    reason: str
    n_transactions: int = 0
    n_changes: int = 0
    until_lsn: Lsn | None = None
    awaits_sink: bool = False

    @property
    def is_parked(self) -> bool:
        return self.until_lsn is None

    def concerns(self, relid: int) -> bool:
        """Whether rows of this table are left out."""
        return self.relid == relid

    def covers(self, commit_lsn: int) -> bool:
        """Whether rows of the table with this commit LSN are left out."""
        return commit_lsn >= self.since_lsn and (self.until_lsn is None or commit_lsn < self.until_lsn)

    def spoils(self, snapshot_lsn: int) -> bool:
        """Whether a snapshot at ``snapshot_lsn`` and the stream behind it are not the table.

        The place lies just before where the WAL ended when the table was locked (``pipeline.snapshot.bounds``). On an
        idle server that is where the stream is delivered again from, and all that was left out is in the snapshot.
        """
        return self.until_lsn is None or Lsn(snapshot_lsn + 1).next_record < self.until_lsn

    @property
    def why_no_snapshot_stands(self) -> str:
        return f"the table was parked at commit LSN {self.since_lsn}: {self.reason}"

    def __str__(self) -> str:
        table = visible(self.table)
        changes = (
            f"{counted(self.n_changes, 'change')} in {counted(self.n_transactions, 'transaction')} left out"
        )
        if self.until_lsn is not None:
            return f"{table}, from commit LSN {self.since_lsn} to {self.until_lsn}, {changes}: {self.reason}"
        return f"{table}, since commit LSN {self.since_lsn} (xid {int(self.xid)}), {changes}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {
            "relid": int(self.relid),
            "table": self.table,
            "since_lsn": str(self.since_lsn),
            "xid": int(self.xid),
            "reason": self.reason,
            "n_transactions": int(self.n_transactions),
            "n_changes": int(self.n_changes),
            "until_lsn": None if self.until_lsn is None else str(self.until_lsn),
            "awaits_sink": self.awaits_sink,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ParkedTable:
        """Raises KeyError, TypeError, ValueError or UsageError for what ``to_json`` never writes."""
        until_lsn = value["until_lsn"]
        return cls(
            int(value["relid"]),
            str(value["table"]),
            Lsn.parse(value["since_lsn"]),
            Xid(int(value["xid"])),
            str(value["reason"]),
            int(value["n_transactions"]),
            int(value["n_changes"]),
            None if until_lsn is None else Lsn.parse(until_lsn),
            bool(value["awaits_sink"]),
        )


class SkippedTransaction(NamedTuple):
    """A transaction of ``slot skip`` that a run has met. ``relids``: the tables of its rows, ascending; None where they
    are not known."""

    xid: Xid
    commit_lsn: Lsn
    relids: tuple[int, ...] | None = None


_EVERY_TABLE = 0
"""No table has this oid."""


@dataclass(frozen=True)
class SkippedRows(ParkedTable):
    """The rows that a skipped transaction (``xidstream slot skip``) had of one table, or of every table.
    For snapshots it is as if the table had been parked for this transaction alone. It is in no record."""

    def concerns(self, relid: int) -> bool:
        return self.relid in (relid, _EVERY_TABLE)

    @property
    def why_no_snapshot_stands(self) -> str:
        return f"transaction {int(self.xid)}, with its commit at {self.since_lsn}, was given up (`xidstream slot skip`)"


def skipped_rows(transactions: Iterable[SkippedTransaction]) -> tuple[SkippedRows, ...]:
    """The rows that the transactions had: of every table where it is not known of which."""
    return tuple(
        SkippedRows(relid, "", each.commit_lsn, each.xid, "given up", until_lsn=Lsn(each.commit_lsn + 1))
        for each in transactions
        for relid in ((_EVERY_TABLE,) if each.relids is None else each.relids)
    )


def resumed(
    tables: Iterable[ParkedTable], relids: AbstractSet[int], confirmed_lsn: Lsn
) -> tuple[ParkedTable, ...]:
    """``tables``, with those of ``relids`` delivered again after ``confirmed_lsn``, or from the park itself where that
    is not confirmed yet.

    Only when an epoch begins: all that is confirmed is behind it then, and nothing else was released by it.
    """
    return tuple(
        dataclasses.replace(each, until_lsn=max(confirmed_lsn, each.since_lsn), awaits_sink=True)
        if each.is_parked and each.relid in relids
        else each
        for each in tables
    )


def without_gone(
    tables: Iterable[ParkedTable], gone: AbstractSet[int], gone_before: Lsn, delivered_lsn: Lsn
) -> tuple[ParkedTable, ...]:
    """``tables`` when an epoch begins. Those of ``gone`` were dropped before ``gone_before``.

    Their parks end there, and they leave the list when the sink holds everything up to there."""
    kept = []
    for each in tables:
        if each.relid in gone and each.is_parked:
            each = dataclasses.replace(each, until_lsn=max(gone_before, each.since_lsn))
        if each.relid not in gone or each.until_lsn is None or each.until_lsn > delivered_lsn:
            kept.append(each)
    return tuple(kept)


def behind_sink(tables: Iterable[ParkedTable], watermark: Lsn) -> tuple[ParkedTable, ...]:
    """``tables``, now that it is known which commit the sink holds already: it takes nothing up to there again."""
    return tuple(
        dataclasses.replace(
            each,
            until_lsn=max(each.until_lsn, Lsn(watermark + 1) if watermark else watermark),
            awaits_sink=False,
        )
        if each.until_lsn is not None and each.awaits_sink
        else each
        for each in tables
    )
