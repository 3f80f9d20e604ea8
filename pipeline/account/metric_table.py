"""A run's metrics: the one table that says what each is called, and how it follows from the account.

The names follow Prometheus's rules: a base unit at the end (``_bytes``, ``_seconds``), and ``_total`` for a counter.
Every metric has the label ``slot``. Further labels take few values, all known beforehand: parts, states, names of
settings, classes of errors. No label is an xid, an LSN, a table's name or a row's value.

What is not known at the moment has no sample, and is never zero. ``METRICS`` is what docs/metrics.md documents, and all
that alerts and dashboard may name; tests hold them against each other.

Rejected: histograms of latencies. Ray rebuilds them from the middles of their buckets, and the account has percentiles.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.account.model import (
    Account,
    ReaderPart,
    RunPart,
    SequencerPart,
    SinkPart,
    SlotPart,
)
from xidstream.pipeline.account.stalls import PAIRS
from xidstream.pipeline.snapshot.course import TableState
from xidstream.pipeline.snapshot.progress import SnapshotProgress

PREFIX: Final = "xidstream_"
RECENT_S: Final = 600.0
"""Restarts within this time count as recent ones."""
STATES: Final = ("starting", "reading", "restarting", "ended")
WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")
PAUSES: Final = ("reader_memory_bytes", "backlog_bytes")
_UNITS: Final = {
    "_bytes_per_second": "bytes per second",
    "_timestamp_seconds": "Unix time",
    "_bytes": "bytes",
    "_seconds": "seconds",
}

Values = Iterable[tuple[tuple[str, ...], float | None]]
"""Of a metric's own labels, each with its value."""
Of = Callable[[Account], Values]


class Kind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True)
class Metric:
    """``name``: without Ray's prefix. ``labels`` come behind ``slot``. ``per_epoch``: the account counts from the
    beginning of the epoch."""

    name: str
    kind: Kind
    help: str
    of: Of
    labels: tuple[str, ...] = ()
    per_epoch: bool = False

    @property
    def unit(self) -> str:
        """As the name has it; empty for a number of things."""
        bare = self.name.removesuffix("_total")
        return next((unit for ending, unit in _UNITS.items() if bare.endswith(ending)), "")


# -- where values come from ----------------------------------------------------------------------------


def _single(value: float | None) -> Values:
    return (((), value),)


def _run(get: Callable[[RunPart], float | None]) -> Of:
    return lambda account: _single(None if account.run is None else get(account.run))


def _slot(get: Callable[[SlotPart], float | None]) -> Of:
    return lambda account: _single(None if account.slot is None else get(account.slot))


def _reader(get: Callable[[ReaderPart], float | None]) -> Of:
    return lambda account: _single(None if account.reader is None else get(account.reader))


def _sequencer(get: Callable[[SequencerPart], float | None]) -> Of:
    return lambda account: _single(None if account.sequencer is None else get(account.sequencer))


def _sink(get: Callable[[SinkPart], float | None]) -> Of:
    return lambda account: _single(None if account.sink is None else get(account.sink))


def _snapshots(get: Callable[[SnapshotProgress], float | None]) -> Of:
    return lambda account: _single(None if account.snapshots is None else get(account.snapshots))


def _one_of(names: Iterable[str], present: str | None) -> Values:
    """1 for the one that is, 0 for the others; nothing where it is not known."""
    return () if present is None else (((name,), float(name == present)) for name in names)


def _states(account: Account) -> Values:
    return _one_of(STATES, None if account.run is None else account.run.state)


def _wal_statuses(account: Account) -> Values:
    return _one_of(WAL_STATUSES, None if account.slot is None else account.slot.wal_status)


def _pauses(account: Account) -> Values:
    return () if account.reader is None else _one_of(PAUSES, account.reader.paused_by or "")


def _stalled(account: Account) -> Values:
    now = {(stall.part, stall.waits_for) for stall in account.stalls}
    return ((pair, float(pair in now)) for pair in PAIRS)


def _recent_restarts(account: Account) -> Values:
    return _single(sum((account.at - each.at).total_seconds() <= RECENT_S for each in account.restarts))


def _last_error(account: Account) -> Values:
    error = account.last_error
    return () if error is None else (((error.error,), error.at.timestamp()),)


def _server_answers(account: Account) -> Values:
    """Nothing before the server was asked."""
    is_asked = account.slot is not None or account.slot_error is not None
    return _single(account.slot is not None if is_asked else None)


def _open_bytes(account: Account) -> Values:
    if account.reader is None:
        return ()
    in_memory = sum(each.n_bytes_in_memory for each in account.open)
    spilled = sum(each.n_bytes_spilled for each in account.open)
    return ((("memory",), in_memory), (("storage",), spilled))


