"""The worked examples in modules' headers come out as the headers say."""

from __future__ import annotations

from tests.wire import Wire
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.exchange import Sealed, TransactionEnd
from xidstream.pipeline.mirror.plan import BaseFile, KeyRange, plan_swap
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.stream import Committed, PlainBlock, StreamCutter, StreamEvent, TransactionBlock
from xidstream.pipeline.transactions.sealed import transaction_row


def test_three_interleaved_transactions_leave_the_cutter_in_commit_order() -> None:
    """``stream.cutter``."""
    cutter, wire = StreamCutter(block_bytes=1 << 20, pending_limit_bytes=1 << 22, parallel=False), Wire()
    wire.start(740, first=True)
    wire.relation()
    for value in "abc":
        wire.insert(value)
    wire.stop()
    wire.start(750, first=True)
    wire.relation()
    wire.insert("d")
    wire.insert("e")
    wire.stop()
    wire.begin(760, 0x4000)
    wire.relation()
    wire.insert("f")
    wire.commit(0x4000)
    wire.start(740, first=False)
    wire.insert("g", subxid=741)
    wire.insert("h", subxid=741)
    wire.stop()
    wire.stream_abort(740, 741)
    wire.stream_commit(740, 0x5000)
    wire.stream_abort(750, 750)
    events: list[StreamEvent] = [event for data in wire.take() for event in cutter.feed(data)]
    plain, block, commit = events
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x4000
    assert isinstance(block, TransactionBlock) and (block.xid, len(block.block.lengths)) == (740, 5)
    assert isinstance(commit, Committed) and commit.aborted == (741,)


def test_three_commits_are_released_and_confirmed_in_order() -> None:
    """``commits.order``."""
    order = CommitOrder(batch_rows=1500, batch_bytes=1 << 20)
    for ticket, lsn in enumerate((0x100, 0x200, 0x300)):
        order.add_unit(ticket, Lsn(lsn), Lsn(lsn), Lsn(lsn + 8), 1)
    order.add_position(3, Lsn(0x380))
    order.content_arrived(1, _thousand_rows(0x200))
    order.content_arrived(2, _thousand_rows(0x300))
    assert order.next_batch() is None and order.confirmed_lsn == 0
    order.content_arrived(0, _thousand_rows(0x100))
    batches = [order.next_batch(), order.next_batch()]
    assert [batch and (batch.first_commit_lsn, batch.n_transactions) for batch in batches] == [
        (0x100, 1),
        (0x200, 1),
    ]
    order.batch_done(1)
    assert order.confirmed_lsn == 0
    order.batch_done(0)
    assert order.confirmed_lsn == 0x208
    last = order.next_batch()
    assert last is not None
    order.batch_done(last.number)
    assert order.confirmed_lsn == 0x380


def _thousand_rows(commit_lsn: int) -> Sealed:
    end = TransactionEnd(Xid(740), Lsn(commit_lsn), Lsn(commit_lsn + 8), 0)
    return Sealed(transaction_row(end, 1000, (), with_messages=False), (), (), (), 1000, 1000)


def test_a_snapshot_contains_what_had_ended_when_it_was_taken() -> None:
    """``snapshot.bounds``."""
    bounds = SnapshotBounds(Lsn(0x5006), Lsn(0x51FF), 740, 760, (740, 752), 0)
    asked = [(735, 0x4F00), (745, 0x5100), (752, 0x51A0), (740, 0x6000), (765, 0x5180), (745, 0x7000)]
    contained = [bounds.contains(Xid(xid), Lsn(lsn)) for xid, lsn in asked]
    assert contained == [True, True, False, False, False, False]


def test_a_refresh_replaces_the_touched_files_and_cuts_the_one_that_grew() -> None:
    """``mirror.plan``."""
    files = [BaseFile(f"f{low}", 1000, 1000, KeyRange((low,), (low + 999,))) for low in (1, 1001, 2001)]
    groups = plan_swap(files, {0: 1, 1: 1, 2: 10}, {0: 1, 2: 1210}, 1000)
    assert [(group.files, group.n_files) for group in groups] == [((0,), 1), ((1,), 1), ((2,), 3)]
    assert [group.files for group in plan_swap(files, {0: 1}, {0: 1}, 1000)] == [(0,)]
