"""Sends blocks and ends of transactions to the right buffer, and counts what is in flight.

A plain object inside the slot reader, which therefore owns every buffer: when the reader ends, they end. Once the
reader reads, the thread of ``SendingThread`` alone calls it; others read sums. Which buffer takes what is decided by
``pipeline.transactions.BufferPoolPolicy``; ``BufferFleet`` starts and ends buffers, and ``BufferHandle`` calls one of
them.

What one transaction moves with, from one buffer to another, is what the first holds of it in memory, through the
object store, and the names of its segments; Ray's order of one caller's calls is what keeps its blocks in order.

What a buffer raised comes out of ``collect``, ``adapt`` and ``BufferFleet.check_alive``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import ray

from xidstream.actors.reader.buffer_fleet import BufferFleet
from xidstream.actors.reader.buffer_handle import BufferHandle, held_of
from xidstream.actors.reader.buffer_quota import QuotaShare
from xidstream.actors.reader.in_flight import InFlight
from xidstream.actors.reader.small_blocks import SmallBlocks
from xidstream.pipeline.account.model import OpenPart, named
from xidstream.pipeline.exchange import Sealed, TransactionEnd
from xidstream.pipeline.pg import Xid
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import PlainBlock, Prepared, TransactionBlock
from xidstream.pipeline.transactions.buffer_calls import BufferedTransaction, BufferSettings
from xidstream.pipeline.transactions.pool import BufferPoolPolicy

_PARCEL_BLOCKS = 2
"""Full blocks that go in one call at most: two, because what several transactions left over is mostly more than one."""


@dataclass
class _Open:
    """An open transaction. ``held``: what its buffer last told; ``n_steps``: how many blocks its buffers got,
    which fail where one is missing. The rest is of the blocks that were sent, for the run's account."""

    held: BufferedTransaction
    n_steps: int = 0
    since_s: float = field(default_factory=time.monotonic)
    streamed: bool = True
    n_bytes: int = 0
    n_rolled_back: int = 0
    tables: set[str] = field(default_factory=set)
    """By name: the versions take what ``RelationBook`` bounds, and are not kept for longer than it keeps them."""

    def note(self, cut: TransactionBlock) -> None:
        self.streamed = cut.streamed
        self.n_bytes += cut.block.n_bytes
        self.n_rolled_back += len(cut.aborted)
        self.tables.update(version.name for version in cut.block.relations.versions.values())

    def next_step(self) -> int:
        self.n_steps += 1
        return self.n_steps - 1


