"""The parts of a run's account: plain values, as they stand in its JSON.

The names of the fields are the keys of the JSON, and docs/status.md says what each is. A key keeps its meaning within
one ``VERSION``. New keys may come in, and a reader passes over those that it does not know. LSNs are text, as
PostgreSQL prints them. A part that is not known at the moment is None, and never zero.

These are also what the actors answer: a ``…Report`` is one answer, with the parts of the account, and with what the
supervisor alone wants to know. The display asks several times a second, and leaves out by arguments what is dear: the
walk over prepared transactions, the processes, and all but the largest open transactions.

Rejected: the actors' own records for the display, copied field by field: two records of one thing differ one day.
"""

from __future__ import annotations

import dataclasses
import datetime
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.quantities import counted

VERSION: Final = 1
"""The version of the JSON. It changes when a key loses or changes its meaning."""
MOST_OPEN: Final = 100
MOST_PREPARED: Final = 100
MOST_TABLES: Final = 20
MOST_CONSUMERS: Final = 20
"""How many open transactions, prepared ones, tables of one of them, and consumers an account names at most."""


@dataclass(frozen=True)
class RunPart:
    """``state``: starting, reading, restarting or ended. ``waiting_for``: what a start waits for, in words; one
    that reads already may wait for the Spark session.
    ``page``: where the status page is served. ``metrics``: where Ray offers this run's metrics.
    ``system_identifier`` (of the server) and ``database`` are None before the slot is ours."""

    slot: str
    system_identifier: str | None
    database: str | None
    publication: tuple[str, ...]
    sink: str
    storage: str
    pid: int
    host: str
    started_at: datetime.datetime
    state: str
    waiting_for: tuple[str, ...]
    epoch: str
    is_caught_up: bool
    page: str | None = None
    metrics: str | None = None


@dataclass(frozen=True)
class SlotPart:
    """The slot as the server has it. ``behind_bytes``: from what is confirmed to the server's position.
    ``flush_lag_s``: how long what was confirmed last had taken, by the server's own measure; None where nothing is
    under way. ``lost_in_s``: when the slot may be lost if nothing more is confirmed, at the present rate of WAL.
    ``undelivered_bytes``: from what the sink has to the server's position. ``wal_held_without_journal_bytes``: the WAL
    that the server would have to keep at least, if the slot were confirmed after the sink alone."""

    name: str
    database: str | None
    plugin: str | None
    active_pid: int | None
    two_phase: bool | None
    confirmed_lsn: str | None
    restart_lsn: str | None
    server_lsn: str
    behind_bytes: int
    flush_lag_s: float | None
    wal_held_bytes: int
    wal_limit_bytes: int | None
    wal_status: str | None
    safe_wal_size_bytes: int | None
    invalidation_reason: str | None
    wal_bytes_per_s: float | None = None
    lost_in_s: float | None = None
    undelivered_bytes: int | None = None
    wal_held_without_journal_bytes: int | None = None


@dataclass(frozen=True)
class ReaderPart:
    """Counts are since the epoch began. ``paused_by``: the setting whose limit is reached, or None.
    ``silent_s``: since the server last sent anything. ``oldest_open_s``: since the first block of the oldest open
    transaction, 0 where none is open."""

    received_lsn: str
    told_lsn: str
    n_messages: int
    n_bytes: int
    paused_by: str | None
    silent_s: float
    pending_bytes: int
    in_flight_bytes: int
    backlog_bytes: int
    n_buffers: int
    n_buffers_asked: int
    n_moved: int
    n_open: int
    n_open_rows: int
    messages_per_s: float | None = None
    bytes_per_s: float | None = None
    oldest_open_s: float = 0.0


@dataclass(frozen=True)
class OpenPart:
    """A transaction that is not committed yet, as far as it was sent to its buffer. ``n_rows``: those that were not
    rolled back. ``tables``: at most ``MOST_TABLES`` of ``n_tables``. ``age_s``: since its first block."""

    xid: int
    age_s: float
    n_rows: int
    n_bytes: int
    n_bytes_in_memory: int
    n_bytes_spilled: int
    n_segments: int
    n_rolled_back_subtransactions: int
    tables: tuple[str, ...]
    n_tables: int
    buffer: int
    streamed: bool


