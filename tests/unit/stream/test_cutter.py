"""What the cutter makes of each course that a stream can take; the wire is written by the writer."""

from __future__ import annotations

import pytest

from pipeline.errors import ColumnNameClash, IllegalTransition, MalformedMessage
from pipeline.pg import Lsn
from pipeline.stream import (
    Aborted,
    Committed,
    CommittedPrepared,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    StreamCutter,
    SubtransactionsAborted,
    TransactionBlock,
)
from tests.wire import Wire

HEADER = 25


def make_cutter(block_bytes: int = 1 << 20, pending: int = 1 << 22, parallel: bool = False) -> StreamCutter:
    return StreamCutter(block_bytes=block_bytes, pending_limit_bytes=pending, parallel=parallel)


def feed(cutter: StreamCutter, wire: Wire) -> list[Cut]:
    cuts: list[Cut] = []
    for data in wire.take():
        cuts += cutter.feed(data)
    return cuts


def kinds(cut: PlainBlock | TransactionBlock) -> str:
    """The type bytes in a block, in order."""
    payload, position, found = cut.block.payload.tobytes(), 0, ""
    for length in cut.block.lengths:
        found += chr(payload[position + HEADER])
        position += int(length)
    assert position == len(payload)
    return found


def test_small_transactions_share_one_plain_block_in_order() -> None:
    cutter, wire = make_cutter(), Wire()
    for n, commit_lsn in enumerate((0x5000, 0x6000, 0x7000)):
        wire.begin(700 + n, commit_lsn)
        if n == 0:
            wire.relation()
        wire.insert("x")
        wire.commit(commit_lsn)
    assert feed(cutter, wire) == []
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock)
    assert kinds(block) == "BIC" * 3
    assert (block.first_commit_lsn, block.last_commit_lsn, block.end_lsn) == (0x5000, 0x7000, 0x7004)
    assert block.n_transactions == 3
    assert block.block.relations.relations[1].name == "public.t"
    assert cutter.pending_bytes == 0 and cutter.flush() == ()


def test_flush_leaves_the_open_transaction_behind() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation()
    wire.insert("x")
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    wire.insert("y")
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and kinds(block) == "BIC"
    wire.commit(0x6000)
    feed(cutter, wire)
    (rest,) = cutter.flush()
    assert isinstance(rest, PlainBlock) and kinds(rest) == "BIC" and rest.first_commit_lsn == 0x6000


def test_plain_transaction_larger_than_a_block_goes_on_as_transaction_blocks() -> None:
    cutter, wire = make_cutter(block_bytes=400), Wire()
    wire.begin(700, 0x5000)
    wire.origin("upstream")
    wire.relation()
    for _ in range(30):
        wire.insert("0123456789")
    wire.commit(0x5000)
    *blocks, end = feed(cutter, wire)
    assert all(isinstance(b, TransactionBlock) and not b.streamed and b.xid == 700 for b in blocks)
    assert "".join(kinds(b) for b in blocks if isinstance(b, TransactionBlock)) == "I" * 30
    assert isinstance(end, Committed) and end.has_blocks
    assert end.end.origin == "upstream" and end.end.commit_lsn == 0x5000 and not end.end.streamed


def test_whole_transactions_before_a_large_one_are_cut_before_it() -> None:
    cutter, wire = make_cutter(block_bytes=400), Wire()
    wire.begin(700, 0x5000)
    wire.relation()
    wire.insert("x")
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    for _ in range(30):
        wire.insert("0123456789")
    wire.commit(0x6000)
    cuts = feed(cutter, wire)
    assert isinstance(cuts[0], PlainBlock) and cuts[0].last_commit_lsn == 0x5000
    assert isinstance(cuts[1], TransactionBlock) and isinstance(cuts[-1], Committed)


