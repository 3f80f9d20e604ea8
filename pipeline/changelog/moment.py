"""The moment of a session's snapshot in the log: how far the log answers, and what the snapshot lacks of that.

``pipeline.verify`` compares a table at such a moment, and tells how sure it is. A repair carries rows over from it
(``carrying``). No Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

_WIRE_XIDS = 1 << 32
_PAGE_HEADER_BYTES = 40
"""The most that stands between the end of a WAL record and the next one's begin."""


def answered_up_to(log: SlotLog) -> Lsn:
    """Up to where ``as_of`` may answer now, for all tables. Asked anew each time."""
    return log.readable_lsn


def replayed_upto(bounds: SnapshotBounds) -> Lsn:
    """The replay position of a standby's snapshot: a commit after it was not replayed when the snapshot was taken."""
    return Lsn(bounds.valid_from.next_record + _PAGE_HEADER_BYTES)


@dataclass(frozen=True)
class Moment:
    """The state is the log's at ``lsn``, without the transactions of ``unseen_lsns``: ascending commit LSNs up to
    ``lsn`` that the source's snapshot does not see."""

    lsn: Lsn
    unseen_lsns: tuple[Lsn, ...] = ()


def moment_of(log: SlotLog, table: str, bounds: SnapshotBounds) -> Moment:
    """The moment of a table's snapshot, whose ``valid_from`` the log has reached.

    Only two kinds of transactions can have committed up to there and be unseen: those of ``xip``, and those that began
    after the snapshot, and so committed after ``snapshot_lsn``. An xid of 32 bits comes again; of ``xip`` the newest
    one is meant, and only rows after the log's own snapshot matter.
    """
    transactions, upto = log.transactions_table(), int(bounds.valid_from)
    of_xip = transactions.of_xids({xid % _WIRE_XIDS for xid in bounds.xip}, upto, ["tables"])
    begun_behind = transactions.between(int(bounds.snapshot_lsn), upto, ["xid", "tables"])
    rows = [*of_xip.to_pylist(), *begun_behind.to_pylist()]
    mine = [(row["xid"], row["commit_lsn"]) for row in rows if table in (row["tables"] or ())]
    return Moment(bounds.valid_from, unseen(mine, bounds))


def standby_moment(log: SlotLog, table: str, bounds: SnapshotBounds) -> Moment | None:
    """The moment of a table's snapshot on a standby, where the log has reached ``replayed_upto``. None if it cannot be
    told.

    A standby shows commits in the order of the WAL, so its snapshot always is a state of the log: that of some LSN
    between B, how far it had replayed before the snapshot, and E, how far behind it. The record at E may be half
    replayed: its commit visible, and E not moved on yet. If no transaction in between touches the table, all of these
    LSNs have one state.
    """
    first = bounds.snapshot_lsn.next_record
    between = log.transactions_table().between(int(first) - 1, int(replayed_upto(bounds)), ["tables"])
    rows = between.to_pylist()
    return None if any(table in (row["tables"] or ()) for row in rows) else Moment(first.before)


def unseen(transactions: Iterable[tuple[int, int]], bounds: SnapshotBounds) -> tuple[Lsn, ...]:
    """The commit LSNs, ascending, of those of ``transactions`` (xid, commit LSN) that the snapshot does not see."""
    newest: dict[int, int] = {}
    for xid, lsn in transactions:
        if lsn <= bounds.valid_from:
            newest[xid] = max(lsn, newest.get(xid, 0))
    return tuple(sorted(Lsn(lsn) for xid, lsn in newest.items() if not bounds.contains(Xid(xid), Lsn(lsn))))


def table_at(log: SlotLog, table: str, moment: Moment) -> TableAt:
    """What stands for the table at the moment. Raises as ``SlotLog.table_at`` does."""
    found = log.table_at(table, moment.lsn)
    if not moment.unseen_lsns:
        return found
    generation = found.generation
    # A base table after the first of them would have it, and so would a fold.
    find_base = partial(log.base_at, table, generation, moment.unseen_lsns[0].before)
    fold = found.fold if found.fold is not None and found.fold.lsn < moment.unseen_lsns[0] else None
    return replace(found, find_base=find_base, unseen_lsns=moment.unseen_lsns, fold=fold)
