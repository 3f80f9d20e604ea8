"""The slot reader actor: owns the replication connection and the buffers.

A shell: ``prepare`` connects and starts the buffers, ``open`` starts replication, ``run`` reads until ``stop``. Reading
(``Reading``) and sending (``SendingThread``) each have a thread of their own inside the actor. ``feedback``, ``stop``
and ``account`` come in on other threads, and only set or read plain attributes.
"""

from __future__ import annotations

import dataclasses
import heapq
import importlib
import os
import threading
import time
from contextlib import nullcontext
from typing import Any

from xidstream.actors.reader.buffer_pool import BufferPool, open_part
from xidstream.actors.reader.buffer_quota import QuotaShare
from xidstream.actors.reader.heartbeat_thread import heartbeats
from xidstream.actors.reader.reading import Reading
from xidstream.actors.reader.sender import Sender
from xidstream.actors.reader.sending_thread import SendingThread
from xidstream.actors.runtime.allocator import return_freed_memory
from xidstream.actors.runtime.process_facts import this_process
from xidstream.actors.runtime.secrets import take_up
from xidstream.pipeline.account.model import ReaderPart, ReaderReport
from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.exchange import Opened, SlotIdentity
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.postgres.admin import Blocker, advance_slot
from xidstream.pipeline.postgres.catalog_watch import CatalogWatch
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.gone_tables import gone_tables
from xidstream.pipeline.postgres.kept_alive import KeptAlive
from xidstream.pipeline.postgres.opening import connect_slot, dropped_again, slot_settings
from xidstream.pipeline.preflight.record_check import check_server
from xidstream.pipeline.preflight.snapshot_decision import decide_snapshots, with_slot_xmax
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.tables import Surveyed
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import journaled_lsn, last_owner, read_progress
from xidstream.pipeline.storage.skips import pending_skips
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import StreamCutter
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.transactions.buffer_calls import BufferSettings


