"""Where events go, in which order, and what counts as not in the sink yet."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.stream import (
    Aborted,
    Block,
    Committed,
    PlainBlock,
    Position,
    Prepared,
    StreamEvent,
    TransactionBlock,
    UsedRelations,
)
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.event_router import EventRouter, OrderedEvent
from xidstream.pipeline.stream.ledger import TransactionLedger

XID = Xid(700)


class Calls:
    """Writes down what is called, buffers and sequencer alike."""

    def __init__(self, held_limit_bytes: int = 1000) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.entries: list[OrderedEvent] = []
        self.backlog = Backlog(held_limit_bytes, unit_bytes=0, joined_bytes=0)
        self.ledger = TransactionLedger()
        self.router = EventRouter(self, self._submit, self.backlog, self.ledger)

    def add_block(self, event: TransactionBlock) -> None:
        self.log.append(("add_block", event.xid))

    def abort(self, xid: Xid) -> None:
        self.log.append(("abort", xid))

    def decode_plain(self, event: PlainBlock, ticket: int) -> Any:
        assert event.block is not None
        self.log.append(("decode_plain", ticket))
        return f"plain {ticket}"

    def prepare(self, event: Prepared, ticket: int) -> Any:
        self.log.append(("prepare", ticket))
        return f"prepared {ticket}"

    def commit(self, end: TransactionEnd, ticket: int, aborted: tuple[Xid, ...]) -> None:
        self.log.append(("commit", ticket, *aborted))

    def send(self) -> None:
        self.log.append(("send",))

    def sealed(self, xid: Xid) -> Any:
        assert self.log[-1] == ("send",), "the result is there when all is sent"
        return f"sealed {xid}"

    def _submit(self, entries: list[OrderedEvent]) -> None:
        self.entries += entries


def block(n_bytes: int = 100) -> Block:
    return Block(np.zeros(n_bytes, np.uint8), np.array([n_bytes], np.int32), UsedRelations({}))


def committed(*, has_blocks: bool = True) -> Committed:
    return Committed(TransactionEnd(XID, Lsn(0x200), Lsn(0x208), 0, streamed=True), has_blocks)


def test_blocks_go_to_buffers_and_ends_to_the_sequencer_with_tickets_in_stream_order() -> None:
    calls = Calls()
    calls.router.send(
        [
            TransactionBlock(XID, block(), True, Lsn(0x100)),
            PlainBlock(block(), Lsn(0x110), Lsn(0x120), Lsn(0x128), 3),
            dataclasses.replace(committed(), aborted=(Xid(701),)),
            Position(Lsn(0x300)),
        ]
    )
    calls.router.send([Prepared(Xid(702), "g", Lsn(0x310), Lsn(0x318), True, None, True)])
    assert calls.log == [
        ("add_block", XID),
        ("decode_plain", 0),
        ("commit", 1, 701),
        ("send",),
        ("prepare", 3),
        ("send",),
    ]
    assert [entry.ticket for entry in calls.entries] == [0, 1, 2, 3]
    assert [entry.result for entry in calls.entries] == ["plain 0", "sealed 700", None, "prepared 3"]
    assert calls.entries[1].event == committed(), "what was rolled back is the buffer's to know"
    assert calls.router.end_lsn == 0x208


def test_the_sequencer_gets_the_positions_of_a_plain_block_and_not_its_bytes() -> None:
    calls = Calls()
    calls.router.send([PlainBlock(block(), Lsn(0x110), Lsn(0x120), Lsn(0x128), 3)])
    event: StreamEvent = calls.entries[0].event
    assert isinstance(event, PlainBlock) and event.block is None and event.last_commit_lsn == 0x120


def test_a_commit_of_a_stream_without_rows_asks_no_buffer() -> None:
    calls = Calls()
    calls.router.send([committed(has_blocks=False)])
    assert calls.log == [("send",)] and calls.entries[0].result is None


def test_what_is_open_counts_for_nothing_until_it_commits_and_then_until_the_sink_has_it() -> None:
    calls = Calls(held_limit_bytes=150)
    blocks: list[StreamEvent] = [TransactionBlock(XID, block(), True, Lsn(0x100)) for _ in range(2)]
    calls.router.send([*blocks, TransactionBlock(Xid(701), block(), True, Lsn(0x100)), Aborted(Xid(701))])
    assert (calls.router.n_bytes, calls.router.backlog_bytes) == (300, 0)
    calls.router.send([committed(), PlainBlock(block(30), Lsn(0x210), Lsn(0x220), Lsn(0x228), 1)])
    assert calls.router.backlog_bytes == 150 + 30, "a transaction keeps no more in memory than its buffer may"
    calls.backlog.done(0)
    assert calls.router.backlog_bytes == 30


def test_a_transaction_that_was_rolled_back_or_prepared_leaves_nothing_to_count_when_its_xid_comes_again() -> (
    None
):
    calls = Calls()
    blocks: list[StreamEvent] = [TransactionBlock(XID, block(70), True, Lsn(0x100))]
    for end in (Aborted(XID), Prepared(XID, "g", Lsn(0x110), Lsn(0x118), True, None, True)):
        calls.router.send([*blocks, end])
        assert calls.ledger.records() == []
    calls.router.send([committed(has_blocks=False)])
    assert calls.router.backlog_bytes == 0


def test_a_committed_transaction_leaves_nothing_to_count_when_its_xid_comes_again() -> None:
    calls = Calls()
    for n_bytes in (70, 5):
        calls.router.send([TransactionBlock(XID, block(n_bytes), True, Lsn(0x100))])
        calls.router.send([committed()])
        assert calls.router.backlog_bytes == n_bytes and calls.ledger.records() == []
        calls.backlog.done(0)
