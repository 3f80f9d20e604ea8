"""Where each event goes: blocks to buffers, ends of transactions to the sequencer, with tickets in stream order.

The reader's sender makes calls to actors of what is decided here, and tests call buffers and sequencer directly. It is
used from one thread. It also counts what has ended and is not in the sink yet.

A transaction's record leaves the ledger here, when its end is sent; one of which no block was cut never comes here.

The entries of one call go to the sequencer together, after the blocks: a transaction's last block and its commit are
one call to its buffer, whose result is there when all is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Xid
from xidstream.pipeline.stream import (
    Aborted,
    Committed,
    CommittedPrepared,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    StreamEvent,
    TransactionBlock,
    Unsendable,
)
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.ledger import TransactionLedger


@dataclass(frozen=True)
class OrderedEvent:
    """An event with its position in the commit order, the ``ticket``. ``result``: what its buffer returns, or an
    awaitable of it; None where none returns anything. A small block's content may be here from the start."""

    ticket: int
    event: StreamEvent
    result: Any = None

    @property
    def has_content(self) -> bool:
        """Whether its buffer returns the content of a unit. Its position in the order needs nothing else."""
        return self.result is not None and isinstance(self.event, (PlainBlock, Committed))


_End = TypeVar("_End", Committed, Prepared)


class Buffers(Protocol):
    """All buffers of a reader. Results are awaitables: a ``Sealed``, of ``prepare`` a ``PreparedTransaction``."""

    def add_block(self, event: TransactionBlock) -> None: ...

    def abort(self, xid: Xid) -> None: ...

    def decode_plain(self, event: PlainBlock, ticket: int) -> Any: ...

    def prepare(self, event: Prepared, ticket: int) -> Any: ...

    def commit(self, end: TransactionEnd, ticket: int, aborted: tuple[Xid, ...]) -> None: ...

    def send(self) -> None:
        """All that ``add_block`` and ``commit`` took since the last call."""

    def sealed(self, xid: Xid) -> Any:
        """The result of a transaction that was committed and sent. To be asked once."""


class EventRouter:
    """``submit`` takes entries of the commit order, in the order of their tickets."""

    def __init__(
        self,
        buffers: Buffers,
        submit: Callable[[list[OrderedEvent]], None],
        backlog: Backlog,
        ledger: TransactionLedger,
    ) -> None:
        self._ledger = ledger
        """All open transactions; an end takes its record out."""
        self._buffers = buffers
        """Take blocks, commits and prepares."""
        self._submit = submit
        """Gives entries to the sequencer."""
        self._backlog = backlog
        """Transactions that have ended and are not in the sink."""
        self._ticket = 0
        """The ticket of the next entry."""
        self.n_bytes = 0
        """Raw bytes sent since the start of the epoch."""
        self.end_lsn = INVALID_LSN
        """The end LSN of the last commit that was sent."""

    @property
    def backlog_bytes(self) -> int:
        return self._backlog.n_bytes

    def send(self, events: Iterable[StreamEvent]) -> None:
        """Events in stream order. Raises what the buffers and ``submit`` raise."""
        entries: list[OrderedEvent] = []
        for event in events:
            if isinstance(event, TransactionBlock):
                self.n_bytes += event.block.n_bytes
                self._ledger.of(event.xid).note(event)
                reach("giving_block")
                self._buffers.add_block(event)
                reach("block_given")
            elif isinstance(event, Aborted):
                self._buffers.abort(event.xid)
                self._ledger.remove(event.xid)
            else:
                entries.append(self._entry(event))
        self._buffers.send()
        if entries:
            self._submit([self._with_sealed(entry) for entry in entries])

    def _entry(self, event: StreamEvent) -> OrderedEvent:
        ticket = self._ticket
        self._ticket += 1
        if isinstance(event, PlainBlock):
            assert event.block is not None
            self.n_bytes += event.block.n_bytes
            self.end_lsn = max(self.end_lsn, event.end_lsn)
            self._backlog.owe(ticket, event.block.n_bytes)
            reach("giving_block")
            result = self._buffers.decode_plain(event, ticket)
            reach("block_given")
            # The sequencer needs the positions, not the bytes.
            return OrderedEvent(ticket, dataclasses.replace(event, block=None), result)
        if isinstance(event, Committed):
            self.end_lsn = max(self.end_lsn, event.end.end_lsn)
            if event.has_blocks:
                self._backlog.end(ticket, self._ledger.of(event.end.xid).n_bytes)
                self._buffers.commit(event.end, ticket, event.aborted)
            else:
                self._backlog.end(ticket, 0)
            return OrderedEvent(ticket, _without_aborted(event))
        if isinstance(event, Prepared):
            result = self._buffers.prepare(event, ticket)
            self._ledger.remove(event.xid)
            return OrderedEvent(ticket, _without_aborted(event), result)
        assert isinstance(event, (CommittedPrepared, RolledBackPrepared, Position, Unsendable)), event
        return OrderedEvent(ticket, event)

    def _with_sealed(self, entry: OrderedEvent) -> OrderedEvent:
        """With the result of a commit, which is there only when all is sent."""
        if not (isinstance(entry.event, Committed) and entry.event.has_blocks):
            return entry
        xid = entry.event.end.xid
        sealed = self._buffers.sealed(xid)
        self._ledger.remove(xid)
        return dataclasses.replace(entry, result=sealed)


def _without_aborted(event: _End) -> _End:
    """The event without its rolled-back subtransactions, which only the buffer needs."""
    return dataclasses.replace(event, aborted=()) if event.aborted else event