class SlotReader:
    def __init__(
        self,
        config: Config,
        epoch: str,
        secrets_path: str | None = None,
        quota: Any = None,
        has_sink: bool = True,
    ) -> None:
        choose_for_process(config.storage_mode)
        self._config = config
        self._epoch = epoch
        self._secrets_path = secrets_path
        self._has_sink = has_sink
        self._share = None if quota is None else QuotaShare(quota, epoch, config.buffers_min)
        self._ledger = TransactionLedger()
        """What this process knows of each open transaction."""
        self._stop = threading.Event()
        self._waiting_for: str | None = None
        self._sending: SendingThread | None = None
        self._watch: CatalogWatch | None = None
        return_freed_memory()

    # -- called by the supervisor ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Connect, create the slot where that was asked for, start the buffers. Raises what the slot package raises."""
        config = self._config = take_up(self._config, self._secrets_path)
        self._slot = connect_slot(
            slot_settings(config),
            create=config.create_slot,
            on_wait=self._tell_blockers,
            check=self._check_before_slot,
        )
        self._waiting_for = None
        connection, made_at = self._slot.connection, self._slot.made_at
        server = connection.same_server
        with nullcontext() if made_at is None else dropped_again(server, config.slot, made_at):
            self._decision: Decision = with_slot_xmax(config, connection, self._decision)
        identity = self._slot.identity
        self._layout = Layout(identity.system_identifier, identity.slot, self._epoch)
        if self._unrecorded is not None:
            self._unrecorded.note(config, self._layout, self._slot.confirmed_flush_lsn)
        self._start_buffers()

    def _check_before_slot(self, connection: ReplicationConnection) -> SlotIdentity:
        # Beside the record of a slot that was lost, a new one would look like a new beginning.
        checked = check_server(self._config, connection, remember=True)
        self._unrecorded = checked.unrecorded
        self._decision = decide_snapshots(self._config, connection)
        return checked.identity

    def _sink_may_take_segments(self) -> bool:
        sink = self._config.sink
        return bool(sink) and sink_type(sink).may_take_segments(self._config.storage)

    def survey(self, known: str | None) -> Surveyed:
        """See ``CatalogWatch.look``, whose errors it raises."""
        if self._watch is None:
            server = self._slot.connection.same_server
            names = renamed_columns(self._config.column_names)
            self._watch = CatalogWatch(server, self._config.publication, self._config.slot, names)
        return self._watch.look(known)

    def waiting_for(self) -> str | None:
        """What ``prepare`` waits for, for people; None when it is nothing in particular."""
        return self._waiting_for

    def open(self) -> Opened:
        """Start replication: from here on the slot is ours. The server hears from us until ``run``, however late that
        comes."""
        config = self._config
        # It may be further than what the server was told. The journal has all of that.
        storage = Storage(config.storage)
        start_lsn, owner_before = journaled_lsn(storage, self._layout), last_owner(storage, self._layout)
        self._slot.start(start_lsn)
        opened = self._slot.opened(start_lsn, last_owner(storage, self._layout), owner_before)
        record = read_progress(storage, self._layout)
        parked = () if record is None else record.parked
        gone, gone_before = gone_tables(self._slot.connection.same_server, {each.relid for each in parked})
        self._cutter = StreamCutter(
            block_bytes=config.block_bytes,
            pending_limit_bytes=max(config.block_bytes, config.reader_memory_bytes // 2),
            parallel=self._slot.streaming == "parallel",
            spares=self._spares,
            ledger=self._ledger,
            column_names=renamed_columns(config.column_names),
        )
        status_interval_s = min(
            config.status_interval_ms / 1000, self._slot.wal_sender_timeout_s / 3 or float("inf")
        )
        self._reading = Reading(
            config,
            self._slot.connection,
            self._cutter,
            self._stop,
            confirmed_flush_lsn=opened.confirmed_flush_lsn,
            status_interval_s=status_interval_s,
        )
        self._kept_alive = KeptAlive(self._slot.connection, opened.confirmed_flush_lsn, status_interval_s)
        return dataclasses.replace(
            opened,
            skips=self._skips,
            snapshots=self._decision,
            gone_tables=gone,
            gone_before=gone_before,
        )

    def pids(self) -> list[int]:
        """The process ids of this actor and of the buffers kept ready."""
        return [os.getpid(), *self._pool.fleet.pids()]

    def run(self, sequencer: Any) -> None:
        """Read until ``stop``. Raises ConnectionLost, ProtocolViolation, SlotLost and what buffers raise."""
        self._kept_alive.end()
        backlog = Backlog(self._config.buffer_memory_bytes)
        self._sender = Sender(self._pool, sequencer, backlog, self._ledger)
        self._sending = SendingThread(self._sender, self._pool)
        self._sending.start()
        try:
            with heartbeats(self._slot.connection.same_server, self._config.heartbeat_interval_s):
                self._reading.run(self._sending)
        finally:
            # First the slot, which must not wait for Ray to be free for another reader.
            self._slot.connection.close()
            self._sending.close()
        unsendable = self._reading.unsendable
        if unsendable is None:
            return
        # The stream has ended by the server's error, so this cannot be told on its connection.
        advance_slot(self._slot.connection.same_server, self._config.slot, self._reading.flushed_lsn)
        if not self._stop.is_set():
            raise ConnectionLost(
                f"the server cannot send transaction {int(unsendable.xid)}, which was given up: "
                "reading continues after it"
            )

    def feedback(self, confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
        """From the sequencer: what may be confirmed, what no longer waits in memory for the sink, and up to where no
        buffer's memory is needed any more."""
        self._reading.confirm(confirmed_lsn)
        if self._sending is not None:
            self._sending.done_ticket = max(self._sending.done_ticket, done_ticket)
            self._sending.free_ticket = max(self._sending.free_ticket, free_ticket)

    def stop(self) -> None:
        """End ``run`` after the next look: it confirms what it may, and leaves the slot free."""
        self._stop.set()

    def account(self, *, with_processes: bool, n_open: int) -> ReaderReport | None:
        """What it knows of itself; None before ``run``. ``with_processes``: the buffers are asked, too. ``n_open``: how
        many of the open transactions to name, the largest first."""
        sending = self._sending
        if sending is None:
            return None
        records = self._pool.open_records()
        now_s = time.monotonic()
        reader = ReaderPart(
            received_lsn=str(max(self._reading.received_lsn, sending.end_lsn)),
            told_lsn=str(self._reading.flushed_lsn),
            n_messages=self._cutter.n_messages_cut,
            n_bytes=self._sender.n_bytes,
            paused_by=self._reading.paused_by,
            silent_s=round(self._reading.silent_s, 3),
            pending_bytes=self._cutter.pending_bytes,
            in_flight_bytes=sending.in_flight_bytes,
            backlog_bytes=sending.backlog_bytes,
            n_buffers=self._pool.fleet.n_buffers,
            n_buffers_asked=self._pool.fleet.n_asked,
            n_moved=self._pool.n_moved,
            n_open=len(records),
            n_open_rows=sum(record.held.n_rows for record in records),
            oldest_open_s=round(max((now_s - record.since_s for record in records), default=0.0), 3),
        )
        largest = heapq.nsmallest(n_open, records, key=lambda record: (-record.held.n_rows, record.xid))
        processes = (this_process("slot reader"), *self._pool.fleet.processes()) if with_processes else ()
        return ReaderReport(reader, tuple(open_part(record, now_s) for record in largest), processes)

    def _tell_blockers(self, blockers: tuple[Blocker, ...]) -> None:
        names = "; ".join(map(str, blockers)) or "transactions that cannot be seen"
        self._waiting_for = f"waiting for {names} to end before the slot can be created"

    def _start_buffers(self) -> None:
        # The cutter may hold the other half.
        self._spares = Spares(self._config.reader_memory_bytes // 2)
        self._skips = pending_skips(
            Storage(self._config.storage), self._layout, self._slot.confirmed_flush_lsn
        )
        settings = BufferSettings(
            self._config.storage,
            self._layout,
            self._config.buffer_memory_bytes,
            self._skips,
            # A transaction that is already a segment costs the journal one line. So does one of a capture.
            bind_late=not self._has_sink or self._sink_may_take_segments(),
            parks=self._config.on_poison == "park",
            storage_mode=self._config.storage_mode,
        )
        self._pool = BufferPool(self._config, settings, self._spares, self._ledger, self._share)
        # While the buffers load their kernels, and not when the slot is ours.
        importlib.import_module("xidstream.pipeline.postgres.copy_loop")
        self._pool.fleet.await_ready()
