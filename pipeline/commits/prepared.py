"""Transactions between PREPARE and COMMIT or ROLLBACK PREPARED.

A gid may be any string of up to 199 bytes. It is unique only while it is prepared, and may be used again afterwards. An
xid is unique as long as its transaction is open. So a record is found by its xid, and the gid must agree.

A COMMIT PREPARED may come without a record here in two cases. Either the sink already holds that commit, and the
server repeats it after a restart. Or the transaction only locked rows: PostgreSQL 16 and 17 send no PREPARE for it.
The second case is believed only if this storage would have had the content, had there been any (``PrepareCover``).
Otherwise the content is lost, which is terminal. So it is where the record, or what it names, was damaged in the
storage: what commits before is delivered first (``lost``). A ROLLBACK PREPARED may always come without a record,
because the server need not have sent the PREPARE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xidstream.pipeline.errors import ProtocolViolation, SlotLost
from xidstream.pipeline.exchange import (
    PrepareCover,
    PreparedTransaction,
    SegmentPart,
    SpilledMessages,
    TransactionEnd,
)
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg import Lsn, Xid


class PreparedBook:
    """``durable`` is what an earlier run left in storage. ``cover`` is None if the storage vouches for no PREPARE."""

    def __init__(
        self, durable: Iterable[PreparedTransaction] = (), cover: PrepareCover | None = None
    ) -> None:
        self._by_xid = {p.xid: p for p in durable}
        self._cover = cover

    def __len__(self) -> int:
        return len(self._by_xid)

    def __iter__(self) -> Iterator[PreparedTransaction]:
        return iter(self._by_xid.values())

    def add(self, prepared: PreparedTransaction) -> PreparedTransaction | None:
        """Take a record. Returns the record that it replaces, if the server repeats a PREPARE that was not
        confirmed."""
        replaced = self._by_xid.get(prepared.xid)
        self._by_xid[prepared.xid] = prepared
        return replaced

    def is_whole(self, xid: Xid) -> bool:
        """Whether the record of a transaction is here, and was not found damaged when it was loaded."""
        prepared = self._by_xid.get(xid)
        return prepared is not None and prepared.damage is None

    def commit(
        self, end: TransactionEnd, sink_watermark: Lsn, *, is_skipped: bool = False
    ) -> PreparedTransaction | None:
        """The record that COMMIT PREPARED names. None if the sink already holds it, if it was empty, or if it is
        missing and is skipped. Raises SlotLost if it is missing, and ProtocolViolation if the gid is another.
        """
        prepared = self._by_xid.get(end.xid)
        if prepared is None:
            if is_skipped:
                return None
            if end.commit_lsn <= sink_watermark:
                return None
            if self._cover is not None and self._cover.covers(end.xid, end.commit_lsn):
                return None
            raise SlotLost(
                f"COMMIT PREPARED of transaction {int(end.xid)} at {end.commit_lsn}: the rows that came with "
                "its PREPARE are neither in the storage nor in the sink",
                remedy="give the same storage (--storage) as the run that received the PREPARE; or take a new snapshot "
                "of its tables (one that only locked rows has changed none) and give it up: `xidstream slot skip "
                f"--xid {int(end.xid)} --commit-lsn {end.commit_lsn}`",
            )
        if prepared.gid != end.gid and prepared.damage is None:
            raise ProtocolViolation(
                f"COMMIT PREPARED of transaction {int(end.xid)} at {end.commit_lsn} names another gid than its PREPARE"
            )
        del self._by_xid[end.xid]
        return prepared

    def roll_back(self, xid: Xid, gid: str) -> PreparedTransaction | None:
        prepared = self._by_xid.get(xid)
        if prepared is None or (prepared.gid != gid and prepared.damage is None):
            return None
        return self._by_xid.pop(xid)


class FinishedPrepares:
    """Prepared transactions that have ended, by the ticket of their end. They are kept until that end is confirmed.

    The server repeats a COMMIT PREPARED that was not confirmed, and the content must still be there then. The content
    of a ROLLBACK PREPARED is removed at the same time, and not earlier: a late manifest of a dead epoch must not come
    back to life.

    For one thread. It gives what is ``due`` to the thread that removes it from storage, and calls ``forget``
    afterwards.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[int, PreparedTransaction] = {}

    def add(self, ticket: int, prepared: PreparedTransaction) -> None:
        self._by_ticket[ticket] = prepared

    def without_kept(self, keys: Iterable[str]) -> list[str]:
        """The keys among ``keys`` that no prepared transaction needs any more. The sink holds all of these segments."""
        kept = {key for prepared in self._by_ticket.values() for key in prepared.stored_keys()}
        return [key for key in keys if key not in kept]

    def due(self, done_ticket: int) -> dict[int, PreparedTransaction]:
        """The records that may be removed once all up to this ticket is confirmed. It stays here until ``forget``."""
        return {ticket: p for ticket, p in self._by_ticket.items() if ticket <= done_ticket}

    def forget(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            del self._by_ticket[ticket]


def lost(end: TransactionEnd, damage: str) -> SlotLost:
    """The error at the COMMIT PREPARED of a transaction whose stored content is damaged, and is not sent again."""
    return SlotLost(
        f"COMMIT PREPARED of transaction {int(end.xid)} at {end.commit_lsn}: the rows that came with its PREPARE are "
        f"damaged in the storage: {damage}",
        remedy="the server does not send it again: restore the object, and start again; or take a new snapshot of its "
        "tables and give the whole transaction up: `xidstream slot skip "
        f"--xid {int(end.xid)} --commit-lsn {end.commit_lsn}`",
    )


def stamp_segments(prepared: PreparedTransaction, end: TransactionEnd) -> tuple[SegmentPart, ...]:
    """The segments of a prepared transaction as parts of the transaction that ``end`` commits."""
    commit = CommitStamp(end.commit_lsn, end.commit_timestamp_us)
    return tuple(SegmentPart(segment, commit) for segment in prepared.segments)


def spilled_messages(prepared: PreparedTransaction, end: TransactionEnd) -> tuple[SpilledMessages, ...]:
    """The logical messages of a prepared transaction, as parts of the transaction that ``end`` commits."""
    return tuple(SpilledMessages(file, end.commit_lsn, end.xid) for file in prepared.messages)
