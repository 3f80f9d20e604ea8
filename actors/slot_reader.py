"""The slot reader actor: owns the replication connection, cuts the stream, answers the server.

``run`` is the loop, on a thread of its own inside the actor; ``feedback``, ``stop`` and ``stats`` come in on
others and only set or read plain attributes. Rows go from libpq into the cutter's arrays in a compiled loop; what
needs a look comes to ``StreamCutter.feed``. While rows flow the reader naps instead of polling: a walsender sends
each row by itself, and whoever polls is woken for each, which costs both of them more than the row does.

What is decided where: what a message means, ``pipeline.stream``; when to pause, here, from three sums of bytes
(gathered, in flight to buffers, committed but not yet in the sink). A pause stops reading, never the
connection: the status updates go on. The confirmed position comes from the sequencer alone; this actor never
derives one.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.allocator import return_freed_memory
from actors.buffer_pool import BufferPool
from actors.handover import HandOver
from actors.quota import QuotaShare
from actors.secrets import take_up
from actors.slot_record import check_record
from actors.xid_buffer import BufferSettings
from pipeline.config import Config
from pipeline.errors import ConnectionLost, SlotLost
from pipeline.faultpoints import reach
from pipeline.handoff import Opened
from pipeline.pg import INVALID_LSN, Lsn, Xid
from pipeline.protocol.gathered import Outcome
from pipeline.protocol.parser import parse_keepalive
from pipeline.segments import Layout
from pipeline.slot.admin import Blocker, describe_slot
from pipeline.slot.opening import connect_slot, slot_settings
from pipeline.stream import Cut, StreamCutter
from pipeline.stream.backlog import Backlog
from pipeline.stream.linger import Linger

_XLOG_DATA = ord("w")
_CONTROLS_PER_LOOK = 1024
_NAP_S, _SOCKET_NAP_S = 0.0003, 0.0001
"""While rows flow. A Unix socket takes about 280 rows that were sent one by one, which come in half a millisecond, and
then the walsender waits; TCP joins them, and takes megabytes."""
_IDLE_WAIT_S = 0.05
_LOOK_INTERVAL_S = 0.002
_FLOWING_LOOK_INTERVAL_S = 0.01
_POSITION_INTERVAL_S = 0.25
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ReaderStats:
    """Bytes and messages are since the start of the epoch; ``open`` is (xid, rows, bytes in memory, segments);
    the buffers that were asked for beside ``n_buffers`` have no process yet; ``n_moved`` transactions have changed
    their buffer."""

    n_messages: int
    n_bytes: int
    received_lsn: Lsn
    flushed_lsn: Lsn
    pending_bytes: int
    in_flight_bytes: int
    backlog_bytes: int
    paused: bool
    n_buffers: int
    n_buffers_asked: int
    n_moved: int
    open: tuple[tuple[Xid, int, int, int], ...]


class SlotReader:
    def __init__(
        self, config: Config, epoch: str, secrets_path: str | None = None, quota: Any = None
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._secrets_path = secrets_path
        self._share = None if quota is None else QuotaShare(quota, epoch, config.buffers_min)
        self._stop = threading.Event()
        self._waiting_for: str | None = None
        self._status_interval_s: float | None = None
        self._flushed = INVALID_LSN
        self._done_ticket = -1
        self._status_due = False
        self._received = INVALID_LSN
        self._paused = False
        self._solicited = 0.0
        self._running = False
        return_freed_memory()

    # -- called by the supervisor ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Connect, create the slot where that was asked for, start the buffers. Raises what the slot package raises."""
        config = self._config = take_up(self._config, self._secrets_path)
        # Before a slot is created: beside the record of one that was lost, that would look like a new beginning.
        check_record(config, remember=True)
        self._slot = connect_slot(
            slot_settings(config), create=config.create_slot, on_wait=self._tell_blockers
        )
        self._waiting_for = None
        self._connection = self._slot.connection
        self._start_buffers()

    def waiting_for(self) -> str | None:
        """What ``prepare`` waits for, for people; None when it is nothing in particular."""
        return self._waiting_for

    def open(self) -> Opened:
        """Start replication: from here on the slot is ours, and ``run`` must follow soon."""
        config = self._config
        self._slot.start()
        state = describe_slot(config.dsn, config.slot)
        # Read again: until START another reader may have moved it.
        confirmed_flush_lsn = state.confirmed_flush or self._slot.confirmed_flush_lsn
        self._status_interval_s = min(
            config.status_interval_ms / 1000, self._slot.wal_sender_timeout_s / 3 or float("inf")
        )
        self._cutter = StreamCutter(
            block_bytes=config.block_bytes,
            pending_limit_bytes=max(config.block_bytes, config.reader_memory_bytes // 2),
            parallel=self._slot.streaming == "parallel",
        )
        self._loop = self._connection.copy_loop()
        self._nap_s = _SOCKET_NAP_S if self._connection.is_local else _NAP_S
        self._flushed = confirmed_flush_lsn
        return Opened(
            identity=self._slot.identity,
            confirmed_flush_lsn=confirmed_flush_lsn,
            target_lsn=self._slot.flush_lsn,
            server_version=self._slot.server_version,
            proto_version=self._slot.proto_version,
            streaming=self._slot.streaming,
            two_phase=self._slot.two_phase,
            cover=self._slot.prepare_cover(config.dsn, confirmed_flush_lsn),
        )

    def pids(self) -> list[int]:
        """The process ids of this actor and of the buffers kept ready."""
        return [os.getpid(), *self._pool.pids()]

    def feedback(self, confirmed_lsn: Lsn, done_ticket: int) -> None:
        """From the sequencer: what may be confirmed, and what no longer waits for the sink."""
        if confirmed_lsn > self._flushed:
            # In this order: the loop clears the mark before it reads the position.
            self._flushed = confirmed_lsn
            self._status_due = True
        self._done_ticket = max(self._done_ticket, done_ticket)

    def stop(self) -> None:
        """End ``run`` after the next look: it confirms what it may, and leaves the slot free."""
        self._stop.set()

    def stats(self) -> ReaderStats | None:
        """None before ``run``."""
        if not self._running:
            return None
        held = [(h.xid, h.n_rows, h.n_bytes_in_memory, h.n_segments) for h in list(self._pool.open.values())]
        return ReaderStats(
            n_messages=self._cutter.n_messages_cut,
            n_bytes=self._handover.n_bytes,
            received_lsn=max(self._received, self._handover.end_lsn),
            flushed_lsn=self._flushed,
            pending_bytes=self._cutter.pending_bytes,
            in_flight_bytes=self._pool.in_flight_bytes,
            backlog_bytes=self._handover.backlog_bytes,
            paused=self._paused,
            n_buffers=self._pool.n_buffers,
            n_buffers_asked=self._pool.n_asked,
            n_moved=self._pool.n_moved,
            open=tuple(held),
        )

    def _tell_blockers(self, blockers: tuple[Blocker, ...]) -> None:
        names = "; ".join(map(str, blockers)) or "transactions that cannot be seen"
        self._waiting_for = f"waiting for {names} to end before the slot can be created"

    def _start_buffers(self) -> None:
        identity = self._slot.identity
        layout = Layout(identity.system_identifier, identity.slot, self._epoch)
        settings = BufferSettings(self._config.storage, layout, self._config.buffer_memory_bytes)
        self._pool = BufferPool(self._config, settings, self._share)
        # While the buffers load their kernels, and not when the slot is ours.
        importlib.import_module("pipeline.slot.copy_loop")
        self._pool.await_ready()

    # -- the loop --------------------------------------------------------------------------------------

    def run(self, sequencer: Any) -> None:
        """Read until ``stop``. Raises ConnectionLost, ProtocolViolation and what buffers raise."""
        self._handover = HandOver(self._pool, sequencer, Backlog(self._config.buffer_memory_bytes))
        self._running = True
        self._next_status_s = time.monotonic()
        self._asked_s: float | None = None
        self._next_position_s = 0.0
        self._next_look_s = 0.0
        self._quiet = False
        self._linger = Linger(
            linger_s=self._config.linger_ms / 1000, stream_linger_s=self._config.stream_linger_ms / 1000
        )
        try:
            with self._connection.reading():
                while not self._stop.is_set():
                    if self._over_credit():
                        self._pause()
                        continue
                    self._look(self._read())
                self._send_status(time.monotonic(), reply=False)
            # In order, so that the server has surely read the last position: the next run starts from it.
            self._connection.stop(_STOP_TIMEOUT_S)
        finally:
            self._connection.close()

    def _read(self) -> bool:
        """Take what the server has sent, up to the first cuts; True when the socket had no more."""
        cutter, loop, block_bytes = self._cutter, self._loop, self._config.block_bytes
        self._flowing = False
        for _ in range(_CONTROLS_PER_LOOK):
            target = cutter.target
            n_messages = target.n_messages
            outcome = loop.gather(target, block_bytes)
            self._flowing = self._flowing or target.n_messages != n_messages or outcome is not Outcome.DRAINED
            cuts = cutter.settle()
            if self._flowing:
                self._asked_s = None
            if outcome is Outcome.DRAINED:
                return True
            if outcome is Outcome.MESSAGE:
                data = loop.take_message()
                if data[0] == _XLOG_DATA:
                    cuts = [*cuts, *cutter.feed(data)]
                else:
                    self._keepalive(data)
            elif outcome is Outcome.ENDED:
                raise self._connection.end_of_stream()
            elif outcome is Outcome.FAILED:
                raise self._connection.failure()
            if cuts:
                self._give(cuts)
                if outcome is Outcome.FULL or self._over_credit():
                    return False
        return False

    def _look(self, drained: bool) -> None:
        """What is not done for each message. The socket is empty every few hundred of them, and asking Ray what has
        ended costs as much as reading a thousand: so this is done by the clock, not each time."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            if drained and self._flowing:
                time.sleep(self._nap_s)
            elif drained:
                self._connection.wait_readable(self._next_look_s - now_s)
            return
        self._next_look_s = now_s + (_FLOWING_LOOK_INTERVAL_S if self._flowing else _LOOK_INTERVAL_S)
        self._quiet = self._quiet and drained
        self._handover.take_back(self._done_ticket)
        self._pool.adapt()
        self._pool.check_alive(now_s)
        self._flush_lingering(now_s)
        if self._status_due or now_s >= self._next_status_s:
            self._send_status(now_s, reply=False)
        if drained:
            self._watch_notices()
            self._solicit_position(now_s)
            self._pool.give_back_idle(self._done_ticket)
            wait_s = _IDLE_WAIT_S
            if self._cutter.whole_bytes:
                wait_s = min(wait_s, self._config.linger_ms / 1000)
            self._quiet = not self._connection.wait_readable(wait_s)
            if self._quiet:
                self._fail_on_silence()

    def _watch_notices(self) -> None:
        """Before what came after a notice is handed on: nothing behind a skipped publication may be confirmed."""
        for notice in self._connection.take_notices():
            if notice.skips_publication:
                # PostgreSQL 18 only warns, and leaves the publication's changes out of the stream for good.
                raise SlotLost(
                    f"slot {self._config.slot}: {notice.message}",
                    remedy="create the publication again; changes made meanwhile are missing: take a new snapshot",
                )

    def _flush_lingering(self, now_s: float) -> None:
        if self._linger.whole_is_due(now_s, self._cutter.whole_bytes, quiet=self._quiet):
            self._give(self._cutter.flush())
        if self._linger.open_is_due(now_s, self._cutter.has_open_rows):
            self._give(self._cutter.flush_open())

    def _give(self, cuts: Sequence[Cut]) -> None:
        if cuts:
            if self._connection.has_notices:
                self._watch_notices()
            self._handover.give(cuts)

    def _pause(self) -> None:
        """Too much is under way: take results and credit, and keep the connection alive, but do not read."""
        self._paused = True
        self._asked_s = None  # nobody listens: silence means nothing
        self._handover.take_back(self._done_ticket, wait_s=_IDLE_WAIT_S)
        if not self._handover.in_flight_bytes:
            # What is over the limit is here, gathered: only cutting it can bring credit back.
            self._give(self._cutter.flush())
            self._give(self._cutter.flush_open())
        now_s = time.monotonic()
        self._pool.adapt()
        self._pool.check_alive(now_s)
        if self._status_due or now_s >= self._next_status_s:
            self._send_status(now_s, reply=False)
        if self._handover.backlog_bytes > self._config.backlog_bytes:
            time.sleep(_IDLE_WAIT_S)
        self._paused = self._over_credit()

    def _over_credit(self) -> bool:
        return (
            self._handover.in_flight_bytes + self._cutter.pending_bytes > self._config.reader_memory_bytes
            or self._handover.backlog_bytes > self._config.backlog_bytes
        )

    # -- the server ------------------------------------------------------------------------------------

    def _keepalive(self, data: Any) -> None:
        keepalive = parse_keepalive(data)
        if self._connection.has_notices:
            self._watch_notices()
        now_s = time.monotonic()
        self._received = max(self._received, keepalive.end_lsn)
        if now_s >= self._next_position_s:
            self._give(self._cutter.position(keepalive.end_lsn))
            self._next_position_s = now_s + _POSITION_INTERVAL_S / 2
        if keepalive.reply_requested:
            self._send_status(now_s, reply=False)

    def _fail_on_silence(self) -> None:
        """A link that only one side has lost stays open; the server answers what ``_solicit_position`` asks."""
        if not self._config.receive_timeout_ms or self._asked_s is None:
            return
        timeout_s = max(self._config.receive_timeout_ms, 2 * self._config.status_interval_ms) / 1000
        if time.monotonic() - self._asked_s > timeout_s:
            raise ConnectionLost(
                f"slot {self._config.slot}: the server was silent for {timeout_s:.0f} s, though it was asked",
                remedy="check the network in between; raise receive_timeout_ms where the server is that slow",
            )

    def _solicit_position(self, now_s: float) -> None:
        """Ask where the server is: an idle publication must not hold WAL back, nor a run wait for traffic."""
        interval_s = _POSITION_INTERVAL_S if self._config.available_now else self._status_interval_s
        assert interval_s is not None, "open comes before run"
        if now_s - self._solicited >= interval_s:
            self._solicited = now_s
            self._asked_s = now_s if self._asked_s is None else self._asked_s
            self._send_status(now_s, reply=True)

    def _send_status(self, now_s: float, *, reply: bool) -> None:
        self._status_due = False
        flushed = self._flushed
        received = max(self._received, self._handover.end_lsn, flushed)
        reach("sending_status")
        sent = self._connection.send_status(received, flushed, flushed, reply)
        reach("status_sent")
        # The server has not taken the last one yet: this one is sent at the next look.
        self._status_due = self._status_due or not sent
        assert self._status_interval_s is not None, "open comes before run"
        self._next_status_s = now_s + self._status_interval_s
