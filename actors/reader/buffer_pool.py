"""The reader's buffers: starts them, gives blocks to the right one, counts what they have not finished.

A plain object inside the slot reader, which therefore owns every buffer: when the reader ends, they end. Once the
reader reads, the thread of ``SendingThread`` alone calls it; others read sums.
Which buffer takes what is decided by ``pipeline.buffer.BufferPoolPolicy``; where buffers run, by Ray's default policy:
it prefers the node of whoever asks, the reader's, where blocks are in shared memory already, until half of that node
is taken, then goes elsewhere, and asks the autoscaler where nothing is free. A soft NodeAffinity to the reader's node
was rejected: it waits for that node while it is full, though others are empty, so nothing would ever scale.

A buffer beyond the floor also asks for ``buffer_resource``, which a node type may have to be the one that is added for
buffers. What one transaction moves with, from one buffer to another, is what the first holds of it in memory, through
the object store, and the names of its segments; Ray's order of one caller's calls is what keeps its blocks in order.

Credit: a block counts as in flight until its buffer has decoded it and, where needed, spilled. The reader stops
reading while too much is. What a buffer raised comes out of ``collect``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray

from xidstream.actors.reader.buffer_quota import QuotaShare
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.xid_buffer import XidBuffer
from xidstream.pipeline.buffer import BufferPoolPolicy, KnownRelations
from xidstream.pipeline.config import Config
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Xid
from xidstream.pipeline.protocol.spares import Spares
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.stages.transaction_buffer import BlockHead, BufferSettings, End, Held, RawBlock
from xidstream.pipeline.stream import PlainBlock, Prepared, TransactionBlock

_INLINE_BYTES = 64 << 10
"""Below this what a call carries travels inside the call: the object store would cost more than it saves."""

_PARCEL_BLOCKS = 2
"""Full blocks that go in one call at most: two, because what several transactions left over is mostly more than one."""

_CHECK_INTERVAL_S = 1.0


@dataclass
class _Parcel:
    """Blocks and commits for one buffer, which go in one call. Each call costs Ray some milliseconds of CPU, here,
    there and in the raylet, and with many open transactions blocks are cut several at a time."""

    heads: list[BlockHead] = field(default_factory=list)
    versions: dict[int, RelationVersion] = field(default_factory=dict)
    blocks: list[RawBlock] = field(default_factory=list)
    n_bytes: int = 0
    ends: list[End] = field(default_factory=list)


class BufferPool:
    """Arrays of blocks that were sent go into ``spares``; ``share`` is there where several slots have one cap."""

    def __init__(
        self, config: Config, settings: BufferSettings, spares: Spares, share: QuotaShare | None = None
    ) -> None:
        self._settings = settings
        self._spares = spares
        self._config = config
        self._share = share
        maximum = config.buffers_max if share is None else config.buffers_min
        self._policy = BufferPoolPolicy(config.buffers_min, maximum, config.buffers_idle_s)
        self._actors: dict[int, Any] = {}
        self._starting: dict[int, ray.ObjectRef] = {}
        self._last_ticket: dict[int, int] = {}
        self._told: dict[int, KnownRelations] = {}
        self._in_flight: dict[ray.ObjectRef, int] = {}
        self._pings: dict[int, ray.ObjectRef] = {}
        self._next_check_s = 0.0
        self._leaving: list[tuple[int, Xid]] = []
        self._steps: dict[Xid, int] = {}
        self._parcels: dict[int, _Parcel] = {}
        self._sealed: dict[Xid, ray.ObjectRef] = {}
        self.in_flight_bytes = 0
        self.n_moved = 0
        self.open: dict[Xid, Held] = {}
        for number in self._policy.ask(time.monotonic()):
            self._start(number)

    def await_ready(self) -> None:
        """Until the buffers kept ready have loaded their kernels, so that no transaction waits for it."""
        ray.get(list(self._starting.values()))
        self._see_placed()

    def pids(self) -> list[int]:
        return list(ray.get([actor.pid.remote() for actor in list(self._actors.values())]))

    @property
    def n_buffers(self) -> int:
        """Those that work."""
        return self._policy.n_placed

    @property
    def n_asked(self) -> int:
        """Those that Ray has no process for yet."""
        return len(self._starting)

    # -- blocks and ends -------------------------------------------------------------------------------

    def add_block(self, cut: TransactionBlock) -> None:
        """On its way after ``send``, with others for the same buffer."""
        number = self._policy.assign(cut.xid, time.monotonic())
        self.open.setdefault(cut.xid, Held(cut.xid, 0, 0, 0))
        versions = cut.block.relations.versions
        head = BlockHead(cut.xid, self._step(cut.xid), cut.first_lsn, cut.streamed, tuple(versions))
        parcel = self._parcels.setdefault(number, _Parcel())
        parcel.heads.append(head)
        parcel.versions.update(versions)
        parcel.blocks.append((cut.block.payload, cut.block.lengths))
        parcel.n_bytes += cut.block.n_bytes
        if parcel.n_bytes >= _PARCEL_BLOCKS * self._config.block_bytes:
            self._send(number)

    def send(self) -> None:
        """All that ``add_block`` and ``commit`` took since the last call."""
        for number in list(self._parcels):
            self._send(number)

    def decode_plain(self, cut: PlainBlock, ticket: int) -> ray.ObjectRef:
        block = cut.block
        assert block is not None, "a plain block is handed over once"
        number = self._policy.for_plain_block()
        self._last_ticket[number] = ticket
        versions = block.relations.versions
        result: ray.ObjectRef = self._actors[number].decode_plain.remote(
            cut.n_transactions,
            tuple(versions),
            self._told[number].call(versions, versions),
            _by_store((block.payload, block.lengths), block.n_bytes),
        )
        self._spares.give(block.payload)
        self._count(result, block.n_bytes)
        return result

    def abort_subtransactions(self, xid: Xid, subxids: tuple[Xid, ...]) -> None:
        self._count(self._of(xid).abort_subtransactions.remote(xid, self._step(xid), subxids), 0)

    def abort(self, xid: Xid) -> None:
        self._count(self._of(xid).abort.remote(xid, self._steps[xid]), 0)
        self._leave(xid, -1)

    def commit(self, end: TransactionEnd, ticket: int) -> None:
        """On its way after ``send``, with others for the same buffer; then ``sealed`` has its result."""
        parcel = self._parcels.setdefault(self._owner(end.xid), _Parcel())
        parcel.ends.append(End(end, self._steps[end.xid], len(parcel.heads)))
        self._leave(end.xid, ticket)

    def sealed(self, xid: Xid) -> ray.ObjectRef:
        """What will be there of a transaction that was committed and sent: a ``Sealed``. To be asked once."""
        return self._sealed.pop(xid)

    def prepare(self, cut: Prepared, ticket: int) -> ray.ObjectRef:
        """Also for a transaction without a row: its record must be durable all the same."""
        number = self._policy.assign(cut.xid, time.monotonic())
        self._send(number)
        result = self._actors[number].prepare.remote(cut, self._steps.get(cut.xid, 0))
        self._leave(cut.xid, ticket)
        return result

    # -- what comes back -------------------------------------------------------------------------------

    def collect(self, timeout_s: float = 0.0) -> None:
        """Take the results that are there; raises what a buffer raised."""
        if not self._in_flight:
            return
        done, _ = ray.wait(
            list(self._in_flight), num_returns=len(self._in_flight), timeout=timeout_s, fetch_local=False
        )
        for ref in done:
            self.in_flight_bytes -= self._in_flight.pop(ref)
            try:
                result = ray.get(ref)
            except Exception as error:
                raise unwrap(error, "xid buffer") from error
            for held in result if isinstance(result, list) else [result]:
                if isinstance(held, Held) and held.xid in self.open:
                    self.open[held.xid] = held

    # -- how many --------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """Ask for the buffers that are wanted now, and let those that came take transactions over. Never waits."""
        self._see_placed()
        self.send()
        for move in self._policy.moves():
            carried = self._actors[move.source].give_up.remote(move.xid, self._steps[move.xid])
            self._count(self._actors[move.target].adopt.remote(carried), 0)
            self.n_moved += 1
        if self._share is not None:
            self._policy.allow(self._share.allowed(max(self._policy.n_needed, len(self._actors))))
        for number in self._policy.ask(time.monotonic()):
            self._start(number)

    def check_alive(self, now_s: float) -> None:
        """Notice a buffer that died with nothing in flight; raises ComponentLost for it."""
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        for number, ref in list(self._pings.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._pings[number]
                try:
                    ray.get(ref)
                except Exception as error:
                    raise unwrap(error, "xid buffer") from error
        for number, actor in self._actors.items():
            if number not in self._pings and number not in self._starting:
                self._pings[number] = actor.pid.remote()

    def give_back_idle(self, done_ticket: int) -> None:
        """End buffers that have had nothing to do for long, and whose rows the sink all holds."""
        now_s = time.monotonic()
        still: list[tuple[int, Xid]] = []
        for ticket, xid in self._leaving:
            if ticket <= done_ticket:
                self._policy.release(xid, now_s)
            else:
                still.append((ticket, xid))
        self._leaving = still
        busy = {n for n, ticket in self._last_ticket.items() if ticket > done_ticket}
        for number in self._policy.take_idle(now_s, busy):
            self._pings.pop(number, None)
            self._starting.pop(number, None)
            ray.kill(self._actors.pop(number))
            self._last_ticket.pop(number, None)
            del self._told[number]

    # -- inside ----------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        config = self._config
        beyond_floor = config.buffer_resource and number >= config.buffers_min
        actor = ray.remote(XidBuffer).options(
            num_cpus=config.buffer_cpus,
            resources={config.buffer_resource: 1} if beyond_floor else None,
            max_restarts=0,
        )
        self._actors[number] = actor.remote(self._settings)
        self._told[number] = KnownRelations()
        self._starting[number] = self._actors[number].pid.remote()

    def _see_placed(self) -> None:
        if not self._starting:
            return
        done, _ = ray.wait(list(self._starting.values()), num_returns=len(self._starting), timeout=0)
        for number in [n for n, ref in self._starting.items() if ref in done]:
            try:
                ray.get(self._starting.pop(number))
            except Exception as error:
                raise unwrap(error, "xid buffer") from error
            self._policy.placed(number, time.monotonic())

    def _of(self, xid: Xid) -> Any:
        """The transaction's buffer, with all that was added on its way: what is called now comes behind it."""
        number = self._owner(xid)
        self._send(number)
        return self._actors[number]

    def _owner(self, xid: Xid) -> int:
        number = self._policy.owner(xid)
        assert number is not None, f"transaction {int(xid)} has no buffer"
        return number

    def _send(self, number: int) -> None:
        parcel = self._parcels.pop(number, None)
        if parcel is None:
            return
        actor = self._actors[number]
        numbers = [each for head in parcel.heads for each in head.relations]
        untold = self._told[number].call(numbers, parcel.versions)
        blocks = _by_store(parcel.blocks, parcel.n_bytes)
        if not parcel.ends:
            held = actor.add_blocks.remote(parcel.heads, untold, blocks)
        else:
            add_and_commit = actor.add_and_commit.options(num_returns=len(parcel.ends) + 1)
            *sealed, held = add_and_commit.remote(parcel.heads, untold, blocks, parcel.ends)
            self._sealed.update(zip((each.end.xid for each in parcel.ends), sealed, strict=True))
        self._count(held, parcel.n_bytes)
        for payload, _ in parcel.blocks:
            # It was copied, into shared memory or into the call.
            self._spares.give(payload)

    def _step(self, xid: Xid) -> int:
        """How many calls a transaction's buffers got before this one: they fail where one is missing."""
        step = self._steps.get(xid, 0)
        self._steps[xid] = step + 1
        return step

    def _leave(self, xid: Xid, ticket: int) -> None:
        """The buffer is free for another transaction, but owns this one's rows until the sink holds them."""
        self.open.pop(xid, None)
        self._steps.pop(xid, None)
        self._policy.end(xid)
        self._leaving.append((ticket, xid))

    def _count(self, result: ray.ObjectRef, n_bytes: int) -> None:
        self._in_flight[result] = n_bytes
        self.in_flight_bytes += n_bytes


def _by_store(content: Any, n_bytes: int) -> Any:
    return ray.put(content) if n_bytes >= _INLINE_BYTES else content