@dataclass(frozen=True)
class PreparedPart:
    """A transaction between PREPARE and COMMIT or ROLLBACK PREPARED, whose rows are in the storage."""

    xid: int
    gid: str
    prepare_lsn: str
    n_rows: int
    n_bytes: int
    tables: tuple[str, ...]
    n_tables: int


@dataclass(frozen=True)
class ParkedPart:
    """A table that is parked: its changes from ``since_lsn`` on are left out. The counts are of what is confirmed."""

    table: str
    since_lsn: str
    xid: int
    reason: str
    n_transactions: int
    n_changes: int


@dataclass(frozen=True)
class SequencerPart:
    """Counts are since the epoch began. ``n_waiting``: entries of the commit order that are not done. The head is the
    first of them: ``head_state`` is waiting (for its buffer, or the storage), ready, taken (by the sink), stuck or
    journaled (in the storage alone, as all of its ``head_message`` is). ``head_message`` is what the server sent of it.
    ``head_xid``: None where it may have several transactions; ``head_end_lsn``: its end. ``recording_s``: for how long
    the storage has not taken the position. ``journal_failing_s``: for how long the journal could not be written, and
    ``journal_error`` why; None if it can be. ``delivered_lsn``: the sink has all up to here.
    ``undelivered_s``: since the COMMIT of the oldest transaction that it does not have (since it was ready, as long as
    it is not in the journal), 0 where it has all."""

    confirmed_lsn: str
    n_waiting: int
    head_ticket: int | None
    head_kind: str | None
    head_state: str | None
    head_commit_lsn: str | None
    recording_s: float | None
    n_prepared: int
    n_batches: int
    n_transactions: int
    n_rows: int
    n_left_out: int
    delivered_lsn: str | None = None
    undelivered_s: float | None = None
    parked: tuple[ParkedPart, ...] = ()
    journal_failing_s: float | None = None
    journal_error: str | None = None
    head_message: str | None = None
    head_xid: int | None = None
    head_first_commit_lsn: str | None = None
    head_end_lsn: str | None = None
    head_n_transactions: int | None = None


@dataclass(frozen=True)
class JournalPart:
    """What the journal in the storage holds: what is committed and confirmed, and the sink does not have.

    ``n_bytes``: of its files, and of the segments that they name. ``max_bytes``: ``journal_max_bytes``; 0 where nothing
    more is written. ``wal_bytes``: WAL that the server need not keep for the sink because of it. ``oldest_s``: since
    the COMMIT of its first transaction. ``is_full``: what commits now waits in the slot."""

    n_files: int = 0
    n_bytes: int = 0
    max_bytes: int = 0
    n_units: int = 0
    n_transactions: int = 0
    wal_bytes: int = 0
    first_commit_lsn: str | None = None
    end_lsn: str | None = None
    oldest_s: float | None = None
    is_full: bool = False


@dataclass(frozen=True)
class BatchPart:
    """A batch that the sink holds. ``seconds``: from the sequencer to the report that it is done. ``number``: from 0
    since the driver began. ``lag_ms``: from COMMIT of its last transaction to that report; None if it has none."""

    done_at: datetime.datetime
    seconds: float
    n_transactions: int
    n_rows: int
    n_bytes: int
    last_commit_lsn: str
    number: int = 0
    lag_ms: float | None = None


@dataclass(frozen=True)
class BatchInHand:
    for_s: float
    n_transactions: int
    n_rows: int
    n_bytes: int


@dataclass(frozen=True)
class LatencyPart:
    """From COMMIT, on the server's clock, to the report of the sink, of the last ``n_transactions``."""

    p50_ms: float
    p99_ms: float
    n_transactions: int


