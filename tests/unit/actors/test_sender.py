"""What the sender tells the sequencer, and what goes to a buffer in one call: no Ray."""

from __future__ import annotations

from typing import Any

import numpy as np

from xidstream.actors.reader.sender import Sender
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.stages.parcels import Parcel
from xidstream.pipeline.stream import (
    Aborted,
    Block,
    Committed,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    TransactionBlock,
    UsedRelations,
)
from xidstream.pipeline.stream.backlog import Backlog


class Pool:
    """``BufferPool`` without Ray: what a commit gives is known when it is sent, not before."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._committed: list[Xid] = []
        self._sealed: dict[Xid, str] = {}

    def add_block(self, cut: TransactionBlock) -> None:
        self.calls.append(f"block {cut.xid}")

    def abort(self, xid: Xid) -> None:
        self.calls.append(f"abort {xid}")

    def commit(self, end: TransactionEnd, ticket: int) -> None:
        self.calls.append(f"commit {end.xid} as {ticket}")
        self._committed.append(end.xid)

    def decode_plain(self, cut: PlainBlock, ticket: int) -> str:
        self.calls.append(f"plain as {ticket}")
        return f"plain {ticket}"

    def prepare(self, cut: Prepared, ticket: int) -> str:
        self.calls.append(f"prepare {cut.xid} as {ticket}")
        return f"prepared {cut.xid}"

    def send(self) -> None:
        self.calls.append("send")
        self._sealed.update((xid, f"sealed {xid}") for xid in self._committed)

    def sealed(self, xid: Xid) -> str:
        return self._sealed.pop(xid)


class Sequencer:
    """Of the actor, the one call that the sender makes."""

    def __init__(self) -> None:
        self.submitted: list[list[Any]] = []
        self.submit = self

    def remote(self, entries: list[Any]) -> None:
        self.submitted.append(entries)


def made() -> tuple[Sender, Any, Sequencer]:
    pool: Any = Pool()
    sequencer = Sequencer()
    return Sender(pool, sequencer, Backlog(1 << 20)), pool, sequencer


def block(n_bytes: int = 100) -> Block:
    return Block(np.zeros(n_bytes, np.uint8), np.array([n_bytes], np.int32), UsedRelations({}))


def rows(xid: int) -> TransactionBlock:
    return TransactionBlock(Xid(xid), block(), True, Lsn(1))


def end_of(xid: int, lsn: int) -> TransactionEnd:
    return TransactionEnd(Xid(xid), Lsn(lsn), Lsn(lsn + 8), 0, streamed=True)


def test_each_end_has_a_ticket_in_stream_order_and_what_its_buffer_gives() -> None:
    sender, pool, sequencer = made()
    prepared = Prepared(Xid(702), "g", Lsn(0x300), Lsn(0x308), True, None, True)
    cuts: list[Cut] = [
        rows(700),
        PlainBlock(block(), Lsn(0x100), Lsn(0x110), Lsn(0x118), 2),
        rows(701),
        Committed(end_of(700, 0x200), has_blocks=True),
        Aborted(Xid(701)),
        Committed(end_of(703, 0x280), has_blocks=False),
        prepared,
        Position(Lsn(0x400)),
    ]
    sender.send(cuts)
    (entries,) = sequencer.submitted
    assert [entry.ticket for entry in entries] == [0, 1, 2, 3, 4]
    assert [entry.result for entry in entries] == ["plain 0", "sealed 700", None, "prepared 702", None]
    assert pool.calls[-1] == "send" and "commit 703" not in " ".join(pool.calls)
    sender.send([Position(Lsn(0x500))])
    assert sequencer.submitted[1][0].ticket == 5


def test_the_sequencer_gets_the_positions_of_a_plain_block_and_not_its_bytes() -> None:
    sender, _, sequencer = made()
    sender.send([PlainBlock(block(1000), Lsn(0x100), Lsn(0x110), Lsn(0x118), 2)])
    cut = sequencer.submitted[0][0].cut
    assert (cut.block, cut.end_lsn, sender.n_bytes, sender.end_lsn) == (None, 0x118, 1000, 0x118)


def test_what_ended_counts_as_backlog_and_what_was_rolled_back_does_not() -> None:
    sender, _, sequencer = made()
    sender.send([rows(700), rows(701)])
    assert (sender.backlog_bytes, sequencer.submitted, sender.end_lsn) == (0, [], INVALID_LSN)
    sender.send([Aborted(Xid(700)), Committed(end_of(701, 0x200), has_blocks=True)])
    assert (sender.backlog_bytes, sender.n_bytes) == (100, 200)


def test_a_commit_in_a_parcel_stands_behind_the_blocks_that_came_before_it() -> None:
    parcel = Parcel()
    parcel.add_block(rows(700), 0)
    parcel.add_block(rows(700), 1)
    parcel.add_end(end_of(700, 0x200), 2)
    parcel.add_block(rows(701), 0)
    assert [(end.end.xid, end.step, end.n_blocks) for end in parcel.ends] == [(700, 2, 2)]
    assert [(head.xid, head.step) for head in parcel.heads] == [(700, 0), (700, 1), (701, 0)]
    assert parcel.n_bytes == 300
