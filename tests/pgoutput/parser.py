"""Bytes -> messages of every type: those of rows here, all others by ``pipeline.pgoutput.parser``.

As total and as strict as that one: a message, or MalformedMessage that names the message's type and LSN.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

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
    XLogData,
)
from xidstream.pipeline.errors import MalformedMessage
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn
from xidstream.pipeline.pgoutput import parser
from xidstream.pipeline.pgoutput.cursor import Buffer, MessageCursor, lsn_of, malformed
from xidstream.pipeline.pgoutput.message_buffer import HEADER_BYTES
from xidstream.pipeline.pgoutput.messages import MessageType

_XLOG_DATA: Final = Struct("!BQQq")
_STATUS_UPDATE: Final = Struct("!BQQQqB")
_TRUNCATE: Final = Struct("!iB")
_KINDS: Final = {ord(kind.value): kind for kind in ColumnKind}


def tuple_data(cursor: MessageCursor, what: str) -> TupleData:
    columns = []
    for _ in range(cursor.count(1, f"columns of {what}")):
        byte = cursor.byte(what)
        kind = _KINDS.get(byte)
        if kind is None:
            raise cursor.malformed(f"a column of unknown kind 0x{byte:02x} in {what}")
        value = cursor.counted_bytes(f"a column of {what}") if kind.has_value else None
        columns.append(TupleColumn(kind, value))
    return TupleData(tuple(columns))


# -- rows ----------------------------------------------------------------------------------------------


def parse_insert(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Insert:
    cursor = MessageCursor(data, offset, MessageType.INSERT, lsn)
    xid = cursor.stream_xid(in_stream)
    relid = cursor.u32("its relation's oid")
    new = _new_tuple(cursor, cursor.byte("a tuple marker"))
    return Insert(xid, relid, new)


def parse_update(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Update:
    cursor = MessageCursor(data, offset, MessageType.UPDATE, lsn)
    xid = cursor.stream_xid(in_stream)
    relid = cursor.u32("its relation's oid")
    key = old = None
    marker = cursor.byte("a tuple marker")
    if marker == ord("K"):
        key = tuple_data(cursor, "the key tuple")
        marker = cursor.byte("a tuple marker")
    elif marker == ord("O"):
        old = tuple_data(cursor, "the old tuple")
        marker = cursor.byte("a tuple marker")
    return Update(xid, relid, key, old, _new_tuple(cursor, marker))


def parse_delete(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Delete:
    cursor = MessageCursor(data, offset, MessageType.DELETE, lsn)
    xid = cursor.stream_xid(in_stream)
    relid = cursor.u32("its relation's oid")
    key = old = None
    marker = cursor.byte("a tuple marker")
    if marker == ord("K"):
        key = tuple_data(cursor, "the key tuple")
    elif marker == ord("O"):
        old = tuple_data(cursor, "the old tuple")
    else:
        raise cursor.malformed(f"tuple marker 0x{marker:02x} instead of 'K' or 'O'")
    cursor.finish()
    return Delete(xid, relid, key, old)


def _new_tuple(cursor: MessageCursor, marker: int) -> TupleData:
    """The new tuple, which always comes last."""
    if marker != ord("N"):
        raise cursor.malformed(f"tuple marker 0x{marker:02x} instead of 'N'")
    new = tuple_data(cursor, "the new tuple")
    cursor.finish()
    return new


def parse_truncate(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Truncate:
    cursor = MessageCursor(data, offset, MessageType.TRUNCATE, lsn)
    xid = cursor.stream_xid(in_stream)
    n, flags = cursor.fields(_TRUNCATE, "its options")
    if flags > 3:
        raise cursor.malformed(f"unknown options 0x{flags:02x}")
    if n < 0 or n * 4 != cursor.remaining:
        raise cursor.malformed(f"{n} relations in {cursor.remaining} bytes")
    relids = tuple(cursor.u32("a relation's oid") for _ in range(n))
    return Truncate(xid, bool(flags & 1), bool(flags & 2), relids)


# -- by type byte ----------------------------------------------------------------------------------------

_ROW_PARSERS: Final[dict[int, Callable[..., Message]]] = {
    MessageType.INSERT: parse_insert,
    MessageType.UPDATE: parse_update,
    MessageType.DELETE: parse_delete,
    MessageType.TRUNCATE: parse_truncate,
}


def parse_message(
    data: Buffer, *, in_stream: bool, parallel: bool = False, lsn: Lsn, offset: int = 0
) -> Message:
    """As ``pipeline.pgoutput.parser.parse_message``, of every type."""
    row = _ROW_PARSERS.get(data[offset]) if 0 <= offset < len(data) else None
    if row is not None:
        return row(data, in_stream=in_stream, lsn=lsn, offset=offset)
    return parser.parse_message(data, in_stream=in_stream, parallel=parallel, lsn=lsn, offset=offset)


# -- CopyData --------------------------------------------------------------------------------------------


def parse_copy_header(data: Buffer) -> XLogData:
    """The header of one XLogData message; the pgoutput message follows at ``HEADER_BYTES``."""
    if len(data) < HEADER_BYTES:
        raise MalformedMessage(f"malformed XLogData message: {len(data)} bytes do not hold its header")
    kind, start_lsn, end_lsn, time = _XLOG_DATA.unpack_from(data)
    if kind != ord("w"):
        raise malformed("XLogData", start_lsn, f"type byte 0x{kind:02x}")
    return XLogData(lsn_of(start_lsn), lsn_of(end_lsn), time + POSTGRES_EPOCH_UNIX_US)


def parse_standby_status_update(data: Buffer) -> StandbyStatusUpdate:
    """What a client sends: for a simulated server."""
    if len(data) != _STATUS_UPDATE.size:
        raise MalformedMessage(f"malformed standby status update message: {len(data)} bytes")
    kind, write_lsn, flush_lsn, apply_lsn, time, reply = _STATUS_UPDATE.unpack_from(data)
    if kind != ord("r") or reply > 1:
        raise malformed(
            "standby status update", write_lsn, f"type byte 0x{kind:02x}, reply byte 0x{reply:02x}"
        )
    return StandbyStatusUpdate(
        lsn_of(write_lsn), lsn_of(flush_lsn), lsn_of(apply_lsn), time + POSTGRES_EPOCH_UNIX_US, bool(reply)
    )
