"""What messages promise as values: no secrets in repr, no contradictions, picklable, frozen."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.pgoutput.messages import ColumnKind, Delete, Insert, TupleColumn, TupleData, Update
from tests.pgoutput.order import new_grammar, step
from tests.pgoutput.parser import parse_message
from xidstream.pipeline.errors import IllegalTransition, MalformedMessage, UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import (
    LogicalMessage,
    MessageType,
    StreamAbort,
    StreamCommit,
)

SECRET = "hunter2"
TUPLE = TupleData(
    (TupleColumn(ColumnKind.TEXT, SECRET.encode()), TupleColumn(ColumnKind.BINARY, SECRET.encode()))
)


@pytest.mark.parametrize(
    "message",
    [
        Insert(None, 1, TUPLE),
        Update(Xid(7), 1, TUPLE, None, TUPLE),
        Update(Xid(7), 1, None, TUPLE, TUPLE),
        Delete(None, 1, None, TUPLE),
        LogicalMessage(None, False, Lsn(1), "prefix", SECRET.encode()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_repr_shows_no_value_and_no_content(message: Insert | Update | Delete | LogicalMessage) -> None:
    assert SECRET not in repr(message)
    assert SECRET not in str(message)


@pytest.mark.parametrize("kind", "IUDM")
def test_errors_of_row_messages_show_no_value(kind: str) -> None:
    body = bytes((0, 0, 0, 1)) + b"N\0\1t" + (99).to_bytes(4, "big") + SECRET.encode()
    with pytest.raises(MalformedMessage) as raised:
        parse_message(kind.encode() + body, in_stream=False, lsn=Lsn(1))
    assert SECRET not in str(raised.value)


def test_errors_survive_pickling() -> None:
    with pytest.raises(MalformedMessage) as malformed:
        parse_message(b"B", in_stream=False, lsn=Lsn(0x16B3748))
    with pytest.raises(IllegalTransition) as illegal:
        step(new_grammar(), StreamCommit(Xid(5), Lsn(1), Lsn(2), 3), Lsn(0x16B3748))
    for error in (malformed.value, illegal.value):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert "0/16B3748" in str(copy)
        assert copy.remedy == error.remedy


def test_messages_survive_pickling() -> None:
    message = Update(Xid(7), 1, None, TUPLE, TUPLE)
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message
    assert type(copy.xid) is Xid


def test_parsed_ids_are_typed() -> None:
    message = parse_message(bytes.fromhex("63" + "00000304" + "00" + "01" * 24), in_stream=False, lsn=Lsn(0))
    assert isinstance(message, StreamCommit)
    assert type(message.xid) is Xid
    assert type(message.commit_lsn) is Lsn
    assert type(message.end_lsn) is Lsn


def test_messages_are_frozen_and_slotted() -> None:
    message = StreamAbort(Xid(1), Xid(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.subxid = Xid(3)  # type: ignore[misc]
    assert not hasattr(message, "__dict__")


def test_message_types_are_the_bytes_of_the_wire() -> None:
    assert "".join(chr(kind) for kind in MessageType) == "BCORYIUDTMSEcAbPKrp"
    assert MessageType.STREAM_ABORT.title == "STREAM ABORT"
    by_type: dict[int, str] = {MessageType.BEGIN: "found"}
    assert by_type[b"B"[0]] == "found"


def test_contradictory_messages_cannot_be_made() -> None:
    with pytest.raises(UsageError):
        Update(None, 1, TUPLE, TUPLE, TUPLE)
    with pytest.raises(UsageError):
        Delete(None, 1, None, None)
    with pytest.raises(UsageError):
        Delete(None, 1, TUPLE, TUPLE)
    with pytest.raises(UsageError):
        StreamAbort(Xid(1), Xid(2), Lsn(3))
    with pytest.raises(UsageError):
        TupleColumn(ColumnKind.TEXT)
    with pytest.raises(UsageError):
        TupleColumn(ColumnKind.NULL, b"")
