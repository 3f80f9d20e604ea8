"""The reader's loop: from the replication connection into the cutter, and what the server is told.

Rows go from libpq into the cutter's arrays in a compiled loop; what needs a look comes to ``StreamCutter.feed``. While
rows flow the loop naps instead of polling: a walsender sends each row by itself, and whoever polls is woken for each,
which costs both of them more than the row does.

What is decided where: what a message means, ``pipeline.stream``; when the server is told the position,
``pipeline.stream.status_pace``; when to pause, here, from three sums of bytes (gathered, in flight to buffers,
committed but not yet in the sink). A pause stops reading, never the connection: the status updates go on. The confirmed
position comes from the sequencer alone; nothing here derives one.

``run`` is called once, on a thread of its own; ``confirm`` and the properties come from others, and only set or read
plain attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from xidstream.actors.reader.sending_thread import SendingThread
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ConnectionLost, PoisonedChange, SlotLost
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.protocol.message_buffer import Outcome
from xidstream.pipeline.protocol.parser import parse_keepalive
from xidstream.pipeline.slot.connection import ReplicationConnection
from xidstream.pipeline.stream import Cut, StreamCutter, Unsendable
from xidstream.pipeline.stream.linger import Linger
from xidstream.pipeline.stream.status_pace import StatusPace

_XLOG_DATA = ord("w")
_CONTROLS_PER_LOOK = 1024
_NAPS_S, _SOCKET_NAPS_S = (0.0003, 0.004), (0.0001, 0.0001)
"""While rows flow: the first, and the longest, each twice the one before. A Unix socket takes about 280 rows that were
sent one by one, which come in half a millisecond, and then the walsender waits; TCP joins them, and takes megabytes.
There long naps spare the walsender a good part of its work, too (docs/performance.md)."""
_IDLE_WAIT_S = 0.05
_LOOK_INTERVAL_S = 0.002
_FLOWING_LOOK_INTERVAL_S = 0.01
_POSITION_INTERVAL_S = 0.25
_STOP_TIMEOUT_S = 10.0


class Reading:
    def __init__(
        self,
        config: Config,
        connection: ReplicationConnection,
        cutter: StreamCutter,
        stop: threading.Event,
        *,
        confirmed_flush_lsn: Lsn,
        status_interval_s: float,
    ) -> None:
        self._config = config
        self._connection = connection
        self._cutter = cutter
        self._stop = stop
        self._status_interval_s = status_interval_s
        self._loop = connection.copy_loop()
        self._naps_s = _SOCKET_NAPS_S if connection.is_local else _NAPS_S
        self._nap_s = self._naps_s[0]
        self._linger = Linger(
            linger_s=config.linger_ms / 1000, stream_linger_s=config.stream_linger_ms / 1000
        )
        self.flushed_lsn = confirmed_flush_lsn
        self.received_lsn = INVALID_LSN
        self.paused = False
        self._pace = StatusPace(status_interval_s, time.monotonic())
        self._flowing = self._quiet = False
        self._solicited_s = self._next_position_s = self._next_look_s = 0.0
        self._asked_s: float | None = None
        self.unsendable: Unsendable | None = None
        """What the server could not send: it has ended the stream."""

    def confirm(self, lsn: Lsn) -> None:
        """From the sequencer: what the server may forget."""
        if lsn > self.flushed_lsn:
            # In this order: the loop clears the mark before it reads the position.
            self.flushed_lsn = lsn
            self._pace.changed()

    def run(self, sending: SendingThread) -> None:
        """Read until ``stop`` is set. Raises ConnectionLost, ProtocolViolation, SlotLost and what buffers raise."""
        self._sending = sending
        with self._connection.reading():
            while not self._stop.is_set() and self.unsendable is None:
                if self._over_credit():
                    self._pause()
                    continue
                drained = self._read()
                if self.unsendable is None:
                    self._look(drained)
            if self.unsendable is not None:
                self._await_the_rest(self.unsendable)
                return
            self._send_status(time.monotonic(), reply=False)
        # In order, so that the server has surely read the last position: the next run starts from it.
        self._connection.stop(_STOP_TIMEOUT_S)

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
                error = self._connection.end_of_stream()
                if not isinstance(error, PoisonedChange):
                    raise error
                rest, self.unsendable = self._cutter.unsendable(error)
                self._give([*cuts, *rest, self.unsendable])
                return False
            elif outcome is Outcome.FAILED:
                raise self._connection.failure()
            if cuts:
                self._give(cuts)
                if outcome is Outcome.FULL or self._over_credit():
                    return False
        return False

    def _await_the_rest(self, unsendable: Unsendable) -> None:
        """Until all before it is delivered, and the run is stopped, or goes on behind it: nothing is read any more."""
        while not self._stop.is_set() and not 0 < unsendable.lsn < self.flushed_lsn:
            self._sending.check()
            self._sending.await_look(_IDLE_WAIT_S)

    def _look(self, drained: bool) -> None:
        """What is not done for each message. The socket is empty every few hundred of them: so this is done by the
        clock, not each time."""
        now_s = time.monotonic()
        if not self._flowing:
            self._nap_s = self._naps_s[0]
        if now_s < self._next_look_s:
            if drained and self._flowing:
                time.sleep(self._nap_s)
                self._nap_s = min(2 * self._nap_s, self._naps_s[1])
            elif drained:
                self._connection.wait_readable(self._next_look_s - now_s)
            return
        self._next_look_s = now_s + (_FLOWING_LOOK_INTERVAL_S if self._flowing else _LOOK_INTERVAL_S)
        self._quiet = self._quiet and drained
        self._sending.check()
        self._flush_lingering(now_s)
        if self._pace.is_due(now_s):
            self._send_status(now_s, reply=False)
        if drained:
            self._watch_notices()
            self._solicit_position(now_s)
            wait_s = _IDLE_WAIT_S
            if self._cutter.whole_bytes:
                wait_s = min(wait_s, self._config.linger_ms / 1000)
            self._quiet = not self._connection.wait_readable(wait_s)
            if self._quiet:
                self._fail_on_silence()

    def _flush_lingering(self, now_s: float) -> None:
        given, handed = self._sending.given_bytes, self._sending.handed_bytes
        whole_bytes = self._cutter.whole_bytes
        if self._linger.whole_is_due(now_s, whole_bytes, quiet=self._quiet, given=given, handed=handed):
            self._give(self._cutter.flush())
        if self._linger.open_is_due(now_s, self._cutter.has_open_rows):
            self._give(self._cutter.flush_open())

    def _give(self, cuts: Sequence[Cut]) -> None:
        if cuts:
            if self._connection.has_notices:
                self._watch_notices()
            self._sending.give(cuts)

    # -- credit ----------------------------------------------------------------------------------------

    def _over_credit(self) -> bool:
        sending, config = self._sending, self._config
        return (
            sending.in_flight_bytes + self._cutter.pending_bytes > config.reader_memory_bytes
            # What is queued may have ended: that is seen when it is handed over.
            or sending.backlog_bytes + sending.queued_bytes > config.backlog_bytes
        )

    def _pause(self) -> None:
        """Too much is under way: keep the connection alive, but do not read, until credit comes back."""
        self.paused = True
        self._asked_s = None  # nobody listens: silence means nothing
        self._sending.check()
        if not self._sending.in_flight_bytes:
            # What is over the limit is here, gathered: only cutting it can bring credit back.
            self._give(self._cutter.flush())
            self._give(self._cutter.flush_open())
        now_s = time.monotonic()
        if self._pace.is_due(now_s):
            self._send_status(now_s, reply=False)
        self._sending.await_look(_IDLE_WAIT_S)
        self.paused = self._over_credit()

    # -- the server ------------------------------------------------------------------------------------

    def _watch_notices(self) -> None:
        """Before what came after a notice is handed on: nothing behind a skipped publication may be confirmed."""
        for notice in self._connection.take_notices():
            if notice.skips_publication:
                # PostgreSQL 18 only warns, and leaves the publication's changes out of the stream for good.
                raise SlotLost(
                    f"slot {self._config.slot}: {notice.message}",
                    remedy="create the publication again; changes made meanwhile are missing: take a new snapshot",
                )

    def _keepalive(self, data: Any) -> None:
        keepalive = parse_keepalive(data)
        if self._connection.has_notices:
            self._watch_notices()
        now_s = time.monotonic()
        self.received_lsn = max(self.received_lsn, keepalive.end_lsn)
        if now_s >= self._next_position_s:
            self._give(self._cutter.position(keepalive.end_lsn))
            self._next_position_s = now_s + _POSITION_INTERVAL_S / 2
        if keepalive.reply_requested:
            self._pace.asked()
            if self._pace.is_due(now_s):
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
        if now_s - self._solicited_s >= interval_s:
            self._solicited_s = now_s
            self._asked_s = now_s if self._asked_s is None else self._asked_s
            self._send_status(now_s, reply=True)

    def _send_status(self, now_s: float, *, reply: bool) -> None:
        self._pace.sending()
        flushed = self.flushed_lsn
        received = max(self.received_lsn, self._sending.end_lsn, flushed)
        reach("sending_status")
        sent = self._connection.send_status(received, flushed, flushed, reply)
        reach("status_sent")
        self._pace.sent(now_s, taken=sent)
