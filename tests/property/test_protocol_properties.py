"""Parser, writer and grammar over generated input: round trips, hostile bytes, random orders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pgoutput.messages import (
    ColumnKind,
    Delete,
    Insert,
    Message,
    StandbyStatusUpdate,
    Truncate,
    TupleColumn,
    TupleData,
    Update,
)
from tests.pgoutput.order import new_grammar, open_streams
from tests.pgoutput.parser import parse_copy_header, parse_message, parse_standby_status_update
from tests.pgoutput.writer import write, write_keepalive, write_standby_status_update, xlog_data
from xidstream.pipeline.errors import IllegalTransition, MalformedMessage, PoisonedChange
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.pgoutput.grammar import TRANSITIONS, StreamState
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Keepalive,
    LogicalMessage,
    MessageType,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)
from xidstream.pipeline.pgoutput.parser import parse_keepalive

LSN = Lsn.parse("0/16B3748")

lsns = st.integers(0, 2**64 - 1).map(Lsn)
xids = st.integers(0, 2**32 - 1).map(Xid)
oids = st.integers(0, 2**32 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
times = st.integers(-(2**63), 2**63 - 1).map(lambda wire_us: wire_us + POSTGRES_EPOCH_UNIX_US)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=80)
# An empty schema on the wire means pg_catalog, so no message has one.
schemas = names.filter(bool) | st.just("pg_catalog")
values = st.binary(max_size=60)
columns = st.one_of(
    st.sampled_from((ColumnKind.NULL, ColumnKind.UNCHANGED)).map(TupleColumn),
    st.builds(TupleColumn, st.sampled_from((ColumnKind.TEXT, ColumnKind.BINARY)), values),
)
tuples = st.builds(TupleData, st.lists(columns, max_size=8).map(tuple))
relation_columns = st.builds(RelationColumn, st.booleans(), names, oids, int32s)


def streamable(xid: st.SearchStrategy[Any]) -> st.SearchStrategy[Message]:
    relation_list = st.lists(relation_columns, max_size=6).map(tuple)
    return st.one_of(
        st.builds(Relation, xid, oids, schemas, names, st.sampled_from("dnfi"), relation_list),
        st.builds(Type, xid, oids, schemas, names),
        st.builds(Insert, xid, oids, tuples),
        st.builds(Update, xid, oids, st.none(), st.none(), tuples),
        st.builds(Update, xid, oids, tuples, st.none(), tuples),
        st.builds(Update, xid, oids, st.none(), tuples, tuples),
        st.builds(Delete, xid, oids, tuples, st.none()),
        st.builds(Delete, xid, oids, st.none(), tuples),
        st.builds(Truncate, xid, st.booleans(), st.booleans(), st.lists(oids, max_size=6).map(tuple)),
        st.builds(LogicalMessage, xid, st.booleans(), lsns, names, values),
    )


prepared = (lsns, lsns, times, xids, names)
control = st.one_of(
    st.builds(Begin, lsns, times, xids),
    st.builds(Commit, lsns, lsns, times),
    st.builds(Origin, lsns, names),
    st.builds(StreamStart, xids, st.booleans()),
    st.just(StreamStop()),
    st.builds(StreamCommit, xids, lsns, lsns, times),
    st.builds(StreamAbort, xids, xids),
    st.builds(StreamAbort, xids, xids, lsns, times),
    st.builds(BeginPrepare, *prepared),
    st.builds(Prepare, *prepared),
    st.builds(CommitPrepared, *prepared),
    st.builds(RollbackPrepared, lsns, lsns, times, times, xids, names),
    st.builds(StreamPrepare, *prepared),
)
messages = st.one_of(control, streamable(st.none()), streamable(xids))


def layout_of(message: Message) -> dict[str, bool]:
    """What a parser must know beforehand to read ``write(message)``."""
    in_stream = not isinstance(message, Begin) and message.type in b"RYIUDTM"
    return {
        "in_stream": in_stream and getattr(message, "xid", None) is not None,
        "parallel": isinstance(message, StreamAbort) and message.abort_lsn is not None,
    }


@settings(max_examples=600, deadline=None)
@given(messages)
def test_every_message_survives_writing_and_parsing(message: Message) -> None:
    wire = write(message)
    assert parse_message(wire, lsn=LSN, **layout_of(message)) == message
    assert wire[0] == message.type


@settings(max_examples=200, deadline=None)
@given(messages, st.binary(max_size=40))
def test_a_message_is_read_in_place_whatever_stands_before_it(message: Message, before: bytes) -> None:
    data = memoryview(before + write(message))
    assert parse_message(data, lsn=LSN, offset=len(before), **layout_of(message)) == message


@settings(max_examples=200, deadline=None)
@given(messages)
def test_no_prefix_of_a_message_is_a_message(message: Message) -> None:
    wire = write(message)
    for n_bytes in range(len(wire)):
        with pytest.raises(MalformedMessage, match="0/16B3748"):
            parse_message(wire[:n_bytes], lsn=LSN, **layout_of(message))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    wire = bytearray(write(draw(messages)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(wire)))
        match draw(st.integers(0, 3)):
            case 0:
                wire[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                wire[place:place] = draw(st.binary(max_size=4))
            case 2:
                del wire[place : place + draw(st.integers(0, 6))]
            case _:
                wire[place : place + 4] = draw(st.sampled_from((b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4))))
    return bytes(wire)


def parse_or_refuse(data: bytes, in_stream: bool, parallel: bool) -> None:
    try:
        message = parse_message(data, in_stream=in_stream, parallel=parallel, lsn=LSN)
    except (MalformedMessage, PoisonedChange):
        return
    # What was taken means one thing only: it is written as it was read (the wire's empty schema and the
    # literal pg_catalog are the same name, and bytes of a label that are not UTF-8 are written out).
    again = write(message)
    assert parse_message(again, in_stream=in_stream, parallel=parallel, lsn=LSN) == message
    assert again == data or b"pg_catalog" in data or b"\\x" in again


@settings(max_examples=1500, deadline=None)
@given(mutated(), st.booleans(), st.booleans())
def test_a_damaged_message_is_read_or_refused(data: bytes, in_stream: bool, parallel: bool) -> None:
    parse_or_refuse(data, in_stream, parallel)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(list(MessageType)), st.binary(max_size=80), st.booleans(), st.booleans())
def test_random_bytes_are_read_or_refused(
    kind: MessageType, body: bytes, in_stream: bool, parallel: bool
) -> None:
    parse_or_refuse(bytes((kind,)) + body, in_stream, parallel)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
@example(b"w" * 24)
@example(b"")
def test_random_copy_data_is_read_or_refused(data: bytes) -> None:
    for parse in (parse_copy_header, parse_keepalive, parse_standby_status_update):
        for lead in (b"", b"w", b"k", b"r"):
            try:
                parse(lead + data)
            except MalformedMessage:
                continue


@given(lsns, lsns, lsns, times, st.booleans())
def test_copy_data_survives_writing_and_parsing(
    first: Lsn, second: Lsn, third: Lsn, time_us: int, reply: bool
) -> None:
    header = parse_copy_header(xlog_data(first, b"E", end_lsn=second, send_timestamp_us=time_us))
    assert (header.start_lsn, header.end_lsn, header.send_timestamp_us) == (first, second, time_us)
    keepalive = Keepalive(first, time_us, reply)
    assert parse_keepalive(write_keepalive(keepalive)) == keepalive
    update = StandbyStatusUpdate(first, second, third, time_us, reply)
    assert parse_standby_status_update(write_standby_status_update(update)) == update


# -- the grammar, beside a model that says the same in other words ----------------------------------------

few_xids = st.integers(1, 3).map(Xid)
moves = st.one_of(
    st.tuples(st.just(ord("S")), few_xids, st.booleans()),
    st.tuples(st.just(ord("A")), few_xids, few_xids),
    st.tuples(st.sampled_from(b"BbPcpKr"), few_xids, st.none()),
    st.tuples(st.sampled_from(b"CEI"), st.none(), st.none()),
)


def model(inside: str | None, current: int | None, opened: set[int], move: tuple[int, Any, Any]) -> bool:
    """Whether ``move`` is legal, by the facts about pgoutput."""
    letter, xid, extra = chr(move[0]), move[1], move[2]
    if letter in "BbS":
        known = xid in opened
        return inside is None and (known != extra if letter == "S" else not known)
    if letter == "P" and inside is None:
        return xid not in opened  # a transaction that only locked rows, on PostgreSQL 18
    if letter in "CPE":
        return inside == {"C": "B", "P": "b", "E": "S"}[letter] and (letter != "P" or xid == current)
    if letter == "I":
        return inside is not None
    return inside is None and (letter in "AKr" or xid in opened)


@settings(max_examples=500, deadline=None)
@given(st.lists(moves, max_size=25))
def test_the_grammar_takes_exactly_what_the_facts_allow(story: list[tuple[int, Any, Any]]) -> None:
    grammar = new_grammar()
    inside: str | None = None
    current: int | None = None
    opened: set[int] = set()
    for move in story:
        kind, xid, extra = move
        letter = chr(kind)
        legal = model(inside, current, opened, move)
        before = (grammar.state, grammar.xid, open_streams(grammar))
        first = extra if letter == "S" else None
        subxid = extra if letter == "A" else None
        try:
            grammar.on_control(kind, xid, first=first, subxid=subxid, lsn=LSN)
        except IllegalTransition:
            assert not legal
            assert (grammar.state, grammar.xid, open_streams(grammar)) == before
            continue
        assert legal
        if letter in "BbS":
            inside, current = letter, xid
            opened |= {xid} if letter == "S" else set()
        elif letter in "CPE":
            inside = current = None
        elif letter in "cpKr" or (letter == "A" and xid == extra):
            opened.discard(xid)
        assert set(open_streams(grammar)) == opened
        assert (grammar.state is StreamState.OUTSIDE) == (inside is None)
        assert grammar.state in TRANSITIONS
