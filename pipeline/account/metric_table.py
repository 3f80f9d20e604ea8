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
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.account.metric_values import (
    Of,
    furthest_behind,
    held_by_consumers,
    journal_oldest_s,
    last_error,
    last_lag_s,
    longest_silent_s,
    of_journal,
    of_log,
    of_reader,
    of_run,
    of_sequencer,
    of_sink,
    of_slot,
    of_snapshots,
    open_bytes,
    pauses,
    percentiles,
    recent_restarts,
    server_answers,
    single,
    snapshot_tables,
    stalled,
    states,
    wal_statuses,
)

PREFIX: Final = "xidstream_"
_UNITS: Final = {
    "_bytes_per_second": "bytes per second",
    "_timestamp_seconds": "Unix time",
    "_bytes": "bytes",
    "_seconds": "seconds",
}


class MetricKind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True)
class Metric:
    """``name``: without Ray's prefix. ``labels`` come after ``slot``. ``per_epoch``: the account counts from the
    beginning of the epoch."""

    name: str
    kind: MetricKind
    help: str
    of: Of
    labels: tuple[str, ...] = ()
    per_epoch: bool = False

    @property
    def unit(self) -> str:
        """The unit, as the name has it; empty for a number of things."""
        bare = self.name.removesuffix("_total")
        return next((unit for ending, unit in _UNITS.items() if bare.endswith(ending)), "")


# -- the table -----------------------------------------------------------------------------------------


def _gauge(name: str, text: str, of: Of, *labels: str) -> Metric:
    return Metric(PREFIX + name, MetricKind.GAUGE, text, of, labels)


def _counter(name: str, text: str, of: Of, *, per_epoch: bool = False) -> Metric:
    return Metric(PREFIX + name, MetricKind.COUNTER, text, of, per_epoch=per_epoch)


