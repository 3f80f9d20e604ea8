"""Sends what the reader cut: ``pipeline.stages.cut_routing`` with the actors to which it routes.

It is a plain object inside the slot reader. ``SendingThread`` alone uses it. Errors of buffers and of the sequencer
come out of ``collect``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import ray

from xidstream.actors.reader.buffer_pool import BufferPool
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.stages.cut_routing import CutRouting, TicketedCut
from xidstream.pipeline.stream.backlog import Backlog


class Sender(CutRouting):
    def __init__(self, pool: BufferPool, sequencer: Any, backlog: Backlog) -> None:
        super().__init__(pool, self._submit_to_actor, backlog)
        self._pool = pool
        self._sequencer = sequencer
        self._submitted: deque[ray.ObjectRef] = deque()

    def collect(self, done_ticket: int) -> None:
        """Collect results and credit; raises what a buffer or the sequencer raised."""
        self._pool.collect()
        self._backlog.done(done_ticket)
        while self._submitted and ray.wait([self._submitted[0]], timeout=0)[0]:
            try:
                ray.get(self._submitted.popleft())
            except Exception as error:
                raise unwrap(error, "commit sequencer") from error

    def _submit_to_actor(self, entries: list[TicketedCut]) -> None:
        self._submitted.append(self._sequencer.submit.remote(entries))
