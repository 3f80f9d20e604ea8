"""Transactions between PREPARE and COMMIT or ROLLBACK PREPARED.

A gid is unique only while it is prepared, is reused, and may be any string of up to 199 bytes; an xid is
unique as long as its transaction is open. So a record is found by xid, and the gid must agree.

COMMIT PREPARED for a prepare that is not here is legal in two cases: the sink already holds that commit (a
restart repeats it), or the prepare left nothing to decode (it only locked rows), for which PostgreSQL 16 and 17 send
no PREPARE. The second is believed only where the storage covers it (``PrepareCover``); else its content is lost,
which is terminal. ROLLBACK PREPARED for one that is not here is always legal: the server may never have sent it.
"""

from __future__ import annotations

from collections.abc import Iterable

from xidstream.pipeline.errors import ProtocolViolation, SlotLost
from xidstream.pipeline.exchange import (
    PrepareCover,
    PreparedTransaction,
    SegmentPart,
    SpilledMessages,
    TransactionEnd,
)
from xidstream.pipeline.late_binding import Commit
from xidstream.pipeline.pg import Lsn, Xid


class PreparedBook:
    """``durable``: what an earlier run left in storage. ``cover``: None where it vouches for no PREPARE."""

    def __init__(
        self, durable: Iterable[PreparedTransaction] = (), cover: PrepareCover | None = None
    ) -> None:
        self._by_xid = {p.xid: p for p in durable}
        self._cover = cover

    def __len__(self) -> int:
        return len(self._by_xid)

    def add(self, prepared: PreparedTransaction) -> PreparedTransaction | None:
        """Take a record; returns the one it replaces (the server repeats what was not confirmed)."""
        replaced = self._by_xid.get(prepared.xid)
        self._by_xid[prepared.xid] = prepared
        return replaced

    def commit(
        self, end: TransactionEnd, sink_watermark: Lsn, *, is_given_up: bool = False
    ) -> PreparedTransaction | None:
        """The record that COMMIT PREPARED names; None where the sink already holds it, it was empty, or it is missing
        and was given up. Raises SlotLost where it is missing, ProtocolViolation."""
        prepared = self._by_xid.get(end.xid)
        if prepared is None:
            if is_given_up:
                return None
            if end.commit_lsn <= sink_watermark:
                return None
            if self._cover is not None and self._cover.covers(end.xid, end.commit_lsn):
                return None
            raise SlotLost(
                f"COMMIT PREPARED of transaction {int(end.xid)} at {end.commit_lsn}: the content that its PREPARE "
                "brought is not in storage, and the sink does not hold it",
                remedy="give the same storage (--storage) as the run that received the PREPARE; or take a new snapshot "
                "of its tables (one that only locked rows has changed none) and give it up: `xidstream slot skip "
                f"--xid {int(end.xid)} --commit-lsn {end.commit_lsn}`",
            )
        if prepared.gid != end.gid:
            raise ProtocolViolation(
                f"COMMIT PREPARED of transaction {int(end.xid)} at {end.commit_lsn} names another gid than its PREPARE"
            )
        del self._by_xid[end.xid]
        return prepared

    def roll_back(self, xid: Xid, gid: str) -> PreparedTransaction | None:
        prepared = self._by_xid.get(xid)
        if prepared is None or prepared.gid != gid:
            return None
        return self._by_xid.pop(xid)


class FinishedPrepares:
    """Prepared transactions whose outcome has come, by its ticket: kept until that outcome is confirmed.

    The server repeats a COMMIT PREPARED that was not confirmed, and its content must then be there still. What was
    rolled back goes at the same time: a late manifest of a dead epoch must not come back to life.

    One thread's: whoever writes down what is ``due`` on another is given it, and ``forget`` follows on the first.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[int, PreparedTransaction] = {}

    def add(self, ticket: int, prepared: PreparedTransaction) -> None:
        self._by_ticket[ticket] = prepared

    def without_kept(self, keys: Iterable[str]) -> list[str]:
        """Of segments that the sink holds by now, those that nothing keeps."""
        kept = {key for prepared in self._by_ticket.values() for key in prepared.stored_keys()}
        return [key for key in keys if key not in kept]

    def due(self, done_ticket: int) -> dict[int, PreparedTransaction]:
        """What may go when all up to this ticket is confirmed; it stays here until ``forget``."""
        return {ticket: p for ticket, p in self._by_ticket.items() if ticket <= done_ticket}

    def forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            del self._by_ticket[ticket]


def stamp_segments(prepared: PreparedTransaction, end: TransactionEnd) -> tuple[SegmentPart, ...]:
    """The segments of a prepared transaction as parts of the transaction that ``end`` commits."""
    commit = Commit(end.commit_lsn, end.commit_timestamp_us)
    return tuple(SegmentPart(segment, commit) for segment in prepared.segments)


def spilled_messages(prepared: PreparedTransaction, end: TransactionEnd) -> tuple[SpilledMessages, ...]:
    """The same of its logical messages."""
    return tuple(SpilledMessages(file, end.commit_lsn, end.xid) for file in prepared.messages)