_OF_RUN: Final = (
    _gauge("run_up", "1 as long as the run's process lives", of_run(lambda run: 1)),
    _gauge(
        "run_start_timestamp_seconds", "when the run started", of_run(lambda run: run.started_at.timestamp())
    ),
    _gauge("run_state", "1 for the state that the run is in, else 0", states, "state"),
    _gauge(
        "run_caught_up",
        "1 if all transactions that the server has sent are delivered and confirmed, else 0",
        of_run(lambda run: run.is_caught_up),
    ),
    _gauge(
        "stalled", "1 if this part has waited for that one for 15 s, else 0", stalled, "part", "waits_for"
    ),
    _counter(
        "restarts_total",
        "how often the run has begun a new epoch after an error",
        lambda account: single(account.n_restarts),
    ),
    _gauge(
        "recent_restarts", "errors of the last 10 minutes that ended an epoch, 20 at most", recent_restarts
    ),
    _gauge(
        "last_error_timestamp_seconds",
        "when an error last ended an epoch; no sample before the first one",
        last_error,
        "error",
    ),
)
_OF_SLOT: Final = (
    _gauge(
        "server_answers", "1 if the server told of the slot when it was last asked, else 0", server_answers
    ),
    _gauge(
        "slot_active",
        "1 if a walsender serves the slot, else 0",
        of_slot(lambda slot: slot.active_pid is not None),
    ),
    _gauge(
        "slot_lag_bytes",
        "WAL from what is confirmed to the server's position",
        of_slot(lambda slot: slot.behind_bytes),
    ),
    _gauge(
        "slot_flush_lag_seconds",
        "how long the last commit took to be confirmed once it was sent (pg_stat_replication); no sample when nothing "
        "is under way",
        of_slot(lambda slot: slot.flush_lag_s),
    ),
    _gauge(
        "slot_wal_held_bytes",
        "WAL that the server keeps for the slot",
        of_slot(lambda slot: slot.wal_held_bytes),
    ),
    _gauge(
        "slot_wal_held_without_journal_bytes",
        "WAL that the server would have to keep at least, were the slot confirmed behind the sink alone",
        of_slot(lambda slot: slot.wal_held_without_journal_bytes),
    ),
    _gauge(
        "slot_wal_limit_bytes",
        "max_slot_wal_keep_size; no sample where nothing limits it",
        of_slot(lambda slot: slot.wal_limit_bytes),
    ),
    _gauge(
        "slot_safe_wal_bytes",
        "WAL that the server may write before the slot may be lost (safe_wal_size); no sample without a limit",
        of_slot(lambda slot: slot.safe_wal_size_bytes),
    ),
    _gauge(
        "slot_lost_in_seconds",
        "when the slot may be lost if nothing more is confirmed, at the present rate of WAL; no sample without a limit",
        of_slot(lambda slot: slot.lost_in_s),
    ),
    _gauge("slot_wal_status", "1 for the slot's wal_status, else 0", wal_statuses, "status"),
    _gauge(
        "server_wal_bytes_per_second",
        "how fast the server writes WAL, over the last minute",
        of_slot(lambda slot: slot.wal_bytes_per_s),
    ),
)
_OF_READER: Final = (
    _counter(
        "reader_received_bytes_total",
        "what the server has sent of transactions",
        of_reader(lambda reader: reader.n_bytes),
        per_epoch=True,
    ),
    _counter(
        "reader_messages_total",
        "messages of transactions that the server has sent",
        of_reader(lambda reader: reader.n_messages),
        per_epoch=True,
    ),
    _gauge(
        "reader_paused",
        "1 if reading waits because of this setting's limit, else 0",
        pauses,
        "setting",
    ),
    _gauge(
        "reader_silent_seconds",
        "since the server last sent anything",
        of_reader(lambda reader: reader.silent_s),
    ),
    _gauge(
        "reader_pending_bytes",
        "gathered, and not sent to a buffer",
        of_reader(lambda reader: reader.pending_bytes),
    ),
    _gauge(
        "reader_in_flight_bytes",
        "sent to a buffer, and not decoded",
        of_reader(lambda reader: reader.in_flight_bytes),
    ),
    _gauge("backlog_bytes", "committed, and not in the sink", of_reader(lambda reader: reader.backlog_bytes)),
    _gauge("buffers", "xid buffers that have a process", of_reader(lambda reader: reader.n_buffers)),
    _gauge(
        "buffers_requested",
        "xid buffers that Ray was asked for, without a process yet",
        of_reader(lambda reader: reader.n_buffers_asked),
    ),
    _gauge(
        "open_transactions",
        "transactions that are streamed and have not committed",
        of_reader(lambda reader: reader.n_open),
    ),
    _gauge("open_rows", "their rows that were not rolled back", of_reader(lambda reader: reader.n_open_rows)),
    _gauge(
        "open_bytes", "what the buffers hold of the 100 largest of them, by where it is", open_bytes, "place"
    ),
    _gauge(
        "oldest_open_transaction_seconds",
        "since the first block of the oldest of them; 0 where none is open",
        of_reader(lambda reader: reader.oldest_open_s),
    ),
)
_OF_SEQUENCER: Final = (
    _gauge(
        "prepared_transactions",
        "transactions between PREPARE and COMMIT or ROLLBACK PREPARED",
        of_sequencer(lambda sequencer: sequencer.n_prepared),
    ),
    _gauge(
        "sequencer_waiting",
        "entries of the commit order that are not done",
        of_sequencer(lambda sequencer: sequencer.n_waiting),
    ),
    _gauge(
        "sequencer_recording_seconds",
        "for how long the storage has not taken the confirmed position; 0 where it has",
        of_sequencer(lambda sequencer: sequencer.recording_s or 0),
    ),
    _gauge(
        "sequencer_journal_failing_seconds",
        "for how long the journal could not be written; 0 where it can be",
        of_sequencer(lambda sequencer: sequencer.journal_failing_s or 0),
    ),
    _counter(
        "given_up_transactions_total",
        "transactions that were left out, because a person gave them up",
        of_sequencer(lambda sequencer: sequencer.n_left_out),
        per_epoch=True,
    ),
    _gauge(
        "parked_tables",
        "tables that are parked, because a change of them cannot be delivered",
        of_sequencer(lambda sequencer: len(sequencer.parked)),
    ),
    _gauge(
        "parked_changes",
        "changes of these tables that were left out",
        of_sequencer(lambda sequencer: sum(each.n_changes for each in sequencer.parked)),
    ),
)
_OF_JOURNAL: Final = (
    _gauge(
        "journal_bytes",
        "what the journal takes in the storage, with the segments that it names; 0 where it holds nothing",
        of_journal(lambda journal: journal.n_bytes),
    ),
    _gauge(
        "journal_limit_bytes",
        "journal_max_bytes; no sample where that is 0",
        of_journal(lambda journal: journal.max_bytes or None),
    ),
    _gauge(
        "journal_full",
        "1 if it has reached its limit, and commits wait in the slot, else 0",
        of_journal(lambda journal: journal.is_full),
    ),
    _gauge("journal_files", "its files", of_journal(lambda journal: journal.n_files)),
    _gauge(
        "journal_transactions",
        "committed and confirmed transactions that it holds, and the sink does not have",
        of_journal(lambda journal: journal.n_transactions),
    ),
    _gauge(
        "journal_oldest_seconds",
        "since the COMMIT of its first transaction; 0 where it holds none",
        of_journal(journal_oldest_s),
    ),
    _gauge(
        "journal_wal_bytes",
        "WAL of what it holds, which the server need not keep for the sink",
        of_journal(lambda journal: journal.wal_bytes),
    ),
)
_OF_SINK: Final = (
    _gauge(
        "sink_behind_bytes",
        "WAL from what the sink has to the server's position, whatever the journal holds of it",
        of_slot(lambda slot: slot.undelivered_bytes),
    ),
    _gauge(
        "sink_behind_seconds",
        "since the COMMIT of the oldest transaction that the sink does not have (since it was ready, as long as it is "
        "not in the journal); 0 where it has all",
        of_sequencer(lambda sequencer: sequencer.undelivered_s),
    ),
    _counter("sink_batches_total", "batches that the sink has taken", of_sink(lambda sink: sink.n_batches)),
    _counter(
        "sink_transactions_total",
        "transactions that the sink has taken",
        of_sink(lambda sink: sink.n_transactions),
    ),
    _counter("sink_rows_total", "rows that the sink has taken", of_sink(lambda sink: sink.n_rows)),
    _gauge(
        "sink_latency_seconds",
        "from COMMIT, on the server's clock, to the end of the batch, of the last 10,000 transactions",
        percentiles,
        "percentile",
    ),
    _gauge(
        "sink_last_lag_seconds", "the same of the last transaction of the last batch", of_sink(last_lag_s)
    ),
    _gauge(
        "sink_in_hand_seconds",
        "for how long the sink has had its batch; 0 where it has none",
        of_sink(lambda sink: 0 if sink.in_hand is None else sink.in_hand.for_s),
    ),
    _gauge(
        "sink_in_hand_rows",
        "rows of that batch",
        of_sink(lambda sink: 0 if sink.in_hand is None else sink.in_hand.n_rows),
    ),
    _gauge(
        "spark_executors",
        "executors that are registered; no sample before there is a session, and in one of yours",
        of_sink(lambda sink: sink.n_executors),
    ),
)
_OF_LOG: Final = (
    _gauge(
        "log_reach_bytes",
        "WAL from the oldest state that the change log answers to its newest commit; no sample of these where "
        "log_retention is not set",
        of_log(lambda log: log.reach_bytes),
    ),
    _gauge("log_cut_tables", "tables whose change log was shortened", of_log(lambda log: log.n_cut_tables)),
    _gauge("log_consumers", "consumers that are registered", of_log(lambda log: log.n_consumers)),
    _gauge(
        "log_consumer_behind_bytes",
        "WAL from the position of the consumer that is furthest behind to the log's newest commit; 0 where none is",
        of_log(furthest_behind),
    ),
    _gauge(
        "log_consumer_silent_seconds",
        "since a consumer told a position, of those that do not have all; 0 where none is behind",
        of_log(longest_silent_s),
    ),
    _gauge(
        "log_held_bytes",
        "files of the change log that log_retention would have removed in its last turn but for consumers; no sample "
        "before its first turn, if there are any",
        of_log(held_by_consumers),
    ),
)
_OF_SNAPSHOTS: Final = (
    _gauge(
        "snapshot_tables",
        "tables whose snapshot is in this state; resting: it failed, and is taken again",
        snapshot_tables,
        "state",
    ),
    _counter(
        "snapshots_taken_total",
        "snapshots that the sink has taken",
        of_snapshots(lambda snapshots: snapshots.n_finished),
    ),
    _gauge(
        "snapshot_size_bytes",
        "what the server has of this run's tables, taken or not",
        of_snapshots(lambda snapshots: snapshots.n_bytes),
    ),
    _gauge(
        "snapshot_read_bytes", "what is read of that", of_snapshots(lambda snapshots: snapshots.n_bytes_read)
    ),
)

SECTIONS: Final = {
    "The run": _OF_RUN,
    "The slot": _OF_SLOT,
    "The slot reader and its buffers": _OF_READER,
    "The commit sequencer": _OF_SEQUENCER,
    "The journal": _OF_JOURNAL,
    "The sink": _OF_SINK,
    "The change log": _OF_LOG,
    "Snapshots": _OF_SNAPSHOTS,
}
"""The sections of docs/metrics.md."""
METRICS: Final[tuple[Metric, ...]] = tuple(metric for section in SECTIONS.values() for metric in section)