@dataclass(frozen=True)
class SinkPart:
    """Counts are since the driver began. ``idle_s``: for how long Spark has had a job and no running task.
    ``n_executors``: None where the driver did not ask."""

    last_commit_lsn: str | None = None
    n_batches: int = 0
    n_transactions: int = 0
    n_rows: int = 0
    last_lag_ms: float | None = None
    latency: LatencyPart | None = None
    in_hand: BatchInHand | None = None
    batches: tuple[BatchPart, ...] = ()
    idle_s: float | None = None
    n_executors: int | None = None
    rows_per_s: float | None = None


@dataclass(frozen=True)
class ConsumerPart:
    """A reader of the change log that has a name: it has processed all up to ``lsn``. ``behind_bytes``: WAL from there
    to the log's newest commit. ``told_s``: since it told a position. ``held_bytes``: of files that ``log_retention``
    would have removed in its last turn but for this consumer; None before its first turn. ``is_forgotten``: it has told
    nothing for a week, and commits wait for it."""

    name: str
    lsn: str
    behind_bytes: int
    told_s: float
    held_bytes: int | None = None
    is_forgotten: bool = False


@dataclass(frozen=True)
class LogPart:
    """The change log of a sink whose run has ``log_retention``. ``cut_lsn``: the changes after it are there, of each
    table. ``oldest_lsn``: of what was cut, all states from here on can be read; where nothing was, it is the first
    state of the first table. ``reach_bytes``: WAL from there to the newest commit. ``consumers`` has those that are
    furthest behind, ``MOST_CONSUMERS`` of ``n_consumers``. ``error``: why the last look failed."""

    last_commit_lsn: str | None = None
    oldest_lsn: str | None = None
    cut_lsn: str | None = None
    reach_bytes: int | None = None
    n_tables: int = 0
    n_cut_tables: int = 0
    consumers: tuple[ConsumerPart, ...] = ()
    n_consumers: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ProcessPart:
    """``memory_bytes`` is the resident set. It and ``pid`` are None for a process that did not answer in time."""

    part: str
    pid: int | None
    node: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class RestartPart:
    """An error that ended an epoch. ``pause_s``: until the next one; None if there is none."""

    at: datetime.datetime
    error: str
    message: str
    remedy: str
    pause_s: float | None


@dataclass(frozen=True)
class Stall:
    """``part`` waits for ``waits_for``, since ``for_s``. ``text`` says it for people, with what to do."""

    part: str
    waits_for: str
    for_s: float
    text: str


@dataclass(frozen=True)
class StoredPart:
    """What the storage records of the slot. ``given_up`` and ``parked`` are in words. ``n_journal_files``: of the
    journal."""

    confirmed_lsn: str | None
    epoch: str | None
    given_up: tuple[str, ...]
    delivered_lsn: str | None = None
    n_journal_files: int | None = None
    parked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Account:
    """``run`` is None where nothing runs: then slot and storage alone say something. ``slot_error``: why the server
    did not tell of its slot. ``open`` has the largest first, ``restarts`` and ``batches`` the last at the end.
    ``journal`` is None where it is off and holds nothing, and ``log`` where the run removes nothing from one."""

    at: datetime.datetime
    run: RunPart | None
    slot: SlotPart | None = None
    slot_error: str | None = None
    stored: StoredPart | None = None
    reader: ReaderPart | None = None
    open: tuple[OpenPart, ...] = ()
    prepared: tuple[PreparedPart, ...] = ()
    sequencer: SequencerPart | None = None
    journal: JournalPart | None = None
    sink: SinkPart | None = None
    log: LogPart | None = None
    snapshots: SnapshotProgress | None = None
    processes: tuple[ProcessPart, ...] = ()
    restarts: tuple[RestartPart, ...] = ()
    n_restarts: int = 0
    last_error: RestartPart | None = None
    stalls: tuple[Stall, ...] = ()
    version: int = VERSION


@dataclass(frozen=True)
class ReaderReport:
    """The slot reader's answer."""

    reader: ReaderPart
    open: tuple[OpenPart, ...]
    """The largest open transactions, as many as were asked for."""
    processes: tuple[ProcessPart, ...] = ()
    """The reader's and its buffers', where they were asked for."""


