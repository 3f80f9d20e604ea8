"""The commit sequencer's account of itself: its part of the run's account, and some figures for the supervisor.

``CommitSequence`` makes it on its event loop, when it is asked. To name the prepared transactions costs a walk over
them, so the display, which asks several times a second, has none of them named.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

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
from xidstream.pipeline.commits.journaling import Journaling
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.exchange import PreparedTransaction
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn, Xid


def sequencer_report(
    figures: Delivered,
    order: CommitOrder,
    confirming: Confirming,
    journaling: Journaling,
    *,
    n_prepared: int,
    skipped: Sequence[tuple[Xid, Lsn]],
    prepared: Iterable[PreparedTransaction],
) -> SequencerReport:
    """``prepared``: those to name, of ``n_prepared``."""
    wal_bytes = max(0, confirming.confirmed_lsn - confirming.delivered_lsn)
    journal, journal_from_us = _journal_part(order.journal, wal_bytes, is_full=journaling.is_full)
    head, error, parked = order.head, journaling.error, order.parking.tables
    part = SequencerPart(
        confirmed_lsn=str(confirming.confirmed_lsn),
        n_waiting=order.n_waiting,
        head_ticket=None if head is None else head.ticket,
        head_kind=None if head is None else head.kind.value,
        head_state=None if head is None else head.state,
        head_commit_lsn=None if head is None else _lsn(head.last_commit_lsn),
        recording_s=confirming.recording_s,
        n_prepared=n_prepared,
        n_batches=figures.n_batches,
        n_transactions=figures.n_transactions,
        n_rows=figures.n_rows,
        n_left_out=len(skipped),
        delivered_lsn=str(confirming.delivered_lsn),
        undelivered_s=_undelivered_s(order, journal),
        parked=tuple(_parked_part(each) for each in parked if each.is_parked),
        journal_failing_s=journaling.failing_s,
        journal_error=None if error is None else error.message,
        head_message=None if head is None else head.message,
        head_xid=None if head is None or head.xid is None else int(head.xid),
        head_first_commit_lsn=None if head is None else _lsn(head.first_commit_lsn),
        head_end_lsn=None if head is None else _lsn(head.end_lsn),
        head_n_transactions=None if head is None else head.n_transactions,
    )
    oldest = sorted(prepared, key=lambda each: each.prepare_lsn)[:MOST_PREPARED]
    return SequencerReport(
        part,
        tuple(map(_prepared_part, oldest)),
        journal=journal,
        skipped=tuple(skipped),
        parked=parked,
        last_commit_lsn=figures.last_commit_lsn,
        journal_from_us=journal_from_us,
    )


def _lsn(lsn: Lsn) -> str | None:
    return str(lsn) if lsn else None


def _undelivered_s(order: CommitOrder, journal: JournalPart | None) -> float | None:
    """What the journal does not have became ready a moment after its COMMIT. One that is not ready does not tell."""
    if journal is not None:
        return journal.oldest_s
    if not order.n_waiting:
        return 0.0
    return None if order.oldest_ready_s is None else max(0.0, time.monotonic() - order.oldest_ready_s)


def _journal_part(journal: Journal, wal_bytes: int, *, is_full: bool) -> tuple[JournalPart | None, int]:
    """The journal's content, and when its first transaction committed, in microseconds since the Unix epoch; 0 where
    it has messages outside of transactions alone. Whole files: the sink may hold a part of the first one by now.
    Damaged files tell nothing."""
    files = journal.files
    if not files:
        return None, 0
    first = next((file for file in files if file.n_transactions), None)
    committed_us = 0 if first is None else first.first_commit_timestamp_us
    part = JournalPart(
        n_files=len(files),
        n_bytes=journal.n_bytes,
        n_units=sum(file.n_units for file in files),
        n_transactions=sum(file.n_transactions for file in files),
        wal_bytes=wal_bytes,
        first_commit_lsn=None if first is None else _lsn(first.first_commit_lsn),
        end_lsn=str(files[-1].end_lsn),
        oldest_s=max(0.0, time.time() - committed_us / 1e6) if committed_us else None,
        is_full=is_full,
    )
    return part, committed_us


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
