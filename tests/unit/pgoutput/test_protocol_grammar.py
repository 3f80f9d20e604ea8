"""Which message may come where."""

from __future__ import annotations

import pytest

from tests.pgoutput.messages import Delete, Insert, Message, Truncate, TupleData, Update
from tests.pgoutput.order import new_grammar, open_streams, step
from xidstream.pipeline.errors import IllegalTransition, UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.grammar import TRANSITIONS, Grammar, StreamState
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    MessageType,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)

LSN = Lsn.parse("0/16B3748")
ROW = TupleData(())


def message_of(letter: str, xid: int = 740, *, subxid: int | None = None) -> Message:
    """A message by its letter; ``S`` is a first block, ``s`` a later one."""
    x, one = Xid(xid), Lsn(1)
    makers: dict[str, Message] = {
        "B": Begin(one, 0, x),
        "C": Commit(one, one, 0),
        "O": Origin(one, "o"),
        "R": Relation(None, 1, "s", "t", "d", ()),
        "Y": Type(None, 1, "s", "t"),
        "I": Insert(None, 1, ROW),
        "U": Update(None, 1, None, None, ROW),
        "D": Delete(None, 1, ROW, None),
        "T": Truncate(None, False, False, ()),
        "M": LogicalMessage(None, True, one, "p", b""),
        "m": LogicalMessage(None, False, one, "p", b""),
        "S": StreamStart(x, True),
        "s": StreamStart(x, False),
        "E": StreamStop(),
        "c": StreamCommit(x, one, one, 0),
        "A": StreamAbort(x, Xid(xid if subxid is None else subxid)),
        "b": BeginPrepare(one, one, 0, x, "g"),
        "P": Prepare(one, one, 0, x, "g"),
        "K": CommitPrepared(one, one, 0, x, "g"),
        "r": RollbackPrepared(one, one, 0, 0, x, "g"),
        "p": StreamPrepare(one, one, 0, x, "g"),
    }
    return makers[letter]


def run(story: str) -> Grammar:
    """``S1 I E c1 A1/2``: letter, xid, subxid."""
    grammar = new_grammar()
    for word in story.split():
        take(grammar, word)
    return grammar


def take(grammar: Grammar, word: str) -> StreamState:
    xid, _, subxid = word[1:].partition("/")
    message = message_of(word[0], int(xid or 740), subxid=int(subxid) if subxid else None)
    return step(grammar, message, LSN)


