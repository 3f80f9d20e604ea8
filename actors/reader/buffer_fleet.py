"""The reader's buffers as a fleet: starts them, sees them placed, checks that they live, ends those that are idle.

How many there should be, and which may go, is decided by ``pipeline.transactions.BufferPoolPolicy``; where buffers run,
by Ray's default policy: it prefers the node of whoever asks, the reader's, where blocks are in shared memory already,
until half of that node is taken, then goes elsewhere, and asks the autoscaler where nothing is free. A soft
NodeAffinity to the reader's node was rejected: it waits for that node while it is full, though others are empty, so
nothing would ever scale.

A buffer beyond the floor also asks for ``buffer_resource``, which a node type may have to be the one that is added for
buffers. Nothing here waits but ``await_ready`` and ``pids``. ``BufferPool`` owns the fleet.
"""

from __future__ import annotations

import contextlib
import time

import ray

from xidstream.actors.reader.buffer_handle import BufferHandle
from xidstream.actors.reader.buffer_quota import QuotaShare
from xidstream.pipeline.account.model import ProcessPart
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.transactions.buffer_calls import BufferSettings
from xidstream.pipeline.transactions.pool import BufferPoolPolicy

_CHECK_INTERVAL_S = 1.0
_PROCESS_ANSWER_S = 0.5


class BufferFleet:
    """``handles``: by the policy's numbers; ``share`` is there where several slots have one cap."""

    def __init__(
        self, config: Config, settings: BufferSettings, policy: BufferPoolPolicy, share: QuotaShare | None
    ) -> None:
        self._config = config
        self._settings = settings
        self._policy = policy
        self._share = share
        self._next_check_s = 0.0
        self.handles: dict[int, BufferHandle] = {}
        self.start_wanted()

    def await_ready(self) -> None:
        """Until the buffers kept ready have loaded their kernels, so that no transaction waits for it."""
        ray.get([buffer.ping for buffer in self._starting()])
        self.see_placed()

    # -- for any thread --------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        return list(ray.get([buffer.actor.pid.remote() for buffer in list(self.handles.values())]))

    def processes(self) -> list[ProcessPart]:
        """The buffers' processes. One that is busy with a block for too long answers nothing: its pid is unknown."""
        names = {number: f"xid buffer {number}" for number in sorted(self.handles)}
        asked = {}
        for number, name in names.items():
            buffer = self.handles.get(number)
            if buffer is not None and buffer.is_placed:
                asked[buffer.actor.process.remote(name)] = number
        refs = list(asked)
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_PROCESS_ANSWER_S) if refs else ([], [])
        parts = {number: ProcessPart(name, None, None, None) for number, name in names.items()}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # it has died: whoever watches it raises that
                parts[asked[ref]] = ray.get(ref)
        return list(parts.values())

    @property
    def n_buffers(self) -> int:
        """The number of buffers that work."""
        return self._policy.n_placed

    @property
    def n_asked(self) -> int:
        """The number of buffers that Ray has no process for yet."""
        return len(self._starting())

    # -- for the sending thread ------------------------------------------------------------------------

    def start_wanted(self) -> None:
        """Ask for the buffers that are wanted now."""
        config = self._config
        if self._share is not None:
            self._policy.allow(self._share.allowed(max(self._policy.n_needed, len(self.handles))))
        for number in self._policy.ask(time.monotonic()):
            resource = config.buffer_resource if number >= config.buffers_min else None
            self.handles[number] = BufferHandle(self._settings, cpus=config.buffer_cpus, resource=resource)

    def see_placed(self) -> None:
        """Tell the policy of buffers whose process is up. Raises ComponentLost where one could not be made."""
        refs = [buffer.ping for buffer in self._starting()]
        if not refs:
            return
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for number, buffer in self.handles.items():
            if not buffer.is_placed and buffer.ping in done:
                buffer.read_answer()
                self._policy.placed(number, time.monotonic())

    def check_alive(self, now_s: float) -> None:
        """Notice a buffer that died with nothing in flight; raises ComponentLost for it."""
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        for buffer in self.handles.values():
            if buffer.is_placed:
                buffer.check_alive()

    def done(self, done_ticket: int) -> None:
        """The sink holds the rows of everything up to this ticket."""
        self._policy.done(done_ticket, time.monotonic())

    def stop_idle(self) -> None:
        """End buffers that have had nothing to do for long, and whose rows the sink all holds."""
        for number in self._policy.remove_idle(time.monotonic()):
            self.handles.pop(number).kill()

    # -- inside ----------------------------------------------------------------------------------------

    def _starting(self) -> list[BufferHandle]:
        return [buffer for buffer in list(self.handles.values()) if not buffer.is_placed]
