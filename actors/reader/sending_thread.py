"""Sending on a thread of its own, so that the thread that reads never waits for Ray.

A block that goes into shared memory and to its buffer takes some 6 ms, in which a Unix socket, which holds the rows of
half a millisecond, is full, and the walsender waits. All that calls Ray (``Sender``, ``BufferPool``) belongs to this
thread from ``start`` to ``close``; the reading thread puts events into a queue, in stream order, and reads sums, each
written by one thread alone. What was raised here comes out of ``check`` there.

Bytes that wait in the queue count as in flight: they hold the reader's credit until their buffer has them.

Rejected: several threads, which would have to be kept in order; to put blocks into shared memory on a thread, and to
call buffers on the reading one, which would still stop for 2 ms a call.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence

from xidstream.actors.reader.buffer_pool import BufferPool
from xidstream.actors.reader.sender import Sender
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.stream import PlainBlock, StreamEvent, TransactionBlock

_LOOK_INTERVAL_S = 0.01
"""What has ended is asked of Ray by the clock: a question costs as much as reading a thousand rows."""
_IDLE_INTERVAL_S = 0.05
"""Where so little is in flight that nobody waits for its credit."""
_LITTLE_BYTES = 64 << 10
_TRICKLE_INTERVAL_S = 0.25
"""Where little waits for the sink, too: what has failed may be seen a moment later. What comes wakes this thread."""
_TRICKLE_BYTES = 1 << 20
_CLOSE_TIMEOUT_S = 3.0
_EVENT_BYTES = 8 << 10
"""An event's size beside its rows: its memory, and the calls to Ray that it is, which must not queue up without bound
where transactions have few rows or none."""

_JOINED_BYTES = 16 << 20
"""The sequencer hears of a commit when all that was joined with it is sent, which takes some 2 ms for 4 MiB."""


class SendingThread:
    """``done_ticket``: what no longer waits for the sink; whoever learns it sets it."""

    def __init__(self, sender: Sender, pool: BufferPool) -> None:
        self._sender = sender
        self._pool = pool
        self.done_ticket = -1
        """All entries up to this ticket are in the sink."""
        self.free_ticket = -1
        """All entries up to this ticket have left the memory of their buffers."""
        self._queue: queue.SimpleQueue[Sequence[StreamEvent] | None] = queue.SimpleQueue()
        """Cuts in stream order; None ends the thread."""
        self.submitted_bytes = self.sent_bytes = 0
        """Since the start: by the reading thread, and from here; each with what an event counts beside its rows."""
        self._next_look_s = 0.0
        """When calls in flight are looked at next, on the monotonic clock."""
        self._failure: BaseException | None = None
        """The first error of the thread; the reading thread raises it."""
        self._looked = threading.Event()
        """Set after each look, when credit may have come back."""
        self._thread = threading.Thread(target=self._run, name="sending", daemon=True)
        """The thread itself; it begins with ``start``."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Cuts that still wait are dropped: nothing of them was confirmed, so they come again."""
        self._failure = self._failure or ComponentLost("the sending thread is closed")
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    # -- the reading thread ----------------------------------------------------------------------------

    def submit(self, events: Sequence[StreamEvent]) -> None:
        """Queue events, in stream order. Their arrays are not the caller's any more."""
        self.submitted_bytes += _bytes_of(events)
        self._queue.put(events)

    @property
    def queued_bytes(self) -> int:
        """Submitted, and not yet sent."""
        return self.submitted_bytes - self.sent_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Submitted, and not yet decoded."""
        return self.queued_bytes + self._pool.in_flight_bytes

    @property
    def credit_bytes(self) -> int:
        """The bytes in flight, with those that each call takes besides its rows."""
        return self.in_flight_bytes + _EVENT_BYTES * self._pool.n_calls

    @property
    def backlog_bytes(self) -> int:
        """Ended, and not yet in the sink."""
        return self._sender.backlog_bytes

    @property
    def end_lsn(self) -> Lsn:
        """The end LSN of the last commit that was sent."""
        return self._sender.end_lsn

    def check(self) -> None:
        """Raise what a buffer, the sequencer or Ray raised."""
        if self._failure is not None:
            raise self._failure

    def await_look(self, timeout_s: float) -> None:
        """Until credit may have come back."""
        self._looked.wait(timeout_s)
        self._looked.clear()

    # -- this thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._failure is None:
                events = self._next()
                if events is None:
                    return
                if events:
                    self._sender.send(events)
                    self.sent_bytes += _bytes_of(events)
                    self._next_look_s = min(self._next_look_s, time.monotonic() + self._interval_s())
                self._look(idle=not events)
        except BaseException as error:  # noqa: BLE001
            # The reading thread raises it.
            self._failure = error
            self._looked.set()

    def _next(self) -> Sequence[StreamEvent] | None:
        """The waiting events, joined: blocks and commits that are sent together share calls."""
        events: list[StreamEvent] = []
        n_bytes = 0
        with contextlib.suppress(queue.Empty):
            while n_bytes < _JOINED_BYTES:
                timeout_s = max(0.0, self._next_look_s - time.monotonic())
                submitted = self._queue.get_nowait() if events else self._queue.get(timeout=timeout_s)
                if submitted is None:
                    return None
                events += submitted
                n_bytes += _bytes_of(submitted)
        return events

    def _look(self, *, idle: bool) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._sender.collect(self.done_ticket)
        self._pool.adapt()
        self._pool.fleet.check_alive(now_s)
        self._pool.fleet.done(self.free_ticket)
        if idle:
            self._pool.fleet.stop_idle()
        self._next_look_s = now_s + self._interval_s()
        self._looked.set()

    def _interval_s(self) -> float:
        """How long the next look waits."""
        if self._pool.in_flight_bytes >= _LITTLE_BYTES:
            return _LOOK_INTERVAL_S
        return _IDLE_INTERVAL_S if self._sender.backlog_bytes >= _TRICKLE_BYTES else _TRICKLE_INTERVAL_S


def _bytes_of(events: Sequence[StreamEvent]) -> int:
    blocks = [event.block for event in events if isinstance(event, (TransactionBlock, PlainBlock))]
    return _EVENT_BYTES * len(events) + sum(block.n_bytes for block in blocks if block is not None)
