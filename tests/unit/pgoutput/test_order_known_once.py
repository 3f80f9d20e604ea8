"""The order of messages is written down in the grammar alone: what compiled loops and the cutter know is the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pgoutput import writer
from tests.pgoutput.messages import Insert, Truncate
from tests.pgoutput.order import new_grammar
from tests.wire import T0_US, text_tuple
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block, scan
from xidstream.pipeline.errors import IllegalTransition
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.grammar import ELSEWHERE, TRANSITIONS, StreamState
from xidstream.pipeline.pgoutput.message_buffer import IN_PLAIN, IN_ROWS, LOOK, OUTSIDE
from xidstream.pipeline.pgoutput.message_buffer import TRANSITIONS as LOOP_TABLE
from xidstream.pipeline.pgoutput.messages import Begin, Commit, LogicalMessage, MessageType, Origin
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.stream import StreamCutter

STATES = {OUTSIDE: StreamState.OUTSIDE, IN_PLAIN: StreamState.IN_TRANSACTION, IN_ROWS: StreamState.IN_STREAM}
RELATION = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True, None),))
INSIDE = {
    "B": Begin(Lsn(0x100), T0_US, Xid(7)),
    "C": Commit(Lsn(0x100), Lsn(0x104), T0_US),
    "I": Insert(None, 1, text_tuple("x")),
    "T": Truncate(None, False, False, (1,)),
    "M": LogicalMessage(None, True, Lsn(1), "p", b""),
    "O": Origin(Lsn(0), "o"),
}


def test_the_loop_over_libpq_moves_as_the_grammar_does_or_gives_the_message_out() -> None:
    taken = {mode: bytes(np.flatnonzero(row != LOOK).astype(np.uint8)) for mode, row in enumerate(LOOP_TABLE)}
    assert taken == {OUTSIDE: b"B", IN_PLAIN: b"CDIU", IN_ROWS: b"DIU"}
    for mode, kinds in taken.items():
        for kind in kinds:
            assert STATES[LOOP_TABLE[mode, kind]] is TRANSITIONS[STATES[mode]][kind]


@pytest.mark.parametrize(
    ("moves", "states", "kept"),
    [
        (scan.PLAIN_BLOCK, (StreamState.OUTSIDE, StreamState.IN_TRANSACTION), b"BCOIUDTM"),
        (scan.TRANSACTION_BLOCK, (StreamState.IN_STREAM,), b"IUDTM"),
    ],
    ids=["plain", "transaction"],
)
def test_a_block_may_hold_what_the_grammar_allows_of_what_blocks_are_made_of(
    moves: np.ndarray, states: tuple[StreamState, ...], kept: bytes
) -> None:
    for i, state in enumerate(states):
        for kind in range(256):
            after = TRANSITIONS[state].get(kind) if kind in kept else None
            assert moves[i, kind] == (ELSEWHERE if after is None else states.index(after))
    assert scan._NOWHERE == ELSEWHERE


def block_of(letters: str) -> tuple[np.ndarray, np.ndarray]:
    """``m`` is a message that is not transactional."""
    loose = LogicalMessage(None, False, Lsn(1), "p", b"")
    messages = [writer.xlog_data(Lsn(1), writer.write(INSIDE.get(c, loose))) for c in letters]
    return np.frombuffer(b"".join(messages), np.uint8), np.array([len(m) for m in messages], np.int32)


def grammar_takes(letters: str, *, state: StreamState) -> bool:
    grammar = new_grammar()
    if state is StreamState.IN_STREAM:
        grammar.on_control(ord("S"), Xid(7), first=True)
    try:
        for c in letters:
            if c in "BC":
                grammar.on_control(ord(c))
            else:
                transactional = {"M": True, "m": False}.get(c)
                grammar.check(ord(c.upper()), transactional=transactional)
    except IllegalTransition:
        return False
    return grammar.state is state


@pytest.mark.parametrize("head", ["", "B", "BI", "BC", "BOI", "m", "BCm"])
@pytest.mark.parametrize("tail", ["", "C"])
@pytest.mark.parametrize("c", "BCITMm")
def test_the_decoder_takes_exactly_the_plain_blocks_that_the_grammar_takes(
    head: str, c: str, tail: str
) -> None:
    letters = head + c + tail
    payload, lengths = block_of(letters)
    try:
        decode_plain_block(payload, lengths, {1: RELATION})
    except IllegalTransition:
        assert not grammar_takes(letters, state=StreamState.OUTSIDE)
    else:
        assert grammar_takes(letters, state=StreamState.OUTSIDE)


@pytest.mark.parametrize("c", "BCITMm")
def test_the_decoder_takes_exactly_the_rows_of_a_stream_that_the_grammar_takes(c: str) -> None:
    payload, lengths = block_of("I" + c)
    try:
        decode_transaction_block(payload, lengths, {1: RELATION}, streamed=False, xid=7, first_ordinal=0)
    except IllegalTransition:
        assert not grammar_takes("I" + c, state=StreamState.IN_STREAM)
    else:
        assert grammar_takes("I" + c, state=StreamState.IN_STREAM)


REFUSED = [
    (head, MessageType(kind))
    for head, state in (
        ("", StreamState.OUTSIDE),
        ("B", StreamState.IN_TRANSACTION),
        ("BI", StreamState.IN_TRANSACTION),
    )
    for kind in b"IUDTCEbBSAcpKr"
    if kind not in TRANSITIONS[state]
]


@pytest.mark.parametrize(("head", "kind"), REFUSED)
def test_the_cutter_refuses_what_the_grammar_refuses(head: str, kind: MessageType) -> None:
    """The message is as long as it must be, so that its place is all that is wrong."""
    cutter = StreamCutter(block_bytes=1 << 20, pending_limit_bytes=1 << 20, parallel=False)
    for c in head:
        cutter.feed(writer.xlog_data(Lsn(1), writer.write(INSIDE[c])))
    sizes = {"I": 5, "U": 5, "D": 5, "T": 9, "C": 26, "E": 1, "b": 30, "B": 21, "S": 6, "A": 9, "c": 30}
    body = bytes([kind]) + bytes(sizes.get(chr(kind), 31) - 1)
    if chr(kind) in "bpKr":
        body = bytes([kind]) + bytes({"b": 29, "p": 30, "K": 30, "r": 38}[chr(kind)] - 1) + b"g\0"
    with pytest.raises(IllegalTransition):
        cutter.feed(writer.xlog_data(Lsn(1), body))
