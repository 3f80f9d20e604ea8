"""Sends the stream's events: ``pipeline.stream.event_router`` with the actors to which it routes.

It is a plain object inside the slot reader. ``SendingThread`` alone uses it. Errors of buffers and of the sequencer
come out of ``collect``.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Final

import ray

from xidstream.actors.reader.buffer_pool import BufferPool
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.event_router import EventRouter, OrderedEvent
from xidstream.pipeline.stream.ledger import TransactionLedger

_ASK_INTERVAL_S: Final = 1.0


class Sender(EventRouter):
    def __init__(self, pool: BufferPool, sequencer: Any, backlog: Backlog, ledger: TransactionLedger) -> None:
        super().__init__(pool, self._submit_to_actor, backlog, ledger)
        self._pool = pool
        self._sequencer = sequencer
        self._submitted: list[ray.ObjectRef] = []
        self._next_ask_s = 0.0

    def collect(self, done_ticket: int) -> None:
        """Collect results and credit; raises what a buffer or the sequencer raised."""
        self._pool.collect()
        self._backlog.done(done_ticket)
        now_s = time.monotonic()
        if self._backlog.is_more_than_counted and not self._submitted and now_s >= self._next_ask_s:
            # While reading is paused nothing is submitted, and the sequencer joins what waits.
            self._submit_to_actor([])
            self._next_ask_s = now_s + _ASK_INTERVAL_S
        if not self._submitted:
            return
        done, self._submitted = ray.wait(self._submitted, num_returns=len(self._submitted), timeout=0)
        if not done:
            return
        try:
            *_, measured_bytes = ray.get(done)
        except Exception as error:
            # A call that waited for a buffer fails with it, and the buffer's own word comes first.
            self._pool.collect()
            raise unwrap(error, "commit sequencer") from error
        self._backlog.measured(measured_bytes)

    def _submit_to_actor(self, entries: list[OrderedEvent]) -> None:
        if len(entries) == 1 and entries[0].has_content and isinstance(entries[0].result, ray.ObjectRef):
            # Ray makes the call when the content is there, and a small one goes with it. A reference inside of the
            # entry costs the sequencer questions to this process, for the value and for who still names it.
            (entry,) = entries
            call = self._sequencer.submit_with.remote(dataclasses.replace(entry, result=None), entry.result)
        else:
            call = self._sequencer.submit.remote(entries)
        self._submitted.append(call)