class BufferPool:
    """Arrays of blocks that were sent go into ``spares``; ``share`` is there where several slots have one cap."""

    def __init__(
        self, config: Config, settings: BufferSettings, spares: Spares, share: QuotaShare | None = None
    ) -> None:
        self._parcel_bytes = _PARCEL_BLOCKS * config.block_bytes
        self._spares = spares
        maximum = config.buffers_max if share is None else config.buffers_min
        self._policy = BufferPoolPolicy(config.buffers_min, maximum, config.buffers_idle_s)
        self.fleet = BufferFleet(config, settings, self._policy, share)
        self._buffers = self.fleet.handles
        self._open: dict[Xid, _Open] = {}
        self._sealed: dict[Xid, ray.ObjectRef] = {}
        self._in_flight = InFlight()
        self._small_blocks = SmallBlocks(settings)
        self.n_moved = 0

    @property
    def in_flight_bytes(self) -> int:
        """Raw bytes that were sent and are not decoded."""
        return self._in_flight.n_bytes

    @property
    def n_calls(self) -> int:
        """Calls to buffers that have not returned."""
        return len(self._in_flight)

    @property
    def open_transactions(self) -> list[BufferedTransaction]:
        return [each.held for each in list(self._open.values())]

    def open_parts(self) -> list[OpenPart]:
        """One part for each open transaction, for the run's account. Any thread may ask."""
        return [self._part(each) for each in list(self._open.values())]

    def _part(self, each: _Open) -> OpenPart:
        held = each.held
        tables = set(each.tables)
        owner = self._policy.owner(held.xid)
        return OpenPart(
            xid=int(held.xid),
            age_s=round(time.monotonic() - each.since_s, 3),
            n_rows=held.n_rows,
            n_bytes=each.n_bytes,
            n_bytes_in_memory=held.n_bytes_in_memory,
            n_bytes_spilled=held.n_bytes_spilled,
            n_segments=held.n_segments,
            n_rolled_back_subtransactions=each.n_rolled_back,
            tables=named(tables),
            n_tables=len(tables),
            buffer=-1 if owner is None else owner,
            streamed=each.streamed,
        )

    # -- blocks and ends -------------------------------------------------------------------------------

    def add_block(self, cut: TransactionBlock) -> None:
        """On its way after ``send``, with others for the same buffer."""
        buffer = self._buffers[self._policy.assign(cut.xid)]
        transaction = self._open.get(cut.xid)
        if transaction is None:
            transaction = self._open[cut.xid] = _Open(BufferedTransaction(cut.xid, 0, 0, 0))
        transaction.note(cut)
        buffer.parcel.add_block(cut, transaction.next_step())
        if buffer.parcel.n_bytes >= self._parcel_bytes:
            self._send(buffer)

    def send(self) -> None:
        """All that ``add_block`` and ``commit`` took since the last call."""
        for buffer in self._buffers.values():
            self._send(buffer)

    def decode_plain(self, cut: PlainBlock, ticket: int) -> ray.ObjectRef | Sealed:
        """Its content, where it is so small that it was decoded here; else the reference to it."""
        block = cut.block
        assert block is not None, "a plain block is sent once"
        content = self._small_blocks.decode(block)
        if content is not None:
            self._spares.release(block.payload)
            return content
        sealed, ended = self._buffers[self._policy.for_plain_block(ticket)].decode_plain(block)
        self._spares.release(block.payload)
        self._in_flight.add(ended, block.n_bytes)
        return sealed

    def abort(self, xid: Xid) -> None:
        self._in_flight.add(self._of(xid).abort(xid, self._open[xid].n_steps))
        self._end(xid, -1)

    def commit(self, end: TransactionEnd, ticket: int, aborted: tuple[Xid, ...] = ()) -> None:
        """On its way after ``send``, after the blocks: ``sealed`` is what comes of it."""
        self._owner(end.xid).parcel.add_end(end, self._open[end.xid].n_steps, aborted)
        self._end(end.xid, ticket)

    def sealed(self, xid: Xid) -> ray.ObjectRef:
        """What will be there of a transaction that was committed and sent: a ``Sealed``. To be asked once."""
        return self._sealed.pop(xid)

    def prepare(self, cut: Prepared, ticket: int) -> ray.ObjectRef:
        """Also for a transaction without a row: its record must be durable all the same."""
        self._policy.assign(cut.xid)
        transaction = self._open.get(cut.xid)
        result = self._of(cut.xid).prepare(cut, 0 if transaction is None else transaction.n_steps)
        self._end(cut.xid, ticket)
        return result

    def collect(self, timeout_s: float = 0.0) -> None:
        """Take the results that are there; raises what a buffer raised."""
        for result in self._in_flight.collect(timeout_s):
            for held in held_of(result):
                if held.xid in self._open:
                    self._open[held.xid].held = held

    def adapt(self) -> None:
        """Ask for the buffers that are wanted now, and let those that came take transactions over. Never waits."""
        self.fleet.see_placed()
        self.send()
        for move in self._policy.moves():
            source, target = self._buffers[move.source], self._buffers[move.target]
            self._in_flight.add(source.move_to(target, move.xid, self._open[move.xid].n_steps))
            self.n_moved += 1
        self.fleet.start_wanted()

    # -- inside ----------------------------------------------------------------------------------------

    def _owner(self, xid: Xid) -> BufferHandle:
        number = self._policy.owner(xid)
        assert number is not None, f"transaction {int(xid)} has no buffer"
        return self._buffers[number]

    def _of(self, xid: Xid) -> BufferHandle:
        """The transaction's buffer, with all that was added on its way: what is called now comes after it."""
        buffer = self._owner(xid)
        self._send(buffer)
        return buffer

    def _send(self, buffer: BufferHandle) -> None:
        parcel, held, sealed = buffer.send()
        if held is None:
            return
        self._sealed.update(sealed)
        self._in_flight.add(held, parcel.n_bytes)
        for payload, _ in parcel.blocks:
            # It was copied, into shared memory or into the call.
            self._spares.release(payload)

    def _end(self, xid: Xid, ticket: int) -> None:
        """The buffer is free for another transaction, but has this one's rows until the sink holds them."""
        self._open.pop(xid, None)
        self._policy.end(xid, ticket)
