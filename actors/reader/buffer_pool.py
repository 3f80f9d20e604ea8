"""Sends blocks and ends of transactions to the right buffer, and counts what is in flight.

A plain object inside the slot reader, which therefore owns every buffer: when the reader ends, they end. Once the
reader reads, the thread of ``SendingThread`` alone calls it; others read sums. Which buffer takes what is decided by
``pipeline.transactions.BufferPoolPolicy``; ``BufferFleet`` starts and ends buffers, and ``BufferHandle`` calls one of
them.

When a transaction moves to another buffer, its rows in memory go through the object store; of its segments only the
names move. Ray keeps the calls of one caller in order, and so a transaction's blocks.

What is known of a transaction stands in its record in the reader's ledger, which ``EventRouter`` removes.

What a buffer raised comes out of ``collect``, ``adapt`` and ``BufferFleet.check_alive``.
"""

from __future__ import annotations

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
from xidstream.pipeline.stream.ledger import TransactionLedger, TransactionRecord
from xidstream.pipeline.transactions.buffer_calls import BufferSettings
from xidstream.pipeline.transactions.pool import BufferPoolPolicy

_CALL_BLOCKS = 2
"""Full blocks that go in one call at most: two, because what several transactions left over is mostly more than one."""


class BufferPool:
    """Arrays of blocks that were sent go into ``spares``; ``share`` is there where several slots have one cap."""

    def __init__(
        self,
        config: Config,
        settings: BufferSettings,
        spares: Spares,
        ledger: TransactionLedger,
        share: QuotaShare | None = None,
    ) -> None:
        self._ledger = ledger
        """What is known of each open transaction. This pool writes the half of the sending thread."""
        self._call_bytes = _CALL_BLOCKS * config.block_bytes
        self._spares = spares
        maximum = config.buffers_max if share is None else config.buffers_min
        self._policy = BufferPoolPolicy(config.buffers_min, maximum, config.buffers_idle_s)
        self.fleet = BufferFleet(config, settings, self._policy, share)
        self._buffers = self.fleet.handles
        self._in_flight = InFlight()
        """The calls to buffers that have not returned, with their raw bytes."""
        self._small_blocks = SmallBlocks(settings)
        self.n_moved = 0
        """How many transactions have changed their buffer."""

    @property
    def in_flight_bytes(self) -> int:
        """Raw bytes that were sent and are not decoded."""
        return self._in_flight.n_bytes

    @property
    def n_calls(self) -> int:
        """Calls to buffers that have not returned."""
        return len(self._in_flight)

    def open_records(self) -> list[TransactionRecord]:
        """The open transactions that buffers have. Any thread may ask."""
        return [record for record in self._ledger.records() if record.is_buffered]

    # -- blocks and ends -------------------------------------------------------------------------------

    def add_block(self, event: TransactionBlock) -> None:
        """On its way after ``send``, with others for the same buffer."""
        record = self._ledger.of(event.xid)
        buffer = self._buffers[self._policy.assign(record)]
        buffer.next_call.add_block(event, record.next_step())
        if buffer.next_call.n_bytes >= self._call_bytes:
            self._send(buffer)

    def send(self) -> None:
        """All that ``add_block`` and ``commit`` took since the last call."""
        for buffer in self._buffers.values():
            self._send(buffer)

    def decode_plain(self, event: PlainBlock, ticket: int) -> ray.ObjectRef | Sealed:
        """The block's content, where it is so small that it was decoded here; else the reference to it."""
        block = event.block
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
        record = self._ledger.of(xid)
        self._in_flight.add(self._of(record).abort(xid, record.n_steps))
        self._policy.end(record, -1)

    def commit(self, end: TransactionEnd, ticket: int, aborted: tuple[Xid, ...] = ()) -> None:
        """On its way after ``send``, after the blocks: ``sealed`` is what comes of it."""
        record = self._ledger.of(end.xid)
        self._owner(record).next_call.add_end(end, record.n_steps, aborted)
        self._policy.end(record, ticket)

    def sealed(self, xid: Xid) -> ray.ObjectRef:
        """What will be there of a transaction that was committed and sent: a ``Sealed``. To be asked once."""
        record = self._ledger.of(xid)
        sealed: ray.ObjectRef
        sealed, record.sealed = record.sealed, None
        return sealed

    def prepare(self, event: Prepared, ticket: int) -> ray.ObjectRef:
        """Also for a transaction without a row: its record must be durable all the same."""
        record = self._ledger.of(event.xid)
        self._policy.assign(record)
        result = self._of(record).prepare(event, record.n_steps)
        self._policy.end(record, ticket)
        return result

    def collect(self, timeout_s: float = 0.0) -> None:
        """Take the results that are there; raises what a buffer raised."""
        for result in self._in_flight.collect(timeout_s):
            for held in held_of(result):
                record = self._ledger.get(held.xid)
                if record is not None and record.is_buffered:
                    record.held = held

    def adapt(self) -> None:
        """Ask for the buffers that are wanted now, and let those that came take transactions over. Never waits."""
        self.fleet.see_placed()
        self.send()
        for move in self._policy.moves():
            source, target = self._buffers[move.source], self._buffers[move.target]
            self._in_flight.add(source.move_to(target, move.record.xid, move.record.n_steps))
            self.n_moved += 1
        self.fleet.start_wanted()

    # -- inside ----------------------------------------------------------------------------------------

    def _owner(self, record: TransactionRecord) -> BufferHandle:
        assert record.buffer is not None, f"transaction {int(record.xid)} has no buffer"
        return self._buffers[record.buffer]

    def _of(self, record: TransactionRecord) -> BufferHandle:
        """The transaction's buffer, with all that was added on its way: what is called now comes after it."""
        buffer = self._owner(record)
        self._send(buffer)
        return buffer

    def _send(self, buffer: BufferHandle) -> None:
        call, held, sealed = buffer.send()
        if held is None:
            return
        for xid, reference in sealed.items():
            self._ledger.of(xid).sealed = reference
        self._in_flight.add(held, call.n_bytes)
        for payload, _ in call.blocks:
            # It was copied, into shared memory or into the call.
            self._spares.release(payload)


def open_part(record: TransactionRecord, now_s: float) -> OpenPart:
    """An open transaction for the run's account. ``now_s``: of the monotonic clock. Any thread may ask."""
    held = record.held
    tables = record.tables.copy()
    return OpenPart(
        xid=int(record.xid),
        age_s=round(now_s - record.since_s, 3),
        n_rows=held.n_rows,
        n_bytes=record.n_bytes,
        n_bytes_in_memory=held.n_bytes_in_memory,
        n_bytes_spilled=held.n_bytes_spilled,
        n_segments=held.n_segments,
        n_rolled_back_subtransactions=record.n_rolled_back,
        tables=named(tables),
        n_tables=len(tables),
        buffer=-1 if record.buffer is None else record.buffer,
        streamed=record.streamed,
    )
