"""What the commit sequencer tells of itself: figures for the display, and its part of the run's account.

``CommitSequence`` makes both on its event loop, when it is asked. The account's part costs a walk over the prepared
transactions, so it is not made for the display, which asks several times a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xidstream.pipeline.account.model import (
    MOST_PREPARED,
    JournalPart,
    ParkedPart,
    PreparedPart,
    SequencerPart,
    SequencerReport,
    named,
)
from xidstream.pipeline.commits.confirming import Confirming
from xidstream.pipeline.commits.delivered import Delivered
from xidstream.pipeline.commits.journal import Journal
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import PreparedTransaction
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid


@dataclass(frozen=True)
class JournalStats:
    """What the journal holds: what is committed and confirmed, and the sink does not have yet.

    ``n_bytes`` is what it takes in the storage, the segments that it names included. ``n_transactions`` is 0, the first
    commit's LSN 0/0 and its timestamp 0 where it has messages outside of transactions alone.
    """

    n_files: int
    n_bytes: int
    n_units: int
    n_transactions: int
    first_commit_lsn: Lsn
    end_lsn: Lsn
    first_commit_timestamp_us: int
    """Microseconds since the Unix epoch, UTC."""
    is_full: bool
    """It has ``journal_max_bytes``: what commits now waits in the slot."""


@dataclass(frozen=True)
class SequencerStats:
    n_rows: int
    n_transactions: int
    n_batches: int
    n_waiting: int
    n_prepared: int
    confirmed_lsn: Lsn
    """The server was told that all up to here is durable: in the sink, or in the journal."""
    last_commit_lsn: Lsn
    last_commit_timestamp_us: int
    left_out: tuple[tuple[Xid, Lsn], ...] = ()
    """Transactions that were given up and that this epoch met."""
    delivered_lsn: Lsn = INVALID_LSN
    """The sink has all up to here; never ahead of ``confirmed_lsn``."""
    journal: JournalStats | None = None
    """None while it is empty or off."""
    parked: tuple[ParkedTable, ...] = ()
    """All tables that are or were parked."""


def stats_of(
    figures: Delivered,
    order: CommitOrder,
    confirming: Confirming,
    *,
    n_prepared: int,
    left_out: Sequence[tuple[Xid, Lsn]],
    is_full: bool,
) -> SequencerStats:
    """``is_full``: the journal."""
    return SequencerStats(
        n_rows=figures.n_rows,
        n_transactions=figures.n_transactions,
        n_batches=figures.n_batches,
        n_waiting=order.n_waiting,
        n_prepared=n_prepared,
        confirmed_lsn=confirming.confirmed_lsn,
        last_commit_lsn=figures.last_commit_lsn,
        last_commit_timestamp_us=figures.last_commit_timestamp_us,
        left_out=tuple(left_out),
        delivered_lsn=confirming.delivered_lsn,
        journal=_journal_stats(order.journal, is_full=is_full),
        parked=order.parking.tables,
    )


def _journal_stats(journal: Journal, *, is_full: bool) -> JournalStats | None:
    """Whole files: the sink may hold a part of the first one by now. Damaged files tell nothing."""
    files = journal.files
    if not files:
        return None
    first = next((file for file in files if file.n_transactions), None)
    return JournalStats(
        n_files=len(files),
        n_bytes=journal.n_bytes,
        n_units=sum(file.n_units for file in files),
        n_transactions=sum(file.n_transactions for file in files),
        first_commit_lsn=INVALID_LSN if first is None else first.first_commit_lsn,
        end_lsn=files[-1].end_lsn,
        first_commit_timestamp_us=0 if first is None else first.first_commit_timestamp_us,
        is_full=is_full,
    )


def sequencer_report(
    stats: SequencerStats,
    order: CommitOrder,
    prepared: Iterable[PreparedTransaction],
    recording_s: float | None,
    *,
    journal_failing_s: float | None = None,
    journal_error: XidstreamError | None = None,
) -> SequencerReport:
    """``recording_s``: for how long the storage has not taken a position; None if it has. ``journal_failing_s`` and
    ``journal_error``: for how long the journal could not be written, and why; None if it can be."""
    journal = None if stats.journal is None else _journal_part(stats.journal, stats)
    head = order.head
    part = SequencerPart(
        confirmed_lsn=str(stats.confirmed_lsn),
        n_waiting=stats.n_waiting,
        head_ticket=None if head is None else head.ticket,
        head_kind=None if head is None else head.kind.value,
        head_state=None if head is None else head.state,
        head_commit_lsn=None if head is None else _lsn(head.last_commit_lsn),
        recording_s=recording_s,
        n_prepared=stats.n_prepared,
        n_batches=stats.n_batches,
        n_transactions=stats.n_transactions,
        n_rows=stats.n_rows,
        n_left_out=len(stats.left_out),
        delivered_lsn=str(stats.delivered_lsn),
        undelivered_s=_undelivered_s(stats, order, journal),
        parked=tuple(_parked_part(each) for each in stats.parked if each.is_parked),
        journal_failing_s=journal_failing_s,
        journal_error=None if journal_error is None else journal_error.message,
        head_message=None if head is None else head.message,
        head_xid=None if head is None or head.xid is None else int(head.xid),
        head_first_commit_lsn=None if head is None else _lsn(head.first_commit_lsn),
        head_end_lsn=None if head is None else _lsn(head.end_lsn),
        head_n_transactions=None if head is None else head.n_transactions,
    )
    oldest = sorted(prepared, key=lambda each: each.prepare_lsn)[:MOST_PREPARED]
    return SequencerReport(part, tuple(map(_prepared_part, oldest)), journal=journal)


def _lsn(lsn: Lsn) -> str | None:
    return str(lsn) if lsn else None


def _undelivered_s(stats: SequencerStats, order: CommitOrder, journal: JournalPart | None) -> float | None:
    """What the journal does not have became ready a moment after its COMMIT. One that is not ready does not tell."""
    if journal is not None:
        return journal.oldest_s
    if not stats.n_waiting:
        return 0.0
    return None if order.oldest_ready_s is None else max(0.0, time.monotonic() - order.oldest_ready_s)


def _journal_part(journal: JournalStats, stats: SequencerStats) -> JournalPart:
    committed_us = journal.first_commit_timestamp_us
    return JournalPart(
        n_files=journal.n_files,
        n_bytes=journal.n_bytes,
        n_units=journal.n_units,
        n_transactions=journal.n_transactions,
        wal_bytes=max(0, stats.confirmed_lsn - stats.delivered_lsn),
        first_commit_lsn=str(journal.first_commit_lsn) if journal.first_commit_lsn else None,
        end_lsn=str(journal.end_lsn),
        oldest_s=max(0.0, time.time() - committed_us / 1e6) if committed_us else None,
        is_full=journal.is_full,
    )


def _parked_part(parked: ParkedTable) -> ParkedPart:
    return ParkedPart(
        parked.table,
        str(parked.since_lsn),
        int(parked.xid),
        parked.reason,
        parked.n_transactions,
        parked.n_changes,
    )


def _prepared_part(prepared: PreparedTransaction) -> PreparedPart:
    tables = {segment.relation.name for segment in prepared.segments}
    return PreparedPart(
        xid=int(prepared.xid),
        gid=prepared.gid,
        prepare_lsn=str(prepared.prepare_lsn),
        n_rows=sum(segment.n_rows for segment in prepared.segments),
        n_bytes=sum(segment.n_bytes for segment in prepared.segments)
        + sum(file.n_bytes for file in prepared.messages),
        tables=named(tables),
        n_tables=len(tables),
    )