LEGAL = {
    "nothing": ("", StreamState.OUTSIDE, ()),
    "plain_transaction": ("B1 R I U D T M Y C", StreamState.OUTSIDE, ()),
    "plain_transaction_that_is_empty": ("B1 C", StreamState.OUTSIDE, ()),
    "plain_transaction_in_progress": ("B1 I", StreamState.IN_TRANSACTION, ()),
    "plain_transaction_with_an_origin": ("B1 O R I C", StreamState.OUTSIDE, ()),
    "origins_of_two_transactions": ("B1 O C B2 O C", StreamState.OUTSIDE, ()),
    "two_phase": ("b1 O R I P1 K1", StreamState.OUTSIDE, ()),
    "two_phase_rolled_back": ("b1 I P1 r1", StreamState.OUTSIDE, ()),
    "empty_prepare": ("b1 P1 K1", StreamState.OUTSIDE, ()),
    "two_phase_in_progress": ("b1 I", StreamState.IN_PREPARE, ()),
    "several_prepared_at_once": ("b1 P1 b2 P2 B3 C K2 r1", StreamState.OUTSIDE, ()),
    "stream": ("S1 R I E s1 I E c1", StreamState.OUTSIDE, ()),
    "stream_block_in_progress": ("S1 R I", StreamState.IN_STREAM, (1,)),
    "stream_between_blocks": ("S1 I E", StreamState.OUTSIDE, (1,)),
    "stream_without_rows": ("S1 E c1", StreamState.OUTSIDE, ()),
    "stream_with_an_origin": ("S1 O R I E s1 I E c1", StreamState.OUTSIDE, ()),
    "streams_interleaved": ("S1 I E S2 I E s1 I E B3 I C c2 s1 E c1", StreamState.OUTSIDE, ()),
    "stream_prepared": ("S1 I E p1 K1", StreamState.OUTSIDE, ()),
    "stream_prepared_and_rolled_back": ("S1 I E p1 r1", StreamState.OUTSIDE, ()),
    "abort_of_a_subtransaction_keeps_the_stream": ("S1 I E A1/2 s1 I E", StreamState.OUTSIDE, (1,)),
    "children_abort_before_their_parent": ("S1 I E A1/3 A1/2 s1 I E c1", StreamState.OUTSIDE, ()),
    "abort_of_a_subtransaction_never_seen": ("S1 I E A1/99 c1", StreamState.OUTSIDE, ()),
    "abort_of_the_whole_transaction": ("S1 I E A1/1", StreamState.OUTSIDE, ()),
    "abort_of_an_unknown_transaction": ("A9/9", StreamState.OUTSIDE, ()),
    "abort_of_a_subtransaction_of_an_unknown_transaction": ("A9/10 B1 C", StreamState.OUTSIDE, ()),
    "stray_abort_between_plain_transactions": ("B1 C A9/9 B2 C", StreamState.OUTSIDE, ()),
    "an_xid_streams_again_after_its_abort": ("S1 E A1/1 S1 E c1", StreamState.OUTSIDE, ()),
    "commit_prepared_of_a_prepare_before_the_restart": ("K1", StreamState.OUTSIDE, ()),
    "prepare_of_a_transaction_that_only_locked_rows": ("P1 K1 S2 E P1 r1 c2", StreamState.OUTSIDE, ()),
    "rollback_prepared_of_a_prepare_never_sent": ("r1", StreamState.OUTSIDE, ()),
    # Seen on 16.14 and 18.4: an acknowledged prepared transaction, streamed once more after a restart.
    "acknowledged_prepare_streamed_again_then_committed": ("S1 I E S2 I E c2 K1", StreamState.OUTSIDE, ()),
    "acknowledged_prepare_streamed_again_then_rolled_back": ("S1 I E r1", StreamState.OUTSIDE, ()),
    "message_outside": ("m B1 C m", StreamState.OUTSIDE, ()),
    "relation_outside": ("Y R B1 I C R", StreamState.OUTSIDE, ()),
    "message_between_stream_blocks": ("S1 E m s1 E c1", StreamState.OUTSIDE, ()),
    "messages_inside": ("B1 M C S2 M E b3 M P3", StreamState.OUTSIDE, (2,)),
}


@pytest.mark.parametrize("scenario", LEGAL)
def test_legal(scenario: str) -> None:
    story, state, opened = LEGAL[scenario]
    grammar = run(story)
    assert grammar.state is state
    assert tuple(open_streams(grammar)) == opened


ILLEGAL = {
    "commit_without_begin": ("", "C"),
    "prepare_without_begin_prepare_of_an_open_stream": ("S1 E", "P1"),
    "prepare_without_begin_prepare_within_a_transaction": ("B1", "P1"),
    "stream_stop_without_start": ("", "E"),
    "begin_within_a_transaction": ("B1 I", "B2"),
    "begin_within_a_stream_block": ("S1", "B2"),
    "begin_prepare_within_a_transaction": ("B1", "b2"),
    "stream_start_within_a_transaction": ("B1", "S2"),
    "stream_start_within_a_prepare": ("b1", "S2"),
    "stream_blocks_nested": ("S1", "S2"),
    "stream_block_of_the_same_transaction_nested": ("S1", "s1"),
    "stream_commit_within_its_block": ("S1 I", "c1"),
    "stream_prepare_within_its_block": ("S1 I", "p1"),
    "stream_abort_within_a_block": ("S1 I", "A1/2"),
    "stream_abort_within_a_transaction": ("B1", "A9/9"),
    "commit_prepared_within_a_transaction": ("B1", "K1"),
    "rollback_prepared_within_a_stream_block": ("S1", "r1"),
    "commit_of_a_prepare": ("b1 I", "C"),
    "prepare_of_a_plain_transaction": ("B1 I", "P1"),
    "commit_of_a_stream_block": ("S1 I", "C"),
    "stream_stop_of_a_plain_transaction": ("B1 I", "E"),
    "prepare_of_another_xid": ("b1 I", "P2"),
    "first_block_of_an_open_stream": ("S1 E", "S1"),
    "later_block_of_an_unknown_stream": ("", "s1"),
    "later_block_after_the_commit": ("S1 E c1", "s1"),
    "later_block_after_the_abort": ("S1 E A1/1", "s1"),
    "later_block_after_the_prepare": ("S1 E p1", "s1"),
    "stream_commit_of_an_unknown_transaction": ("S1 E", "c2"),
    "stream_commit_twice": ("S1 E c1", "c1"),
    "stream_commit_after_the_abort": ("S1 E A1/1", "c1"),
    "stream_prepare_of_an_unknown_transaction": ("", "p1"),
    "stream_commit_after_the_prepare": ("S1 E p1", "c1"),
    "begin_of_an_open_stream": ("S1 E", "B1"),
    "begin_prepare_of_an_open_stream": ("S1 E", "b1"),
    "row_outside": ("B1 I C", "I"),
    "update_outside": ("", "U"),
    "delete_outside": ("S1 E", "D"),
    "truncate_outside": ("", "T"),
    "transactional_message_outside": ("S1 E", "M"),
    "message_of_no_transaction_within_one": ("B1", "m"),
    "message_of_no_transaction_within_a_stream_block": ("S1", "m"),
    "origin_outside": ("", "O"),
    "origin_twice": ("B1 O", "O"),
    "origin_in_a_later_block": ("S1 E s1", "O"),
}


