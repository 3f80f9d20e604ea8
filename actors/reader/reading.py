"""The reader's loop: from the replication connection into the cutter, and what the server is told.

Rows go from libpq into the cutter's arrays in a compiled loop; what needs a look comes to ``StreamCutter.feed``. What a
message means is decided in ``pipeline.stream``; when to read, cut, rest and speak to the server, by ``ReadPolicy``
there. This shell reads sums, asks the policy, and performs its actions. The confirmed position comes from the sequencer
alone; nothing here derives one.

``run`` is called once, on a thread of its own. ``confirm`` and the attributes are for other threads, which only set or
read plain values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from xidstream.actors.reader.sending_thread import SendingThread
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.pgoutput.parser import parse_keepalive
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import StreamCutter, StreamEvent, Unsendable, read_policy
from xidstream.pipeline.stream.read_policy import Credit, Gathered, ReadPolicy, ReadStep

_XLOG_DATA = ord("w")
_CONTROLS_PER_LOOK = 1024
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
        self._loop = connection.copy_loop()
        self._policy = ReadPolicy(
            config, time.monotonic(), status_interval_s=status_interval_s, is_local=connection.is_local
        )
        self.flushed_lsn = confirmed_flush_lsn
        self.received_lsn = INVALID_LSN
        self.paused = False
        self._heard_s = time.monotonic()
        self.unsendable: Unsendable | None = None
        """What the server could not send: it has ended the stream."""

    def confirm(self, lsn: Lsn) -> None:
        """From the sequencer: what the server may forget."""
        if lsn > self.flushed_lsn:
            # In this order: a status clears the mark before it reads the position.
            self.flushed_lsn = lsn
            self._policy.position_changed()

    @property
    def paused_by(self) -> str | None:
        """The setting whose limit keeps it from reading; None while it reads."""
        return self._policy.exceeded(self._credit()) if self.paused else None

    @property
    def silent_s(self) -> float:
        """For how long the server has sent nothing."""
        return time.monotonic() - self._heard_s

    def run(self, sending: SendingThread) -> None:
        """Read until ``stop`` is set. Raises ConnectionLost, ProtocolViolation, SlotLost and what buffers raise."""
        self._sending = sending
        self._heard_s = time.monotonic()
        with self._connection.reading():
            while not self._stop.is_set() and self.unsendable is None:
                self.paused = self._policy.is_over_credit(self._credit())
                if self.paused:
                    self._sending.check()
                    now_s = time.monotonic()
                    self._perform(self._policy.pause(now_s, self._sending.in_flight_bytes), now_s)
                else:
                    self._read_and_look()
            if self.unsendable is not None:
                self._await_the_rest(self.unsendable)
                return
            self._send_status(time.monotonic(), reply=False)
        # In order, so that the server has surely read the last position: the next run starts from it.
        self._connection.stop(_STOP_TIMEOUT_S)

    def _read(self) -> tuple[bool, bool]:
        """Take in what the server has sent, up to the first events. Returns whether the socket had no more, and whether
        anything came."""
        cutter, loop, block_bytes = self._cutter, self._loop, self._config.block_bytes
        flowing = False
        for _ in range(_CONTROLS_PER_LOOK):
            target = cutter.target
            n_messages = target.n_messages
            outcome = loop.gather(target, block_bytes)
            flowing = flowing or target.n_messages != n_messages or outcome is not Outcome.DRAINED
            events = cutter.settle()
            if outcome is Outcome.DRAINED:
                return True, flowing
            if outcome is Outcome.MESSAGE:
                data = loop.pop_message()
                if data[0] == _XLOG_DATA:
                    events = [*events, *cutter.feed(data)]
                else:
                    self._keepalive(data)
            elif outcome is Outcome.ENDED:
                self._end(events)
                break
            elif outcome is Outcome.FAILED:
                raise self._connection.failure()
            if events:
                self._submit(events)
                if outcome is Outcome.FULL or self._policy.is_over_credit(self._credit()):
                    break
        return False, flowing

    def _end(self, events: Sequence[StreamEvent]) -> None:
        """The server ended the stream: raises why, where that is no transaction that it cannot send."""
        error = self._connection.end_of_stream()
        if not isinstance(error, PoisonedChange):
            raise error
        rest, self.unsendable = self._cutter.unsendable(error)
        self._submit([*events, *rest, self.unsendable])

    def _await_the_rest(self, unsendable: Unsendable) -> None:
        """Until all before it is delivered, and the run is stopped, or goes on after it: nothing is read any more."""
        while not self._stop.is_set() and not 0 < unsendable.lsn < self.flushed_lsn:
            self._sending.check()
            self._sending.await_look(read_policy.IDLE_WAIT_S)

    # -- asking the policy -----------------------------------------------------------------------------

    def _credit(self) -> Credit:
        sending = self._sending
        return Credit(
            self._cutter.pending_bytes, sending.credit_bytes, sending.queued_bytes, sending.backlog_bytes
        )

    def _read_and_look(self) -> None:
        drained, flowing = self._read()
        if self.unsendable is not None:
            return
        now_s = time.monotonic()
        if flowing:
            self._heard_s = now_s
        actions = self._policy.rest(now_s, drained=drained, flowing=flowing)
        if actions is None:
            self._sending.check()
            self._connection.check_notices()
            cutter, sending = self._cutter, self._sending
            gathered = Gathered(
                cutter.whole_bytes, cutter.has_open_rows, sending.submitted_bytes, sending.sent_bytes
            )
            actions = self._policy.look(now_s, gathered, drained=drained, flowing=flowing)
        self._perform(actions, now_s)

    def _keepalive(self, data: Any) -> None:
        keepalive = parse_keepalive(data)
        self._connection.check_notices()
        self.received_lsn = max(self.received_lsn, keepalive.end_lsn)
        now_s = time.monotonic()
        actions = self._policy.keepalive(now_s, keepalive.end_lsn, reply_requested=keepalive.reply_requested)
        self._perform(actions, now_s, keepalive.end_lsn)

    # -- performing ------------------------------------------------------------------------------------

    def _perform(
        self, actions: Iterable[read_policy.Action], now_s: float, position: Lsn = INVALID_LSN
    ) -> None:
        """``position``: the keepalive's, where there is one."""
        for action in actions:
            if isinstance(action, read_policy.Nap):
                time.sleep(action.seconds)
            elif isinstance(action, read_policy.Wait):
                self._connection.wait_readable(action.seconds)
            elif isinstance(action, read_policy.Listen):
                heard = self._connection.wait_readable(action.seconds)
                self._policy.listened(time.monotonic(), heard=heard)
            elif isinstance(action, read_policy.AwaitCredit):
                self._sending.await_look(action.seconds)
            elif action is ReadStep.CUT_WHOLE:
                self._submit(self._cutter.flush())
            elif action is ReadStep.CUT_OPEN:
                self._submit(self._cutter.flush_open())
            elif action is ReadStep.PASS_POSITION:
                self._submit(self._cutter.position(position))
            else:
                self._send_status(now_s, reply=action is ReadStep.ASK_POSITION)

    def _submit(self, events: Sequence[StreamEvent]) -> None:
        """Nothing after a skipped publication may be confirmed, so nothing of it is sent on."""
        if events:
            self._connection.check_notices()
            self._sending.submit(events)

    def _send_status(self, now_s: float, *, reply: bool) -> None:
        self._policy.sending_status()
        flushed = self.flushed_lsn
        received = max(self.received_lsn, self._sending.end_lsn, flushed)
        reach("sending_status")
        sent = self._connection.send_status(received, flushed, flushed, reply)
        reach("status_sent")
        self._policy.status_sent(now_s, taken=sent)
