"""One buffer actor, as its reader sees it: its calls, what it was told, and whether it lives.

``BufferFleet`` has one for each buffer, and ``BufferPool`` calls it. Ray's order of one caller's calls is what keeps a
transaction's blocks in order, so all calls to an actor are made from here.
"""

from __future__ import annotations

from typing import Any

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.xid_buffer import XidBuffer
from xidstream.pipeline.exchange import BufferedTransaction
from xidstream.pipeline.pg import Xid
from xidstream.pipeline.stream import Block, Prepared
from xidstream.pipeline.transactions.buffer_calls import BufferCall, BufferSettings
from xidstream.pipeline.transactions.relation_cache import RelationCache

_INLINE_BYTES = 64 << 10
"""Below this what a call carries travels inside the call: the object store would cost more than it saves."""


class BufferHandle:
    """Starting it does not wait. ``is_placed``: its process is up; ``next_call``: what goes with the next ``send``."""

    def __init__(self, settings: BufferSettings, *, cpus: float, resource: str | None) -> None:
        """``resource``: a custom resource of Ray's of which it asks for one, beside the CPUs."""
        resources = {resource: 1} if resource else None
        buffer: Any = ray.remote(XidBuffer).options(num_cpus=cpus, resources=resources, max_restarts=0)
        self.actor = buffer.remote(settings)
        self.next_call = BufferCall()
        self.is_placed = False
        self.ping: Any = self.actor.pid.remote()
        """The reference to an answer that is on its way, or None. The first one says that the buffer is placed."""
        self._relation_cache = RelationCache()

    # -- calls -----------------------------------------------------------------------------------------

    def send(self) -> tuple[BufferCall, ray.ObjectRef | None, dict[Xid, ray.ObjectRef]]:
        """Make the call. Returns it; the reference to its result, None where it was empty; and those to the ``Sealed``
        of each commit in it."""
        call, self.next_call = self.next_call, BufferCall()
        if not call.heads and not call.ends:
            return call, None, {}
        new_versions = self._relation_cache.exchange(call.relation_numbers(), call.versions)
        blocks = _by_store(call.blocks, call.n_bytes)
        if not call.ends:
            return call, self.actor.add_blocks.remote(call.heads, new_versions, blocks), {}
        add_and_commit = self.actor.add_and_commit.options(num_returns=len(call.ends) + 1)
        *sealed, held = add_and_commit.remote(call.heads, new_versions, blocks, call.ends)
        return call, held, dict(zip((each.end.xid for each in call.ends), sealed, strict=True))

    def decode_plain(self, block: Block) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """``block`` is of whole small transactions. Returns the references to its ``Sealed``, and to the end of the
        call."""
        versions = block.relations.versions
        sealed, ended = self.actor.decode_and_tell.options(num_returns=2).remote(
            tuple(versions),
            self._relation_cache.exchange(versions, versions),
            _by_store((block.payload, block.lengths), block.n_bytes),
        )
        return sealed, ended

    def abort(self, xid: Xid, step: int) -> ray.ObjectRef:
        result: ray.ObjectRef = self.actor.abort.remote(xid, step)
        return result

    def prepare(self, event: Prepared, step: int) -> ray.ObjectRef:
        result: ray.ObjectRef = self.actor.prepare.remote(event, step)
        return result

    def move_to(self, target: BufferHandle, xid: Xid, step: int) -> ray.ObjectRef:
        """Give a transaction up, and let ``target`` go on with it."""
        result: ray.ObjectRef = target.actor.adopt.remote(self.actor.give_up.remote(xid, step))
        return result

    # -- life ------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise what the last ping brought, if it is there: ComponentLost where the actor died; and send the next."""
        if self.ping is not None and ray.wait([self.ping], timeout=0)[0]:
            self.read_answer()
        if self.ping is None:
            self.ping = self.actor.pid.remote()

    def read_answer(self) -> None:
        """Read the answer to a ping."""
        ping, self.ping = self.ping, None
        try:
            ray.get(ping)
        except Exception as error:
            raise unwrap(error, "xid buffer") from error
        self.is_placed = True

    def kill(self) -> None:
        ray.kill(self.actor)


def held_of(result: Any) -> list[BufferedTransaction]:
    """The sizes of the transactions of one call, as the call returned them."""
    return [
        held
        for held in (result if isinstance(result, list) else [result])
        if isinstance(held, BufferedTransaction)
    ]


def _by_store(content: Any, n_bytes: int) -> Any:
    return ray.put(content) if n_bytes >= _INLINE_BYTES else content