def test_interleaved_streams_keep_their_rows_apart_and_commit_in_order() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    wire.start(701, first=True)
    wire.relation()
    wire.insert("b")
    wire.insert("c")
    wire.stop()
    wire.start(700, first=False)
    wire.insert("d")
    wire.stop()
    wire.stream_commit(701, 0x5000)
    wire.stream_commit(700, 0x6000)
    first, end_of_first, second, end_of_second = feed(cutter, wire)
    assert (
        isinstance(first, TransactionBlock) and first.xid == 701 and kinds(first) == "II" and first.streamed
    )
    assert isinstance(end_of_first, Committed) and end_of_first.end.commit_lsn == 0x5000
    assert isinstance(second, TransactionBlock) and second.xid == 700 and kinds(second) == "II"
    assert isinstance(end_of_second, Committed) and end_of_second.end.streamed
    assert cutter.pending_bytes == 0 and cutter.open_transactions == 0


def test_subtransaction_aborts_are_told_once_at_the_end_and_cut_no_block() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a", subxid=700)
    wire.stop()
    for subxid in range(701, 801):
        wire.start(700, first=False)
        wire.insert("b", subxid=subxid)
        wire.stop()
        wire.stream_abort(700, subxid)
    wire.stream_commit(700, 0x5000)
    block, aborted, end = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and kinds(block) == "I" * 101
    assert isinstance(aborted, SubtransactionsAborted) and aborted.subxids == tuple(range(701, 801))
    assert isinstance(end, Committed)


def test_abort_of_a_stream_drops_what_was_gathered_and_tells_only_of_blocks_handed_on() -> None:
    cutter, wire = make_cutter(block_bytes=400), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("short")
    wire.stop()
    wire.stream_abort(700, 700)
    assert feed(cutter, wire) == []
    assert cutter.pending_bytes == 0
    wire.start(701, first=True)
    wire.relation()
    for _ in range(10):
        wire.insert("0123456789")
    wire.stop()
    wire.stream_abort(701, 701)
    *_, last = feed(cutter, wire)
    assert last == Aborted(701)  # type: ignore[arg-type]


def test_abort_of_an_unknown_transaction_is_nothing() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.stream_abort(999, 999)
    wire.stream_abort(999, 1000)
    assert feed(cutter, wire) == []


def test_stream_without_a_row_commits_with_no_block() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.stop()
    wire.stream_commit(700, 0x5000)
    (end,) = feed(cutter, wire)
    assert isinstance(end, Committed) and not end.has_blocks


def test_plain_block_of_earlier_commits_precedes_a_stream_commit() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    wire.begin(701, 0x5000)
    wire.relation()
    wire.insert("b")
    wire.commit(0x5000)
    wire.stream_commit(700, 0x6000)
    plain, block, end = feed(cutter, wire)
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x5000
    assert isinstance(block, TransactionBlock) and isinstance(end, Committed)


def test_relation_of_a_committed_stream_holds_for_plain_transactions_after_it() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.stop()
    wire.stream_commit(700, 0x5000)
    wire.begin(701, 0x6000)
    wire.insert("a", "b")
    wire.commit(0x6000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock)
    assert [c.name for c in block.block.relations.relations[1].columns] == ["a", "b"]


def test_relation_of_an_aborted_stream_never_holds() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(701, 0x5000)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.commit(0x5000)
    wire.start(700, first=True)
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.stop()
    wire.stream_abort(700, 700)
    wire.begin(702, 0x6000)
    wire.insert("a")
    wire.commit(0x6000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock)
    assert [c.name for c in block.block.relations.relations[1].columns] == ["a"]


def test_relation_of_a_stream_does_not_override_a_later_plain_one() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.stop()
    wire.begin(701, 0x5000)
    wire.relation(columns=("a", "later"))
    wire.insert("a", "b")
    wire.commit(0x5000)
    wire.stream_commit(700, 0x6000)
    wire.begin(702, 0x7000)
    wire.insert("a", "b")
    wire.commit(0x7000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock)
    assert [c.name for c in block.block.relations.relations[1].columns] == ["a", "later"]


