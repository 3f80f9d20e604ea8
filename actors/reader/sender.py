"""Sends what the reader cut: blocks to buffers, ends of transactions to the sequencer, with tickets in stream order.

It is a plain object inside the slot reader. ``SendingThread`` alone uses it. It also knows how many bytes have ended
and are not in the sink yet. Errors of buffers and of the sequencer come out of ``take_back``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

import ray

from xidstream.actors.commit_sequencer import Entry
from xidstream.actors.reader.buffer_pool import BufferPool
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.stream import (
    Aborted,
    Committed,
    CommittedPrepared,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    SubtransactionsAborted,
    TransactionBlock,
    Unsendable,
)
from xidstream.pipeline.stream.backlog import Backlog


class Sender:
    def __init__(self, pool: BufferPool, sequencer: Any, backlog: Backlog) -> None:
        self._pool = pool
        self._sequencer = sequencer
        self._backlog = backlog
        self._ticket = 0
        self._submitted: deque[ray.ObjectRef] = deque()
        self.n_bytes = 0
        """Raw bytes handed over since the start of the epoch."""
        self.end_lsn = INVALID_LSN
        """Of the last commit handed over."""

    @property
    def backlog_bytes(self) -> int:
        return self._backlog.n_bytes

    def give(self, cuts: Iterable[Cut]) -> None:
        entries: list[Entry] = []
        for cut in cuts:
            if isinstance(cut, TransactionBlock):
                self.n_bytes += cut.block.n_bytes
                self._backlog.add_block(cut.xid, cut.block.n_bytes)
                reach("giving_block")
                self._pool.add_block(cut)
                reach("block_given")
            elif isinstance(cut, SubtransactionsAborted):
                self._pool.abort_subtransactions(cut.xid, cut.subxids)
            elif isinstance(cut, Aborted):
                self._backlog.forget(cut.xid)
                self._pool.abort(cut.xid)
            else:
                entries.append(self._entry(cut))
        self._pool.send()
        for entry in entries:
            if isinstance(entry.cut, Committed) and entry.cut.has_blocks:
                entry.result.append(self._pool.sealed(entry.cut.end.xid))
        if entries:
            self._submitted.append(self._sequencer.submit.remote(entries))

    def take_back(self, done_ticket: int) -> None:
        """Collect results and credit; raises what a buffer or the sequencer raised."""
        self._pool.collect()
        self._backlog.done(done_ticket)
        while self._submitted and ray.wait([self._submitted[0]], timeout=0)[0]:
            try:
                ray.get(self._submitted.popleft())
            except Exception as error:
                raise unwrap(error, "commit sequencer") from error

    def _entry(self, cut: Cut) -> Entry:
        ticket = self._ticket
        self._ticket += 1
        if isinstance(cut, PlainBlock):
            assert cut.block is not None
            self.n_bytes += cut.block.n_bytes
            self.end_lsn = max(self.end_lsn, cut.end_lsn)
            self._backlog.owe(ticket, cut.block.n_bytes)
            reach("giving_block")
            result = self._pool.decode_plain(cut, ticket)
            reach("block_given")
            # The sequencer needs the positions, not the bytes.
            return Entry(ticket, dataclasses.replace(cut, block=None), [result])
        if isinstance(cut, Committed):
            self.end_lsn = max(self.end_lsn, cut.end.end_lsn)
            self._backlog.end(ticket, cut.end.xid)
            if cut.has_blocks:
                self._pool.commit(cut.end, ticket)  # its result is there when all is sent
            return Entry(ticket, cut, [])
        if isinstance(cut, Prepared):
            self._backlog.forget(cut.xid)
            return Entry(ticket, cut, [self._pool.prepare(cut, ticket)])
        assert isinstance(cut, (CommittedPrepared, RolledBackPrepared, Position, Unsendable)), cut
        return Entry(ticket, cut, [])
