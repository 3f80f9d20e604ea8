"""Whether a server can go on where the storage says that this pipeline was.

Asked before a slot is created or read. Three things cannot be mended by reading on, and each is a SlotLost that says
what is lost: the slot is gone though a position of it is recorded; the server's timeline branched off below what was
confirmed; it is an older timeline, or no descendant of the recorded one. Where nothing is recorded there is nothing to
compare: what that may mean is ``postgres.beginning``'s.

A standby without the slot is no loss: a DSN with several hosts leads there while the primary restarts. A run that ended
then, with the advice to begin anew, would lose what the primary still has.

What is confirmed is in the sink or in the journal. Both would hold what such a server does not have.

A timeline that is new but branched off at or above the recorded position is a failover that lost nothing: all that
was confirmed exists there, and the slot was either kept (a failover slot, ``restart``) or its loss is told by the
first rule.

Positions are compared by the preflight, and by the sequencer when the slot is held: until then another reader may
still move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xidstream.pipeline.errors import RESYNC, ConnectionLost, SlotLost
from xidstream.pipeline.pg import Lsn

if TYPE_CHECKING:
    from xidstream.pipeline.postgres.connection import SystemIdentity

_NEW_SNAPSHOT = "take a new snapshot of the tables, with a new slot and another storage (--storage)"


@dataclass(frozen=True)
class Recorded:
    """The storage's record of a slot."""

    confirmed_lsn: Lsn | None
    timeline: int | None


def check_continuity(
    slot: str,
    system: SystemIdentity,
    recorded: Recorded,
    *,
    slot_exists: bool,
    is_standby: bool,
    switch_points: Mapping[int, Lsn],
    awaits_promotion: bool = False,
) -> None:
    """Raise SlotLost, or ConnectionLost where the slot may be on another server; returns if reading may go on, or
    begin.

    ``switch_points``: the server's history, where each of its earlier timelines ended. ``awaits_promotion``: the slot
    is a standby's copy.
    """
    if awaits_promotion:
        raise standbys_copy(slot)
    if recorded.confirmed_lsn is None:
        return
    if not slot_exists and is_standby:
        raise ConnectionLost(
            f"this server is a standby without slot {slot}, of which {recorded.confirmed_lsn} is recorded as "
            "confirmed: the primary may have it",
            remedy="have the dsn lead to the primary (target_session_attrs=read-write); where the slot was this "
            "standby's own it is gone, and what committed after that position is lost",
        )
    if not slot_exists:
        raise SlotLost(
            f"slot {slot} does not exist any more, though {recorded.confirmed_lsn} of it is recorded as confirmed: "
            "what committed after that is lost"
        )
    before = recorded.timeline
    if before is None or before == system.timeline:
        return
    if before > system.timeline or before not in switch_points:
        raise SlotLost(
            f"the server is on timeline {system.timeline}, which does not come after timeline {before}, "
            f"of which {recorded.confirmed_lsn} was confirmed",
            remedy=_NEW_SNAPSHOT,
        )
    if recorded.confirmed_lsn > switch_points[before]:
        raise SlotLost(
            f"the server's timeline {system.timeline} left timeline {before} at {switch_points[before]}, but "
            f"{recorded.confirmed_lsn} was confirmed of that: it was restored, or failed over, to an older state",
            remedy=f"sink and journal may hold what this server does not have: {_NEW_SNAPSHOT}",
        )


def standbys_copy(slot: str) -> ConnectionLost:
    """Whatever the copy is like: the standby may drop it and make it again, and the primary's slot is another one."""
    return ConnectionLost(
        f"slot {slot} is a standby's copy of the primary's: it can be read after the promotion",
        remedy="name all hosts in the dsn, with target_session_attrs=read-write: then a standby is passed over",
    )


def check_positions(slot: str, recorded_lsn: Lsn, confirmed_lsn: Lsn, wal_end_lsn: Lsn) -> None:
    """Raise SlotLost where the slot was confirmed past the record, or the server's WAL ends before it."""
    if recorded_lsn > wal_end_lsn:
        raise SlotLost(
            f"the server's WAL ends at {wal_end_lsn}, but {recorded_lsn} was confirmed before: "
            "it was restored, or failed over, to an older state",
            remedy=f"sink and journal may hold what this server does not have: {_NEW_SNAPSHOT}",
        )
    if confirmed_lsn > recorded_lsn:
        raise SlotLost(
            f"slot {slot} is confirmed up to {confirmed_lsn}, but this pipeline had confirmed only "
            f"{recorded_lsn}: what lies between went elsewhere, or was skipped",
            remedy="if this storage is an older copy, or not the last run's, give the last run's; else, or if the slot "
            f"had another reader: {RESYNC}",
        )
