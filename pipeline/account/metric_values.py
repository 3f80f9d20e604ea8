"""Where the values of a run's metrics come from: functions of an account, which ``metric_table`` names.

One that is asked for what the account does not have gives no value, and never zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from xidstream.pipeline.account.model import (
    Account,
    JournalPart,
    LogPart,
    ReaderPart,
    RunPart,
    SequencerPart,
    SinkPart,
    SlotPart,
)
from xidstream.pipeline.account.snapshots import SnapshotProgress, TableState
from xidstream.pipeline.account.stalls import PAIRS

RECENT_S: Final = 600.0
"""Restarts within this time count as recent ones."""
STATES: Final = ("starting", "reading", "restarting", "ended")
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
PAUSES: Final = ("reader_memory_bytes", "backlog_bytes")

Values = Iterable[tuple[tuple[str, ...], float | None]]
"""The values of a metric: its own labels, each set with its value."""
Of = Callable[[Account], Values]


def single(value: float | None) -> Values:
    return (((), value),)


def of_run(get: Callable[[RunPart], float | None]) -> Of:
    return lambda account: single(None if account.run is None else get(account.run))


def of_slot(get: Callable[[SlotPart], float | None]) -> Of:
    return lambda account: single(None if account.slot is None else get(account.slot))


def of_reader(get: Callable[[ReaderPart], float | None]) -> Of:
    return lambda account: single(None if account.reader is None else get(account.reader))


def of_sequencer(get: Callable[[SequencerPart], float | None]) -> Of:
    return lambda account: single(None if account.sequencer is None else get(account.sequencer))


def of_journal(get: Callable[[JournalPart], float | None]) -> Of:
    return lambda account: single(None if account.journal is None else get(account.journal))


def of_sink(get: Callable[[SinkPart], float | None]) -> Of:
    return lambda account: single(None if account.sink is None else get(account.sink))


def of_log(get: Callable[[LogPart], float | None]) -> Of:
    return lambda account: single(None if account.log is None else get(account.log))


def of_snapshots(get: Callable[[SnapshotProgress], float | None]) -> Of:
    return lambda account: single(None if account.snapshots is None else get(account.snapshots))


def one_of(names: Iterable[str], present: str | None) -> Values:
    """1 for the one that is, 0 for the others; nothing where it is not known."""
    return () if present is None else (((name,), float(name == present)) for name in names)


def states(account: Account) -> Values:
    return one_of(STATES, None if account.run is None else account.run.state)


def wal_statuses(account: Account) -> Values:
    return one_of(WAL_STATUSES, None if account.slot is None else account.slot.wal_status)


def pauses(account: Account) -> Values:
    return () if account.reader is None else one_of(PAUSES, account.reader.paused_by or "")


def stalled(account: Account) -> Values:
    now = {(stall.part, stall.waits_for) for stall in account.stalls}
    return ((pair, float(pair in now)) for pair in PAIRS)


def recent_restarts(account: Account) -> Values:
    return single(sum((account.at - each.at).total_seconds() <= RECENT_S for each in account.restarts))


def last_error(account: Account) -> Values:
    error = account.last_error
    return () if error is None else (((error.error,), error.at.timestamp()),)


def server_answers(account: Account) -> Values:
    """Nothing before the server was asked."""
    is_asked = account.slot is not None or account.slot_error is not None
    return single(account.slot is not None if is_asked else None)


def open_bytes(account: Account) -> Values:
    if account.reader is None:
        return ()
    in_memory = sum(each.n_bytes_in_memory for each in account.open)
    spilled = sum(each.n_bytes_spilled for each in account.open)
    return ((("memory",), in_memory), (("storage",), spilled))


def percentiles(account: Account) -> Values:
    latency = None if account.sink is None else account.sink.latency
    if latency is None:
        return ()
    return ((("50",), latency.p50_ms / 1000), (("99",), latency.p99_ms / 1000))


def last_lag_s(sink: SinkPart) -> float | None:
    return None if sink.last_lag_ms is None else sink.last_lag_ms / 1000


def journal_oldest_s(journal: JournalPart) -> float | None:
    return journal.oldest_s if journal.n_transactions else 0.0


def snapshot_tables(account: Account) -> Values:
    if account.snapshots is None:
        return ()
    count = Counter(table.state for table in account.snapshots.tables)
    return (((state.value,), float(count[state.value])) for state in TableState)


def furthest_behind(log: LogPart) -> float | None:
    return (
        None if log.last_commit_lsn is None else max((each.behind_bytes for each in log.consumers), default=0)
    )


def longest_silent_s(log: LogPart) -> float | None:
    """Nothing is expected of a consumer that has all of the log."""
    if log.last_commit_lsn is None:
        return None
    return max((each.told_s for each in log.consumers if each.behind_bytes), default=0.0)


def held_by_consumers(log: LogPart) -> float | None:
    """The consumer that is furthest behind holds what all of them hold."""
    known = [each.held_bytes for each in log.consumers if each.held_bytes is not None]
    return None if len(known) < len(log.consumers) else max(known, default=0)