def test_changed_relation_in_a_stream_cuts_the_block_so_that_each_row_has_its_own_schema() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.relation(columns=("a",))  # a repetition is no change
    wire.insert("a")
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.stop()
    wire.stream_commit(700, 0x5000)
    old, new, _ = feed(cutter, wire)
    assert isinstance(old, TransactionBlock) and kinds(old) == "II"
    assert len(old.block.relations.relations[1].columns) == 1
    assert isinstance(new, TransactionBlock) and kinds(new) == "I"
    assert len(new.block.relations.relations[1].columns) == 2


def test_changed_relation_inside_a_plain_transaction_promotes_it() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.commit(0x5000)
    old, new, end = feed(cutter, wire)
    assert isinstance(old, TransactionBlock) and len(old.block.relations.relations[1].columns) == 1
    assert isinstance(new, TransactionBlock) and len(new.block.relations.relations[1].columns) == 2
    assert isinstance(end, Committed) and end.end.xid == 700


def test_changed_relation_at_the_start_of_a_plain_transaction_only_cuts_what_was_before() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.commit(0x6000)
    (old,) = feed(cutter, wire)
    (new,) = cutter.flush()
    assert isinstance(old, PlainBlock) and len(old.block.relations.relations[1].columns) == 1
    assert isinstance(new, PlainBlock) and len(new.block.relations.relations[1].columns) == 2


def test_column_that_clashes_with_the_contract_stops_with_the_table_named() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(table="orders", columns=("a", "_SEQ"))
    with pytest.raises(ColumnNameClash, match=r"public\.orders.*_SEQ"):
        feed(cutter, wire)


def test_two_phase_transaction_is_prepared_then_committed_at_its_own_place() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin_prepare(700, "gid", 0x5000)
    wire.relation()
    wire.insert("a")
    wire.prepare(700, "gid", 0x5000)
    wire.begin(701, 0x6000)
    wire.relation()
    wire.insert("b")
    wire.commit(0x6000)
    wire.commit_prepared(700, "gid", 0x7000)
    block, prepared, plain, end = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and not block.streamed
    assert isinstance(prepared, Prepared) and prepared.has_blocks and prepared.end_lsn == 0x5004
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x6000
    assert isinstance(end, CommittedPrepared) and end.end.gid == "gid" and end.end.commit_lsn == 0x7000


def test_streamed_prepare_and_rollback_prepared() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    wire.stream_prepare(700, "gid", 0x5000)
    wire.rollback_prepared(700, "gid", 0x5004, 0x6000)
    block, prepared, rolled_back = feed(cutter, wire)
    assert isinstance(block, TransactionBlock)
    assert isinstance(prepared, Prepared) and prepared.streamed
    assert rolled_back == RolledBackPrepared(700, "gid", Lsn(0x5004), Lsn(0x6000))  # type: ignore[arg-type]


def test_acknowledged_prepare_that_is_streamed_again_is_dropped_at_its_commit_prepared() -> None:
    """Seen on 16.14 and 18.4 after a reconnect under memory pressure: S E … K, without a p."""
    cutter, wire = make_cutter(block_bytes=400), Wire()
    wire.start(700, first=True)
    wire.relation()
    for _ in range(10):
        wire.insert("0123456789")
    wire.stop()
    wire.commit_prepared(700, "gid", 0x7000)
    *blocks, aborted, end = feed(cutter, wire)
    assert blocks and all(isinstance(b, TransactionBlock) for b in blocks)
    assert aborted == Aborted(700)  # type: ignore[arg-type]
    assert isinstance(end, CommittedPrepared)
    assert cutter.pending_bytes == 0 and cutter.open_transactions == 0


