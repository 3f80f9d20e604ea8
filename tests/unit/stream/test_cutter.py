"""What the cutter makes of each course that a stream can take; the wire is written by the writer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_libpq import Server, events_of
from tests.pgoutput.messages import Truncate
from tests.wire import T0_US, Wire
from xidstream.pipeline.errors import IllegalTransition, MalformedMessage, PoisonedChange
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamStart,
    StreamStop,
    Type,
)
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream import (
    Aborted,
    Committed,
    CommittedPrepared,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    StreamCutter,
    StreamEvent,
    TransactionBlock,
)
from xidstream.pipeline.stream.pending import PendingMessages

HEADER = 25


def make_cutter(block_bytes: int = 1 << 20, pending: int = 1 << 22, parallel: bool = False) -> StreamCutter:
    return StreamCutter(block_bytes=block_bytes, pending_limit_bytes=pending, parallel=parallel)


Feed = Callable[[StreamCutter, Wire], list[StreamEvent]]


def feed_each(cutter: StreamCutter, wire: Wire) -> list[StreamEvent]:
    return [event for data in wire.take() for event in cutter.feed(data)]


def feed_by_loop(cutter: StreamCutter, wire: Wire) -> list[StreamEvent]:
    return [event for events in events_of(cutter, wire.take(), cutter._block_bytes) for event in events]


@pytest.fixture(params=[feed_each, feed_by_loop], ids=["message-by-message", "compiled-loop"])
def feed(request: pytest.FixtureRequest) -> Feed:
    """Every course is taken both ways that a stream may come: they must not differ."""
    return request.param  # type: ignore[no-any-return]


def kinds(event: PlainBlock | TransactionBlock) -> str:
    """The type bytes in a block, in order."""
    payload, position, found = event.block.payload.tobytes(), 0, ""
    for length in event.block.lengths:
        found += chr(payload[position + HEADER])
        position += int(length)
    assert position == len(payload)
    return found


def test_small_transactions_share_one_plain_block_in_order(feed: Feed) -> None:
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


@pytest.mark.parametrize(("block_bytes", "n"), [(388, 4), (300, 3)], ids=["by-a-commit", "by-a-begin"])
def test_a_block_that_becomes_full_takes_the_whole_transactions_along(
    feed: Feed, block_bytes: int, n: int
) -> None:
    """A BEGIN has 46 bytes here and a COMMIT 51: the fourth COMMIT makes 388, the fourth BEGIN 337."""
    cutter, wire = make_cutter(block_bytes=block_bytes), Wire()
    events: list[StreamEvent] = []
    for i in range(2 * n + 1):
        wire.begin(700 + i, 0x5000 + 0x100 * i)
        wire.commit(0x5000 + 0x100 * i)
        events += feed(cutter, wire)
        filled_at = i + 1 if block_bytes == 388 else i
        assert len(events) == filled_at // n, "at once, and not with the next message"
    assert [isinstance(event, PlainBlock) and kinds(event) for event in events] == ["BC" * n] * 2
    assert cutter.whole_bytes == cutter.pending_bytes == 46 + 51


def test_rows_and_the_ends_of_small_transactions_need_no_look() -> None:
    """What a look costs is paid for R, S and E alone."""
    cutter, wire = make_cutter(), Wire()
    for first in (True, False):
        wire.start(700, first=first)
        wire.insert("a")
        wire.insert("b")
        wire.stop()
        wire.begin(701, 0x5000)
        wire.insert("c")
        wire.commit(0x5000)
    loop, looked_at = Server(wire.take()).loop, ""
    while loop.gather(cutter.target, 1 << 20) is Outcome.MESSAGE:
        assert not cutter.settle()
        data = loop.pop_message()
        looked_at += chr(data[HEADER])
        assert not cutter.feed(data)
    cutter.settle()
    assert looked_at == "SESE"
    assert [kinds(event) for event in (*cutter.flush(), *cutter.flush_open())] == ["BIC" * 2, "I" * 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("n_bytes_left", [0, 50])
def test_a_commit_that_finds_no_room_ends_its_transaction_all_the_same(feed: Feed, n_bytes_left: int) -> None:
    cutter, wire = make_cutter(), Wire()
    capacity = len(cutter.target.payload)
    wire.begin(700, 0x5000)
    wire.insert("")
    n_bytes = sum(map(len, wire.out))
    wire.out.pop()
    wire.insert("x" * (capacity - n_bytes - n_bytes_left))
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    wire.commit(0x6000)
    wire.insert("outside")
    with pytest.raises(IllegalTransition):
        feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and kinds(block) == "BICBC" and block.n_transactions == 2


def test_a_large_beginning_moves_whole_when_its_transaction_is_promoted(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(columns=("a",))
    wire.insert("x" * 200_000)
    wire.insert("y")
    wire.relation(columns=("a", "b"))
    wire.insert("z", "z")
    wire.commit(0x5000)
    old, new, _ = feed(cutter, wire)
    assert isinstance(old, TransactionBlock) and kinds(old) == "II" and old.block.n_bytes > 200_000
    assert isinstance(new, TransactionBlock) and kinds(new) == "I"


@pytest.mark.parametrize("n", [1, 2, 40])
def test_messages_before_the_first_transaction_of_a_block_do_not_hide_its_begin(feed: Feed, n: int) -> None:
    cutter, wire = make_cutter(), Wire()
    for _ in range(n):
        wire.message(b"before", transactional=False)
    wire.begin(700, 0x5000)
    wire.commit(0x5000)
    wire.message(b"behind", transactional=False)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and kinds(block) == "M" * n + "BCM"
    assert (block.first_commit_lsn, block.last_commit_lsn, block.n_transactions) == (0x5000, 0x5000, 1)


def test_all_that_is_gathered_counts_as_pending_wherever_it_stands(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    expected = 0

    def gathered(*messages: Callable[[], object], controls: int = 0) -> None:
        """The last ``controls`` messages are not gathered."""
        nonlocal expected
        for message in messages:
            message()
        expected += sum(len(data) for data in wire.out[: len(wire.out) - controls])
        assert feed(cutter, wire) == [] and cutter.pending_bytes == expected

    gathered(lambda: wire.begin(700, 0x5000))
    gathered(lambda: wire.insert("a"), lambda: wire.commit(0x5000))
    assert cutter.whole_bytes == expected and not cutter.has_open_rows
    gathered(lambda: wire.start(701, first=True), controls=1)
    gathered(lambda: wire.insert("b"))
    assert (cutter.has_open_rows, cutter.open_transactions) == (True, 1)
    gathered(wire.stop, controls=1)
    gathered(lambda: wire.start(702, first=True), controls=1)
    gathered(lambda: wire.insert("c"), lambda: wire.insert("d"), wire.stop, controls=1)
    gathered(lambda: wire.start(701, first=False), controls=1)
    gathered(lambda: wire.insert("e"))
    gathered(wire.stop, controls=1)
    assert cutter.open_transactions == 2


def test_gathered_bytes_may_be_asked_for_by_another_thread_while_a_transaction_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cutter = make_cutter()
    looks = [None, PendingMessages(Spares(0), Xid(740), Lsn(1))]
    monkeypatch.setattr(StreamCutter, "_current", property(lambda _: looks.pop()), raising=False)
    assert cutter.pending_bytes == 0 and looks == [None]


def test_rows_of_a_transaction_to_be_prepared_are_open_rows_too(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin_prepare(700, "gid", 0x5000)
    assert feed(cutter, wire) == []
    assert (cutter.has_open_rows, cutter.open_transactions, cutter.pending_bytes) == (False, 1, 0)
    wire.insert("a")
    n_bytes = len(wire.out[0])
    assert feed(cutter, wire) == []
    assert (cutter.has_open_rows, cutter.open_transactions, cutter.pending_bytes) == (True, 1, n_bytes)
    (block,) = cutter.flush_open()
    assert isinstance(block, TransactionBlock) and not block.streamed and cutter.pending_bytes == 0
    wire.prepare(700, "gid", 0x5000)
    (prepared,) = feed(cutter, wire)
    assert isinstance(prepared, Prepared) and prepared.has_blocks
    assert (cutter.has_open_rows, cutter.open_transactions) == (False, 0)


def test_flush_leaves_the_open_transaction_behind(feed: Feed) -> None:
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


def test_plain_transaction_larger_than_a_block_goes_on_as_transaction_blocks(feed: Feed) -> None:
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


def test_the_first_lsn_of_a_transaction_names_its_first_message_or_else_its_first_row(feed: Feed) -> None:
    """It makes the keys of its segments unique; S carries none where O follows it, nor does B always."""
    cutter, wire = make_cutter(block_bytes=100), Wire()
    wire.begin(700, 0x5000)
    begins_at = wire.lsn
    wire.insert("0123456789" * 9)
    wire.commit(0x5000)
    wire.add(Begin(Lsn(0x6000), T0_US, Xid(701)), at=0)
    wire.insert("0123456789" * 9)
    wire.commit(0x6000)
    wire.start(702, first=True)
    starts_at = wire.lsn
    first_row_of_702 = wire.insert("0123456789" * 9)
    wire.stop()
    wire.add(StreamStart(Xid(703), True), at=0)
    wire.origin("upstream")
    wire._stream = Xid(703)
    first_row_of_703 = wire.insert("a")
    wire.insert("0123456789" * 9)
    wire.stop()
    assert starts_at < first_row_of_702
    found = {
        event.xid: event.first_lsn for event in feed(cutter, wire) if isinstance(event, TransactionBlock)
    }
    assert found == {700: begins_at, 701: 0x6000, 702: starts_at, 703: first_row_of_703}


def test_whole_transactions_before_a_large_one_are_cut_before_it(feed: Feed) -> None:
    cutter, wire = make_cutter(block_bytes=400), Wire()
    wire.begin(700, 0x5000)
    wire.relation()
    wire.insert("x")
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    for _ in range(30):
        wire.insert("0123456789")
    wire.commit(0x6000)
    events = feed(cutter, wire)
    assert isinstance(events[0], PlainBlock) and events[0].last_commit_lsn == 0x5000
    assert isinstance(events[1], TransactionBlock) and isinstance(events[-1], Committed)


def test_interleaved_streams_keep_their_rows_apart_and_commit_in_order(feed: Feed) -> None:
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


def test_ten_thousand_rolled_back_savepoints_cut_no_block_and_go_with_the_next_one(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a", subxid=700)
    wire.stop()
    for subxid in range(701, 10_701):
        wire.start(700, first=False)
        wire.insert("b", subxid=subxid)
        wire.stop()
        wire.stream_abort(700, subxid)
    wire.stream_commit(700, 0x5000)
    block, end = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and block.block.n_messages == 10_001
    assert block.aborted == tuple(range(701, 10_700)), "the last one has no row behind it"
    assert isinstance(end, Committed) and end.aborted == (10_700,)


def test_a_rollback_of_several_subtransactions_is_told_whole_though_a_block_is_cut_within_it(
    feed: Feed,
) -> None:
    """The rows of the parent come after those of its released child: without each other they are no suffix."""
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.insert("a", subxid=701)
    wire.insert("b", subxid=702)
    wire.insert("c", subxid=701)
    wire.stop()
    wire.stream_abort(700, 702)
    assert feed(cutter, wire) == []
    (within,) = cutter.flush_open()
    assert isinstance(within, TransactionBlock) and within.aborted == ()
    wire.stream_abort(700, 701)
    wire.start(700, first=False)
    wire.insert("d", subxid=703)
    wire.stop()
    wire.stream_commit(700, 0x5000)
    behind, end = feed(cutter, wire)
    assert isinstance(behind, TransactionBlock) and behind.aborted == (702, 701)
    assert isinstance(end, Committed) and end.aborted == ()


def test_what_was_rolled_back_before_the_first_row_goes_with_the_first_block_and_without_rows_nowhere(
    feed: Feed,
) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.stop()
    wire.stream_abort(700, 701)
    wire.start(700, first=False)
    wire.insert("a", subxid=700)
    wire.stop()
    wire.start(800, first=True)
    wire.stop()
    wire.stream_abort(800, 801)
    wire.stream_commit(800, 0x5000)
    wire.stream_commit(700, 0x6000)
    empty, block, end = feed(cutter, wire)
    assert isinstance(empty, Committed) and not empty.has_blocks and empty.aborted == ()
    assert isinstance(block, TransactionBlock) and block.aborted == (701,)
    assert isinstance(end, Committed) and end.aborted == ()


def test_abort_of_a_stream_drops_what_was_gathered_and_tells_only_of_blocks_handed_on(feed: Feed) -> None:
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


def test_abort_of_an_unknown_transaction_is_nothing(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.stream_abort(999, 999)
    wire.stream_abort(999, 1000)
    assert feed(cutter, wire) == []


def test_stream_without_a_row_commits_with_no_block(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.stop()
    wire.stream_commit(700, 0x5000)
    (end,) = feed(cutter, wire)
    assert isinstance(end, Committed) and not end.has_blocks


def test_plain_block_of_earlier_commits_precedes_a_stream_commit(feed: Feed) -> None:
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


def test_relation_of_a_committed_stream_holds_for_plain_transactions_after_it(feed: Feed) -> None:
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


def test_relation_of_an_aborted_stream_never_holds(feed: Feed) -> None:
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


def test_an_xid_that_comes_again_begins_without_what_its_predecessor_declared(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation(relid=1)
    wire.insert("a")
    wire.stop()
    wire.stream_abort(700, 700)
    wire.start(700, first=True)
    wire.relation(relid=2)
    wire.insert("a", relid=2)
    wire.stop()
    wire.stream_commit(700, 0x5000)
    block, _ = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and set(block.block.relations.relations) == {2}


def test_relation_of_a_stream_does_not_override_a_later_plain_one(feed: Feed) -> None:
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


def test_changed_relation_in_a_stream_cuts_the_block_so_that_each_row_has_its_own_schema(feed: Feed) -> None:
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


def test_changed_relation_inside_a_plain_transaction_promotes_it(feed: Feed) -> None:
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


def test_changed_relation_behind_the_first_row_of_a_replicated_transaction_promotes_it(feed: Feed) -> None:
    """Its origin stands between BEGIN and that row."""
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.origin("upstream")
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.commit(0x5000)
    old, new, end = feed(cutter, wire)
    assert isinstance(old, TransactionBlock) and len(old.block.relations.relations[1].columns) == 1
    assert isinstance(new, TransactionBlock) and len(new.block.relations.relations[1].columns) == 2
    assert isinstance(end, Committed) and end.end.origin == "upstream"


def test_changed_relation_between_transactions_cuts_what_was_before(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.commit(0x5000)
    wire.relation(columns=("a", "b"))
    (old,) = feed(cutter, wire)
    assert isinstance(old, PlainBlock) and len(old.block.relations.relations[1].columns) == 1


def test_types_named_in_a_stream_hold_in_it_alone(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()

    def mood(scope: Xid | None) -> Relation:
        return Relation(scope, 1, "public", "t", "d", (RelationColumn(True, "a", 90_000, -1),))

    wire.start(700, first=True)
    wire.add(Type(Xid(700), 90_000, "public", "mood"), at=0)
    wire.add(mood(Xid(700)), at=0)
    wire.insert("fine")
    wire.stop()
    wire.begin(701, 0x5000)
    wire.add(mood(None), at=0)
    wire.insert("fine")
    wire.commit(0x5000)
    wire.stream_commit(700, 0x6000)
    plain, block, _ = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and isinstance(plain, PlainBlock)
    assert block.block.relations.relations[1].columns[0].base_type_name == "public.mood"
    assert plain.block.relations.relations[1].columns[0].base_type_name is None


def test_changed_relation_at_the_start_of_a_plain_transaction_only_cuts_what_was_before(feed: Feed) -> None:
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


def test_column_that_clashes_with_the_contract_is_carried_as_such_until_a_commit_keeps_its_rows(
    feed: Feed,
) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(table="orders", columns=("a", "_SEQ"))
    wire.insert("a", "b")
    wire.commit(0x5000)
    feed(cutter, wire)
    (event,) = cutter.flush()
    assert isinstance(event, PlainBlock) and event.block is not None
    (version,) = event.block.relations.relations.values()
    assert version.clash is not None and "_SEQ" in version.clash


def test_two_phase_transaction_is_prepared_then_committed_at_its_own_place(feed: Feed) -> None:
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


def test_streamed_prepare_and_rollback_prepared(feed: Feed) -> None:
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


def test_acknowledged_prepare_that_is_streamed_again_is_dropped_at_its_commit_prepared(feed: Feed) -> None:
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


def test_empty_prepare_has_no_block(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin_prepare(700, "gid", 0x5000)
    wire.prepare(700, "gid", 0x5000)
    (prepared,) = feed(cutter, wire)
    assert isinstance(prepared, Prepared) and not prepared.has_blocks


def test_prepare_without_its_begin_is_an_empty_one_behind_what_came_before(feed: Feed) -> None:
    """PostgreSQL 18 sends it so for a transaction that only locked rows."""
    cutter, wire = make_cutter(), Wire()
    wire.begin(699, 0x4000)
    wire.commit(0x4000)
    wire.prepare(700, "gid", 0x5000)
    plain, prepared = feed(cutter, wire)
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x4000
    assert isinstance(prepared, Prepared) and not prepared.has_blocks and prepared.end_lsn == 0x5004


def test_prepare_without_its_begin_inside_a_stream_of_its_own_xid_is_illegal(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.stop()
    wire.prepare(700, "gid", 0x5000)
    with pytest.raises(IllegalTransition, match="a stream of this xid is open"):
        feed(cutter, wire)


@pytest.mark.parametrize("end", ["prepare", "stream prepare", "commit prepared", "rollback prepared"])
def test_what_committed_before_is_cut_before_any_two_phase_end(feed: Feed, end: str) -> None:
    """Else the position of the end would be confirmed over commits that nobody holds yet."""
    cutter, wire = make_cutter(), Wire()
    if end == "stream prepare":
        wire.start(700, first=True)
        wire.insert("a")
        wire.stop()
    wire.begin(699, 0x4000)
    wire.insert("before")
    wire.commit(0x4000)
    if end == "prepare":
        wire.begin_prepare(700, "gid", 0x5000)
        wire.insert("a")
        wire.prepare(700, "gid", 0x5000)
    elif end == "stream prepare":
        wire.stream_prepare(700, "gid", 0x5000)
    elif end == "commit prepared":
        wire.commit_prepared(700, "gid", 0x5000)
    else:
        wire.rollback_prepared(700, "gid", 0x1004, 0x5000)
    plain, *_, last = feed(cutter, wire)
    assert isinstance(plain, PlainBlock) and plain.last_commit_lsn == 0x4000
    assert isinstance(last, (Prepared, CommittedPrepared, RolledBackPrepared))


def test_acknowledged_prepare_that_is_streamed_again_is_dropped_at_its_rollback_too(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.insert("a")
    wire.stop()
    wire.rollback_prepared(700, "gid", 0x5004, 0x6000)
    (rolled_back,) = feed(cutter, wire)
    assert isinstance(rolled_back, RolledBackPrepared)
    assert cutter.pending_bytes == 0 and cutter.open_transactions == 0


def test_streamed_prepare_tells_of_its_rolled_back_parts(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.insert("a")
    wire.insert("b", subxid=701)
    wire.stop()
    wire.stream_abort(700, 701)
    wire.stream_prepare(700, "gid", 0x5000)
    block, prepared = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and block.aborted == ()
    assert isinstance(prepared, Prepared) and prepared.aborted == (701,)


def test_relations_of_a_prepared_stream_do_not_hold_for_plain_transactions(feed: Feed) -> None:
    """The server sends R again."""
    cutter, wire = make_cutter(), Wire()
    wire.begin(699, 0x4000)
    wire.relation(columns=("a",))
    wire.insert("a")
    wire.commit(0x4000)
    wire.start(700, first=True)
    wire.relation(columns=("a", "b"))
    wire.insert("a", "b")
    wire.stop()
    wire.stream_prepare(700, "gid", 0x5000)
    wire.begin(701, 0x6000)
    wire.insert("a")
    wire.commit(0x6000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock)
    assert [c.name for c in block.block.relations.relations[1].columns] == ["a"]


@pytest.mark.parametrize("how", ["commit", "prepare"])
def test_the_origin_of_a_transaction_that_goes_by_itself_is_told_at_its_end(feed: Feed, how: str) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.origin("upstream")
    wire.insert("a")
    wire.stop()
    if how == "commit":
        wire.stream_commit(700, 0x5000)
    else:
        wire.stream_prepare(700, "gid", 0x5000)
    block, end = feed(cutter, wire)
    assert isinstance(block, TransactionBlock) and kinds(block) == "I"
    assert isinstance(end, (Committed, Prepared))
    assert (end.end.origin if isinstance(end, Committed) else end.origin) == "upstream"


def test_truncates_are_rows_of_their_transaction(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.add(Truncate(Xid(700), False, False, (1,)))
    wire.stop()
    wire.begin(701, 0x5000)
    wire.relation()
    wire.add(Truncate(None, False, False, (1,)))
    wire.insert("a")
    wire.commit(0x5000)
    wire.stream_commit(700, 0x6000)
    plain, block, _ = feed(cutter, wire)
    assert isinstance(plain, PlainBlock) and kinds(plain) == "BTIC"
    assert isinstance(block, TransactionBlock) and kinds(block) == "IT"
    assert cutter.n_messages_cut == 4 + 2


def test_aborts_of_a_parallel_stream_carry_their_position(feed: Feed) -> None:
    cutter, wire = make_cutter(block_bytes=100, parallel=True), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("0123456789" * 9)
    wire.stop()
    wire.add(StreamAbort(Xid(700), Xid(701), Lsn(0x4000), T0_US))
    wire.add(StreamAbort(Xid(700), Xid(700), Lsn(0x4100), T0_US))
    _, aborted = feed(cutter, wire)
    assert aborted == Aborted(700)  # type: ignore[arg-type]


def test_messages_outside_transactions_fill_blocks_too(feed: Feed) -> None:
    cutter, wire = make_cutter(block_bytes=300), Wire()
    for _ in range(10):
        wire.message(b"0123456789" * 3, transactional=False)
    blocks = feed(cutter, wire)
    assert blocks and all(isinstance(b, PlainBlock) and b.n_transactions == 0 for b in blocks)
    assert cutter.pending_bytes < 300


def test_message_outside_transactions_keeps_its_place_and_confirms_nothing(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.message(b"hello", transactional=False)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and kinds(block) == "M"
    assert (block.first_commit_lsn, block.end_lsn, block.n_transactions) == (0, 0, 0)


def test_position_is_given_only_between_transactions_and_behind_what_was_gathered(feed: Feed) -> None:
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


def test_open_stream_does_not_hold_the_position_back(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.start(700, first=True)
    wire.relation()
    wire.insert("a")
    wire.stop()
    feed(cutter, wire)
    assert cutter.position(Lsn(0x9000)) == (Position(Lsn(0x9000)),)


def test_gathered_streams_stay_under_the_limit_by_cutting_the_largest(feed: Feed) -> None:
    cutter, wire = make_cutter(block_bytes=1 << 20, pending=2000), Wire()
    for xid in range(700, 720):
        wire.start(xid, first=True)
        wire.relation()
        for _ in range(5 if xid != 705 else 20):
            wire.insert("0123456789")
        wire.stop()
    events = feed(cutter, wire)
    assert cutter.pending_bytes <= 2000
    assert isinstance(events[0], TransactionBlock) and events[0].xid == 705


def test_what_is_over_the_limit_is_cut_down_to_half_of_it_at_once(feed: Feed) -> None:
    cutter, wire = make_cutter(block_bytes=1 << 20, pending=2000), Wire()
    xids = range(700, 760)
    for xid in xids:
        wire.start(xid, first=True)
        wire.relation()
        wire.insert("0123456789")
        wire.stop()
        events = feed(cutter, wire)
        if events:
            break
    assert len(events) > 1, "blocks that are cut together share a call"
    assert 800 < cutter.pending_bytes <= 1000
    assert not feed(cutter, wire)


def test_open_rows_can_be_cut_before_their_end(feed: Feed) -> None:
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
def test_message_out_of_place_is_refused(feed: Feed, course) -> None:  # type: ignore[no-untyped-def]
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


def test_an_open_stream_that_begins_once_more_is_illegal() -> None:
    cutter, wire = make_cutter(), Wire()
    wire.add(StreamStart(Xid(700), True))
    wire.add(StreamStop())
    wire.add(StreamStart(Xid(700), True))
    start, stop, again = wire.take()
    cutter.feed(start)
    cutter.feed(stop)
    with pytest.raises(IllegalTransition, match="first block of a stream that is open"):
        cutter.feed(again)


def test_a_stream_stop_outside_a_stream_is_illegal_and_named_by_its_lsn() -> None:
    cutter, wire = make_cutter(), Wire()
    lsn = wire.add(StreamStop())
    with pytest.raises(IllegalTransition, match=str(lsn)):
        cutter.feed(*wire.take())


def test_a_one_row_block_takes_one_relation_along_of_the_hundreds_that_are_known(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    for relid in range(1, 401):
        wire.relation(relid=relid, table=f"t{relid}")
        wire.insert("x", relid=relid)
    wire.commit(0x5000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and set(block.block.relations.relations) == set(range(1, 401))
    wire.begin(701, 0x6000)
    wire.insert("y", relid=123)
    wire.add(Truncate(None, False, False, (7, 400)))
    wire.commit(0x6000)
    feed(cutter, wire)
    (block,) = cutter.flush()
    assert isinstance(block, PlainBlock) and set(block.block.relations.relations) == {7, 123, 400}


def test_what_a_promoted_transaction_leaves_behind_takes_its_own_relations_along(feed: Feed) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation(relid=1)
    wire.insert("small", relid=1)
    wire.commit(0x5000)
    wire.begin(701, 0x6000)
    wire.relation(relid=2, table="u")
    wire.insert("open", relid=2)
    assert feed(cutter, wire) == []
    (whole,) = cutter.flush()
    assert isinstance(whole, PlainBlock) and set(whole.block.relations.relations) == {1}
    wire.relation(relid=2, table="u", columns=("a", "b"))
    (promoted,) = feed(cutter, wire)
    assert isinstance(promoted, TransactionBlock)
    assert [(r, len(v.columns)) for r, v in promoted.block.relations.relations.items()] == [(2, 1)]


@pytest.mark.parametrize("way", ["plain", "promoted", "prepare", "streamed", "between"])
def test_a_stream_that_the_server_ended_gives_what_is_whole_and_names_the_transaction(
    way: str, feed: Feed
) -> None:
    cutter, wire = make_cutter(), Wire()
    wire.begin(700, 0x5000)
    wire.relation()
    wire.insert("a", "b")
    wire.commit(0x5000)
    if way == "prepare":
        wire.begin_prepare(701, "gid", 0x6000)
    elif way == "streamed":
        wire.add(StreamStart(Xid(701), True))
    elif way != "between":
        wire.begin(701, 0x6000)
    if way == "promoted":
        wire.insert("x" * 5000, "y")
    events = list(feed(cutter, wire))
    rest, unsendable = cutter.unsendable(PoisonedChange("a change has a value"))
    (plain,) = [event for event in (*events, *rest) if isinstance(event, PlainBlock)]
    assert plain.last_commit_lsn == 0x5000
    known = way not in ("streamed", "between")
    assert (unsendable.xid, unsendable.lsn) == (0 if way == "between" else 701, 0x6000 if known else 0)
    assert isinstance(unsendable.error, PoisonedChange)
    wanted = "slot skip --xid 701 --commit-lsn 0/6000" if known else "--streaming off"
    assert wanted in unsendable.error.remedy


@pytest.mark.parametrize("how", ["streamed", "promoted", "small"])
def test_a_giant_row_is_a_block_of_its_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xidstream.pipeline.stream.cutter._ALONE_BYTES", 2000)
    cutter = StreamCutter(
        block_bytes=1000 if how == "promoted" else 1 << 20, pending_limit_bytes=1 << 20, parallel=False
    )
    wire = Wire()
    if how == "streamed":
        wire.start(700, first=True)
    else:
        wire.begin(600, 0x7000)
        wire.commit(0x7000)
        wire.begin(700, 0x9000)
    wire.relation()
    sizes = [900, 900, 10, 10, 3000, 2999, 10]
    for size in sizes:
        wire.insert("x" * size)
    if how == "streamed":
        wire.stop()
        wire.stream_commit(700, 0x9000)
    else:
        wire.commit(0x9000)
    events = [event for data in wire.take() for event in cutter.feed(data)]
    events += cutter.flush()
    blocks = [event.block for event in events if isinstance(event, TransactionBlock)]
    assert sum(block.n_messages for block in blocks) == len(sizes)
    assert [block.n_messages for block in blocks[-3:]] == [1, 1, 1]
    assert [len(block.payload) > 2000 for block in blocks[-3:]] == [True, True, False]
    assert isinstance(events[-1], Committed)