@dataclass(frozen=True)
class SequencerReport:
    """The commit sequencer's answer."""

    sequencer: SequencerPart
    prepared: tuple[PreparedPart, ...] = ()
    """The prepared transactions, where they were asked for."""
    process: ProcessPart | None = None
    journal: JournalPart | None = None
    """Without ``max_bytes``; None while it holds nothing."""
    # For the supervisor; the account does not have these.
    skipped: tuple[tuple[Xid, Lsn], ...] = ()
    """The skipped transactions that this epoch met: xid and commit LSN."""
    parked: tuple[ParkedTable, ...] = ()
    """All tables that are or were parked."""
    last_commit_lsn: Lsn = INVALID_LSN
    """The commit LSN of the last transaction that was delivered."""
    journal_from_us: int = 0
    """When the journal's first transaction committed, in microseconds since the Unix epoch; 0 where it has none."""

    @property
    def confirmed_lsn(self) -> Lsn:
        """The server was told that all up to here is durable: in the sink, or in the journal."""
        return Lsn.parse(self.sequencer.confirmed_lsn)

    @property
    def delivered_lsn(self) -> Lsn:
        """The sink has all up to here; never ahead of ``confirmed_lsn``."""
        return Lsn.parse(self.sequencer.delivered_lsn or "0/0")

    @property
    def n_journaled(self) -> int:
        """How many of the entries that wait are in the journal. Without a sink these are through."""
        return 0 if self.journal is None else self.journal.n_units


@dataclass(frozen=True)
class SinkReport:
    """The answer of the batch loop's process."""

    sink: SinkPart = SinkPart()
    process: ProcessPart | None = None
    log: LogPart | None = None
    sink_lsn: Lsn = INVALID_LSN
    """The sink's watermark when the loop began; 0/0 if it does not have one. The account does not have it."""


def named(tables: set[str]) -> tuple[str, ...]:
    """The tables of a transaction that an account names."""
    return tuple(heapq.nsmallest(MOST_TABLES, tables))


def with_undelivered(account: Account) -> Account:
    """The account, with what its slot knows of the sink: how far it is behind the server, and what that would hold."""
    slot, stored, sequencer = account.slot, account.stored, account.sequencer
    delivered = stored.delivered_lsn if stored is not None else None
    if sequencer is not None:
        delivered = sequencer.delivered_lsn
    if slot is None or delivered is None:
        return account
    # The slot may have been asked some seconds before the sequencer.
    behind = max(0, Lsn.parse(slot.server_lsn) - Lsn.parse(delivered))
    held = max(behind, slot.wal_held_bytes)
    filled = dataclasses.replace(slot, undelivered_bytes=behind, wal_held_without_journal_bytes=held)
    return dataclasses.replace(account, slot=filled)


def is_caught_up(*, n_waiting: int, backlog_bytes: int, is_paused: bool, has_reached_target: bool) -> bool:
    """Whether all transactions that the server has sent are delivered and confirmed, and it has sent all that it had
    when the slot was opened. What the sink has not taken is behind, in the journal or not, and an open transaction is
    not. ``n_waiting`` counts what is in the journal. ``has_reached_target``: of what is delivered, and not of what is
    confirmed."""
    return has_reached_target and not (n_waiting or backlog_bytes or is_paused)


def state_words(account: Account) -> str:
    """Where a run stands, in a few words. Caught up with commits is not all where a transaction is open: its rows are
    read, and after what is confirmed."""
    run = account.run
    assert run is not None
    if run.state != "reading" or not run.is_caught_up:
        return run.state
    n_open = account.reader.n_open if account.reader is not None else 0
    return f"caught up{open_words([each.xid for each in account.open], n_open)}"


def open_words(xids: Sequence[int], n_open: int) -> str:
    """The words after ``caught up``: the largest open transaction, and how many more there are."""
    if not n_open:
        return ""
    if not xids:
        return f" with commits · reading {counted(n_open, 'open transaction')}"
    return f" with commits · reading xid {xids[0]}{f' and {n_open - 1:,} more' if n_open > 1 else ''}"