def _percentiles(account: Account) -> Values:
    latency = None if account.sink is None else account.sink.latency
    if latency is None:
        return ()
    return ((("50",), latency.p50_ms / 1000), (("99",), latency.p99_ms / 1000))


def _last_lag_s(sink: SinkPart) -> float | None:
    return None if sink.last_lag_ms is None else sink.last_lag_ms / 1000


def _snapshot_tables(account: Account) -> Values:
    if account.snapshots is None:
        return ()
    count = Counter(table.state for table in account.snapshots.tables)
    return (((state.value,), float(count[state.value])) for state in TableState)


# -- the table -----------------------------------------------------------------------------------------


def _gauge(name: str, text: str, of: Of, *labels: str) -> Metric:
    return Metric(PREFIX + name, Kind.GAUGE, text, of, labels)


def _counter(name: str, text: str, of: Of, *, per_epoch: bool = False) -> Metric:
    return Metric(PREFIX + name, Kind.COUNTER, text, of, per_epoch=per_epoch)


_OF_RUN: Final = (
    _gauge("run_up", "1 as long as the run's process lives", _run(lambda run: 1)),
    _gauge(
        "run_start_timestamp_seconds", "when the run started", _run(lambda run: run.started_at.timestamp())
    ),
    _gauge("run_state", "1 for the state that the run is in, else 0", _states, "state"),
    _gauge(
        "run_caught_up",
        "1 if all transactions that the server has sent are delivered and confirmed, else 0",
        _run(lambda run: run.is_caught_up),
    ),
    _gauge(
        "stalled", "1 if this part has waited for that one for 15 s, else 0", _stalled, "part", "waits_for"
    ),
    _counter(
        "restarts_total",
        "how often the run has begun a new epoch after an error",
        lambda account: _single(account.n_restarts),
    ),
    _gauge(
        "recent_restarts", "errors of the last 10 minutes that ended an epoch, 20 at most", _recent_restarts
    ),
    _gauge(
        "last_error_timestamp_seconds",
        "when an error last ended an epoch; no sample before the first one",
        _last_error,
        "error",
    ),
)
_OF_SLOT: Final = (
    _gauge(
        "server_answers", "1 if the server told of the slot when it was last asked, else 0", _server_answers
    ),
    _gauge(
        "slot_active",
        "1 if a walsender serves the slot, else 0",
        _slot(lambda slot: slot.active_pid is not None),
    ),
    _gauge(
        "slot_lag_bytes",
        "WAL from what is confirmed to the server's position",
        _slot(lambda slot: slot.behind_bytes),
    ),
    _gauge(
        "slot_flush_lag_seconds",
        "how long the last commit took to be confirmed once it was sent (pg_stat_replication); no sample when nothing "
        "is under way",
        _slot(lambda slot: slot.flush_lag_s),
    ),
    _gauge(
        "slot_wal_held_bytes",
        "WAL that the server keeps for the slot",
        _slot(lambda slot: slot.wal_held_bytes),
    ),
    _gauge(
        "slot_wal_limit_bytes",
        "max_slot_wal_keep_size; no sample where nothing limits it",
        _slot(lambda slot: slot.wal_limit_bytes),
    ),
    _gauge(
        "slot_safe_wal_bytes",
        "WAL that the server may write before the slot may be lost (safe_wal_size); no sample without a limit",
        _slot(lambda slot: slot.safe_wal_size_bytes),
    ),
    _gauge(
        "slot_lost_in_seconds",
        "when the slot may be lost if nothing more is confirmed, at the present rate of WAL; no sample without a limit",
        _slot(lambda slot: slot.lost_in_s),
    ),
    _gauge("slot_wal_status", "1 for the slot's wal_status, else 0", _wal_statuses, "status"),
    _gauge(
        "server_wal_bytes_per_second",
        "how fast the server writes WAL, over the last minute",
        _slot(lambda slot: slot.wal_bytes_per_s),
    ),
)
_OF_READER: Final = (
    _counter(
        "reader_received_bytes_total",
        "what the server has sent of transactions",
        _reader(lambda reader: reader.n_bytes),
        per_epoch=True,
    ),
    _counter(
        "reader_messages_total",
        "messages of transactions that the server has sent",
        _reader(lambda reader: reader.n_messages),
        per_epoch=True,
    ),
    _gauge(
        "reader_paused",
        "1 if reading waits because of this setting's limit, else 0",
        _pauses,
        "setting",
    ),
    _gauge(
        "reader_silent_seconds",
        "since the server last sent anything",
        _reader(lambda reader: reader.silent_s),
    ),
    _gauge(
        "reader_pending_bytes",
        "gathered, and not sent to a buffer",
        _reader(lambda reader: reader.pending_bytes),
    ),
    _gauge(
        "reader_in_flight_bytes",
        "sent to a buffer, and not decoded",
        _reader(lambda reader: reader.in_flight_bytes),
    ),
    _gauge("backlog_bytes", "committed, and not in the sink", _reader(lambda reader: reader.backlog_bytes)),
    _gauge("buffers", "xid buffers that have a process", _reader(lambda reader: reader.n_buffers)),
    _gauge(
        "buffers_requested",
        "xid buffers that Ray was asked for, without a process yet",
        _reader(lambda reader: reader.n_buffers_asked),
    ),
    _gauge(
        "open_transactions",
        "transactions that are streamed and have not committed",
        _reader(lambda reader: reader.n_open),
    ),
    _gauge("open_rows", "their rows that were not rolled back", _reader(lambda reader: reader.n_open_rows)),
    _gauge(
        "open_bytes", "what the buffers hold of the 100 largest of them, by where it is", _open_bytes, "place"
    ),
    _gauge(
        "oldest_open_transaction_seconds",
        "since the first block of the oldest of them; 0 where none is open",
        _reader(lambda reader: reader.oldest_open_s),
    ),
)
_OF_SEQUENCER: Final = (
    _gauge(
        "prepared_transactions",
        "transactions between PREPARE and COMMIT or ROLLBACK PREPARED",
        _sequencer(lambda sequencer: sequencer.n_prepared),
    ),
    _gauge(
        "sequencer_waiting",
        "entries of the commit order that are not done",
        _sequencer(lambda sequencer: sequencer.n_waiting),
    ),
    _gauge(
        "sequencer_recording_seconds",
        "for how long the storage has not taken the confirmed position; 0 where it has",
        _sequencer(lambda sequencer: sequencer.recording_s or 0),
    ),
    _counter(
        "given_up_transactions_total",
        "transactions that were left out, because a person gave them up",
        _sequencer(lambda sequencer: sequencer.n_left_out),
        per_epoch=True,
    ),
)
_OF_SINK: Final = (
    _counter("sink_batches_total", "batches that the sink has taken", _sink(lambda sink: sink.n_batches)),
    _counter(
        "sink_transactions_total",
        "transactions that the sink has taken",
        _sink(lambda sink: sink.n_transactions),
    ),
    _counter("sink_rows_total", "rows that the sink has taken", _sink(lambda sink: sink.n_rows)),
    _gauge(
        "sink_latency_seconds",
        "from COMMIT, on the server's clock, to the end of the batch, of the last 10,000 transactions",
        _percentiles,
        "percentile",
    ),
    _gauge("sink_last_lag_seconds", "the same of the last transaction of the last batch", _sink(_last_lag_s)),
    _gauge(
        "sink_in_hand_seconds",
        "for how long the sink has had its batch; 0 where it has none",
        _sink(lambda sink: 0 if sink.in_hand is None else sink.in_hand.for_s),
    ),
    _gauge(
        "sink_in_hand_rows",
        "rows of that batch",
        _sink(lambda sink: 0 if sink.in_hand is None else sink.in_hand.n_rows),
    ),
    _gauge(
        "spark_executors",
        "executors that are registered; no sample in a session of yours",
        _sink(lambda sink: sink.n_executors),
    ),
)
_OF_SNAPSHOTS: Final = (
    _gauge(
        "snapshot_tables",
        "tables whose snapshot is in this state; resting: it failed, and is taken again",
        _snapshot_tables,
        "state",
    ),
    _counter(
        "snapshots_taken_total",
        "snapshots that the sink has taken",
        _snapshots(lambda snapshots: snapshots.n_finished),
    ),
    _gauge(
        "snapshot_size_bytes",
        "what the server has of this run's tables, taken or not",
        _snapshots(lambda snapshots: snapshots.n_bytes),
    ),
    _gauge(
        "snapshot_read_bytes", "what is read of that", _snapshots(lambda snapshots: snapshots.n_bytes_read)
    ),
)

SECTIONS: Final = {
    "The run": _OF_RUN,
    "The slot": _OF_SLOT,
    "The slot reader and its buffers": _OF_READER,
    "The commit sequencer": _OF_SEQUENCER,
    "The sink": _OF_SINK,
    "Snapshots": _OF_SNAPSHOTS,
}
"""Of docs/metrics.md."""
METRICS: Final[tuple[Metric, ...]] = tuple(metric for section in SECTIONS.values() for metric in section)