def test_empty_prepare_has_no_block() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin_prepare(700, "gid", 0x5000)
    wire.prepare(700, "gid", 0x5000)
    (prepared,) = feed(cutter, wire)
    assert isinstance(prepared, Prepared) and not prepared.has_blocks


def test_prepare_without_its_begin_is_an_empty_one_behind_what_came_before() -> None:
    """PostgreSQL 18 sends it so for a transaction that only locked rows."""
    cutter, wire = make_cutter(), Wire()
    wire.begin(699, 0x4000)
    wire.commit(0x4000)
    wire.prepare(700, "gid", 0x5000)
    plain, prepared = feed(cutter, wire)
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x4000
    assert isinstance(prepared, Prepared) and not prepared.has_blocks and prepared.end_lsn == 0x5004


def test_prepare_without_its_begin_inside_a_stream_of_its_own_xid_is_illegal() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.stop()
    wire.prepare(700, "gid", 0x5000)
    with pytest.raises(IllegalTransition, match="a stream of this xid is open"):
        feed(cutter, wire)


def test_message_outside_transactions_keeps_its_place_and_confirms_nothing() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.message(b"hello", transactional=False)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and kinds(block) == "M"
    assert (block.first_commit_lsn, block.end_lsn, block.n_transactions) == (0, 0, 0)


def test_position_is_given_only_between_transactions_and_behind_what_was_gathered() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation()
    wire.insert("a")
    feed(cutter, wire)
    assert cutter.position(Lsn(0x4000)) == ()
    wire.commit(0x5000)
    feed(cutter, wire)
    block, position = cutter.position(Lsn(0x9000))
    assert isinstance(block, PlainBlock) and position == Position(Lsn(0x9000))


def test_open_stream_does_not_hold_the_position_back() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    feed(cutter, wire)
    assert cutter.position(Lsn(0x9000)) == (Position(Lsn(0x9000)),)


def test_gathered_streams_stay_under_the_limit_by_cutting_the_largest() -> None:
    cutter, wire = make_cutter(block_bytes=1 << 20, pending=2000), Wire()
    for xid in range(700, 720):
        wire.start(xid, first=True)
        wire.relation()
        for _ in range(5 if xid != 705 else 20):
            wire.insert("0123456789")
        wire.stop()
    cuts = feed(cutter, wire)
    assert cutter.pending_bytes <= 2000
    assert isinstance(cuts[0], TransactionBlock) and cuts[0].xid == 705


def test_open_rows_can_be_cut_before_their_end() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    feed(cutter, wire)
    assert cutter.has_open_rows
    (block,) = cutter.flush_open()
    assert isinstance(block, TransactionBlock) and not cutter.has_open_rows and cutter.pending_bytes == 0


@pytest.mark.parametrize(
    "course",
    [
        lambda w: w.insert("x"),
        lambda w: w.commit(0x5000),
        lambda w: w.stop(),
        lambda w: (w.begin(1, 0x5000), w.begin(2, 0x6000)),
        lambda w: (w.start(1, first=True), w.start(2, first=True)),
        lambda w: w.start(1, first=False),
        lambda w: w.stream_commit(1, 0x5000),
        lambda w: (w.start(1, first=True), w.commit(0x5000)),
        lambda w: w.message(b"", transactional=True),
        lambda w: w.origin("x"),
    ],
)
def test_message_out_of_place_is_refused(course) -> None:  # type: ignore[no-untyped-def]
    cutter, wire = make_cutter(), Wire()
    course(wire)
    with pytest.raises(IllegalTransition):
        feed(cutter, wire)


def test_unknown_message_names_its_lsn() -> None:
    cutter = make_cutter()
    data = b"w" + (0x16B3748).to_bytes(8, "big") + bytes(16) + b"?rest"
    with pytest.raises(MalformedMessage, match="0/16B3748"):
        cutter.feed(data)


def test_header_without_message_is_refused() -> None:
    with pytest.raises(IllegalTransition):
        make_cutter().feed(b"w" + bytes(24))