@pytest.mark.parametrize("scenario", ILLEGAL)
def test_illegal_raises_with_the_story_and_changes_nothing(scenario: str) -> None:
    story, word = ILLEGAL[scenario]
    grammar = run(story)
    before = (grammar.state, grammar.xid, open_streams(grammar), list(grammar._story))
    with pytest.raises(IllegalTransition) as raised:
        take(grammar, word)
    told = str(raised.value)
    assert "0/16B3748" in told
    assert grammar.state.value in told
    assert message_of(word[0]).type.title in told
    if word[1:]:
        assert f"xid {word[1:].partition('/')[0]}" in told
    assert (grammar.state, grammar.xid, open_streams(grammar), list(grammar._story)) == before


def test_after_an_illegal_message_the_legal_one_still_works() -> None:
    grammar = run("S1 O I")
    for word in ("c1", "S2", "C", "O"):
        with pytest.raises(IllegalTransition):
            take(grammar, word)
    for word in ("I", "E", "s1", "I", "E", "c1"):
        take(grammar, word)
    assert grammar.state is StreamState.OUTSIDE
    assert not open_streams(grammar)


def test_the_table_has_every_state_and_every_type_has_a_place() -> None:
    assert set(TRANSITIONS) == set(StreamState)
    assert set().union(*TRANSITIONS.values()) == set(MessageType)


def test_rows_never_change_the_state() -> None:
    for state, moves in TRANSITIONS.items():
        for kind in b"RYIUDTM":
            assert moves.get(kind) in (state, None)


def test_the_story_tells_the_messages_before() -> None:
    grammar = run("B7 C S8 E")
    with pytest.raises(IllegalTransition, match=r"BEGIN of xid 7 at .*, COMMIT at .*STREAM START of xid 8"):
        take(grammar, "S8")


def test_open_streams_tell_where_each_was_first_seen() -> None:
    grammar = new_grammar()
    grammar.on_control(ord("S"), Xid(5), first=True, lsn=Lsn(100))
    grammar.on_control(ord("E"))
    grammar.on_control(ord("S"), Xid(5), first=False, lsn=Lsn(200))
    assert open_streams(grammar) == {5: 100}


def test_the_fast_path_gives_begin_without_its_xid() -> None:
    grammar = run("S1 E")
    assert grammar.on_control(ord("B"), None) is StreamState.IN_TRANSACTION
    assert grammar.xid is None
    assert grammar.on_control(ord("C")) is StreamState.OUTSIDE
    assert tuple(open_streams(grammar)) == (1,)


def test_the_current_transaction_is_known_while_it_lasts() -> None:
    for story, xid in {"B1": 1, "b2": 2, "S3": 3, "S3 E s3": 3, "B1 C": None, "S3 E": None}.items():
        assert run(story).xid == xid


@pytest.mark.parametrize("kind", b"ScApbKr")
def test_a_call_without_the_xid_that_a_rule_needs_is_a_usage_error(kind: int) -> None:
    with pytest.raises(UsageError):
        new_grammar().on_control(kind, None)


def test_a_call_without_first_or_subxid_is_a_usage_error_and_changes_nothing() -> None:
    grammar = new_grammar()
    with pytest.raises(UsageError):
        grammar.on_control(ord("S"), Xid(1))
    with pytest.raises(UsageError):
        grammar.on_control(ord("A"), Xid(1))
    assert grammar.state is StreamState.OUTSIDE
    assert not open_streams(grammar)


def test_an_unknown_type_byte_is_illegal_everywhere() -> None:
    for story in ("", "B1", "b1", "S1"):
        with pytest.raises(IllegalTransition, match="0x7a"):
            run(story).on_control(ord("z"))
