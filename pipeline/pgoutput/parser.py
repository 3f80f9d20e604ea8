"""Bytes -> messages: pgoutput and the CopyData level below it.

Total on any input: a message, or MalformedMessage that names the message's type and LSN; never IndexError,
struct.error or UnicodeDecodeError. Every count and length is compared with the bytes that are left before
anything is allocated, so a message cannot make us hold more than a small multiple of its own size. A message
must be used up exactly: bytes left over mean that we and the server disagree on the layout (in a stream or
not, parallel or not), and then no field can be trusted.

``data`` is bytes or a memoryview of bytes, parsed in place from ``offset`` to its end, so the reader passes
what libpq gave and ``offset=HEADER_BYTES``. Nothing returned refers to ``data`` afterwards. ``lsn`` is
for errors only. Parsing does not depend on order; what is legal where is ``grammar``'s.

Messages of rows (I, U, D, T) are not parsed here: ``pipeline.decode`` decodes whole blocks of them. B and C come once
per small transaction, so messages of fixed length are unpacked by one Struct each.

Source: ``src/backend/replication/logical/proto.c`` (each ``logicalrep_read_...``), ``walsender.c`` for
CopyData. Stricter than PostgreSQL's reader where that ignores what it reads: unknown flag bits, the first
segment byte, bytes left over.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from xidstream.pipeline.errors import MalformedMessage
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.pgoutput.cursor import Buffer, MessageCursor, lsn_of, malformed, xid_of
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Keepalive,
    LogicalMessage,
    Message,
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

_UNIX: Final = POSTGRES_EPOCH_UNIX_US

_BEGIN: Final = Struct("!BQqI")
_COMMIT: Final = Struct("!BBQQq")
_STREAM_START: Final = Struct("!BIB")
_STREAM_COMMIT: Final = Struct("!BIBQQq")
_STREAM_ABORT: Final = Struct("!BII")
_STREAM_ABORT_PARALLEL: Final = Struct("!BIIQq")
# Without the type byte, because a gid follows:
_BEGIN_PREPARE: Final = Struct("!QQqI")
_PREPARE: Final = Struct("!BQQqI")
_ROLLBACK_PREPARED: Final = Struct("!BQQqqI")
_KEEPALIVE: Final = Struct("!BQqB")
_COLUMN_TAIL: Final = Struct("!Ii")

_SMALLEST_COLUMN: Final = 1 + 1 + _COLUMN_TAIL.size  # flags, an empty name, type and modifier
_REPLICA_IDENTITIES: Final = frozenset(b"dnfi")


def _fixed(data: Buffer, offset: int, layout: Struct, kind: MessageType, lsn: Lsn) -> tuple[Any, ...]:
    """Unpack a message of fixed length, its type byte included, and insist on both."""
    n_bytes = len(data) - offset
    if n_bytes != layout.size:
        raise malformed(kind.title, lsn, f"{n_bytes} bytes instead of {layout.size}")
    fields = layout.unpack_from(data, offset)
    if fields[0] != kind:
        raise malformed(kind.title, lsn, f"type byte 0x{fields[0]:02x}")
    return fields


def _no_flags(flags: int, kind: MessageType, lsn: Lsn) -> None:
    if flags != 0:
        raise malformed(kind.title, lsn, f"unknown flags 0x{flags:02x}")


# -- transactions --------------------------------------------------------------------------------------


def parse_begin(data: Buffer, *, lsn: Lsn, offset: int = 0) -> Begin:
    _, final_lsn, time, xid = _fixed(data, offset, _BEGIN, MessageType.BEGIN, lsn)
    return Begin(lsn_of(final_lsn), time + _UNIX, xid_of(xid))


def parse_commit(data: Buffer, *, lsn: Lsn, offset: int = 0) -> Commit:
    _, flags, commit_lsn, end_lsn, time = _fixed(data, offset, _COMMIT, MessageType.COMMIT, lsn)
    _no_flags(flags, MessageType.COMMIT, lsn)
    return Commit(lsn_of(commit_lsn), lsn_of(end_lsn), time + _UNIX)


def parse_origin(data: Buffer, *, lsn: Lsn, offset: int = 0) -> Origin:
    cursor = MessageCursor(data, offset, MessageType.ORIGIN, lsn)
    message = Origin(cursor.lsn("its LSN"), cursor.label("the origin's name"))
    cursor.finish()
    return message


# -- relations -----------------------------------------------------------------------------------------


def parse_relation(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Relation:
    cursor = MessageCursor(data, offset, MessageType.RELATION, lsn)
    xid = cursor.stream_xid(in_stream)
    relid = cursor.u32("its oid")
    schema = cursor.name("the schema's name") or "pg_catalog"
    table = cursor.name("the relation's name")
    identity = cursor.byte("its replica identity")
    if identity not in _REPLICA_IDENTITIES:
        raise cursor.malformed(f"unknown replica identity 0x{identity:02x}")
    columns = []
    for _ in range(cursor.count(_SMALLEST_COLUMN, "columns")):
        flags = cursor.byte("a column's flags")
        if flags > 1:
            raise cursor.malformed(f"unknown column flags 0x{flags:02x}")
        name = cursor.name("a column's name")
        type_oid, type_modifier = cursor.fields(_COLUMN_TAIL, "a column's type")
        columns.append(RelationColumn(flags == 1, name, type_oid, type_modifier))
    cursor.finish()
    return Relation(xid, relid, schema, table, chr(identity), tuple(columns))


def parse_type(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> Type:
    cursor = MessageCursor(data, offset, MessageType.TYPE, lsn)
    xid = cursor.stream_xid(in_stream)
    oid = cursor.u32("its oid")
    schema = cursor.label("the schema's name") or "pg_catalog"
    name = cursor.label("the type's name")
    cursor.finish()
    return Type(xid, oid, schema, name)


# -- messages of applications ---------------------------------------------------------------------------


def parse_logical_message(data: Buffer, *, in_stream: bool, lsn: Lsn, offset: int = 0) -> LogicalMessage:
    cursor = MessageCursor(data, offset, MessageType.MESSAGE, lsn)
    xid = cursor.stream_xid(in_stream)
    flags = cursor.byte("its flags")
    if flags > 1:
        raise cursor.malformed(f"unknown flags 0x{flags:02x}")
    message_lsn = cursor.lsn("its LSN")
    prefix = cursor.label("the prefix")
    content = cursor.counted_bytes("the content")
    cursor.finish()
    return LogicalMessage(xid, flags == 1, message_lsn, prefix, content)


# -- streams of transactions in progress -----------------------------------------------------------------


def parse_stream_start(data: Buffer, *, lsn: Lsn, offset: int = 0) -> StreamStart:
    _, xid, first = _fixed(data, offset, _STREAM_START, MessageType.STREAM_START, lsn)
    if first > 1:
        raise malformed(MessageType.STREAM_START.title, lsn, f"first segment byte 0x{first:02x}")
    return StreamStart(xid_of(xid), first == 1)


def parse_stream_stop(data: Buffer, *, lsn: Lsn, offset: int = 0) -> StreamStop:
    MessageCursor(data, offset, MessageType.STREAM_STOP, lsn).finish()
    return StreamStop()


def parse_stream_commit(data: Buffer, *, lsn: Lsn, offset: int = 0) -> StreamCommit:
    kind = MessageType.STREAM_COMMIT
    _, xid, flags, commit_lsn, end_lsn, time = _fixed(data, offset, _STREAM_COMMIT, kind, lsn)
    _no_flags(flags, kind, lsn)
    return StreamCommit(xid_of(xid), lsn_of(commit_lsn), lsn_of(end_lsn), time + _UNIX)


def parse_stream_abort(data: Buffer, *, parallel: bool = False, lsn: Lsn, offset: int = 0) -> StreamAbort:
    """``parallel``: protocol 4 with ``streaming=parallel`` was asked for, which alone adds LSN and time."""
    kind = MessageType.STREAM_ABORT
    if not parallel:
        _, xid, subxid = _fixed(data, offset, _STREAM_ABORT, kind, lsn)
        return StreamAbort(xid_of(xid), xid_of(subxid))
    _, xid, subxid, abort_lsn, time = _fixed(data, offset, _STREAM_ABORT_PARALLEL, kind, lsn)
    return StreamAbort(xid_of(xid), xid_of(subxid), lsn_of(abort_lsn), time + _UNIX)


# -- two-phase transactions ------------------------------------------------------------------------------


def parse_begin_prepare(data: Buffer, *, lsn: Lsn, offset: int = 0) -> BeginPrepare:
    fields, gid = _with_gid(data, offset, _BEGIN_PREPARE, MessageType.BEGIN_PREPARE, lsn)
    prepare_lsn, end_lsn, time, xid = fields
    return BeginPrepare(lsn_of(prepare_lsn), lsn_of(end_lsn), time + _UNIX, xid_of(xid), gid)


def parse_prepare(data: Buffer, *, lsn: Lsn, offset: int = 0) -> Prepare:
    return Prepare(*_prepare_fields(data, offset, MessageType.PREPARE, lsn))


def parse_stream_prepare(data: Buffer, *, lsn: Lsn, offset: int = 0) -> StreamPrepare:
    return StreamPrepare(*_prepare_fields(data, offset, MessageType.STREAM_PREPARE, lsn))


def parse_commit_prepared(data: Buffer, *, lsn: Lsn, offset: int = 0) -> CommitPrepared:
    return CommitPrepared(*_prepare_fields(data, offset, MessageType.COMMIT_PREPARED, lsn))


def parse_rollback_prepared(data: Buffer, *, lsn: Lsn, offset: int = 0) -> RollbackPrepared:
    kind = MessageType.ROLLBACK_PREPARED
    (flags, prepare_end, rollback_end, prepared, rolled_back, xid), gid = _with_gid(
        data, offset, _ROLLBACK_PREPARED, kind, lsn
    )
    _no_flags(flags, kind, lsn)
    return RollbackPrepared(
        lsn_of(prepare_end), lsn_of(rollback_end), prepared + _UNIX, rolled_back + _UNIX, xid_of(xid), gid
    )


def _prepare_fields(data: Buffer, offset: int, kind: MessageType, lsn: Lsn) -> tuple[Lsn, Lsn, int, Xid, str]:
    """The fields that P, p and K have in common."""
    (flags, own_lsn, end_lsn, time, xid), gid = _with_gid(data, offset, _PREPARE, kind, lsn)
    _no_flags(flags, kind, lsn)
    return lsn_of(own_lsn), lsn_of(end_lsn), time + _UNIX, xid_of(xid), gid


def _with_gid(
    data: Buffer, offset: int, layout: Struct, kind: MessageType, lsn: Lsn
) -> tuple[tuple[Any, ...], str]:
    """The fields after the type byte, then the gid that ends the message."""
    cursor = MessageCursor(data, offset, kind, lsn)
    fields = cursor.fields(layout, "its fixed fields")
    gid = cursor.label("the gid")
    cursor.finish()
    return fields, gid


# -- by type byte ----------------------------------------------------------------------------------------

_PLAIN_PARSERS: Final[dict[int, Callable[..., Message]]] = {
    MessageType.BEGIN: parse_begin,
    MessageType.COMMIT: parse_commit,
    MessageType.ORIGIN: parse_origin,
    MessageType.STREAM_START: parse_stream_start,
    MessageType.STREAM_STOP: parse_stream_stop,
    MessageType.STREAM_COMMIT: parse_stream_commit,
    MessageType.BEGIN_PREPARE: parse_begin_prepare,
    MessageType.PREPARE: parse_prepare,
    MessageType.COMMIT_PREPARED: parse_commit_prepared,
    MessageType.ROLLBACK_PREPARED: parse_rollback_prepared,
    MessageType.STREAM_PREPARE: parse_stream_prepare,
}
_STREAMABLE_PARSERS: Final[dict[int, Callable[..., Message]]] = {
    MessageType.RELATION: parse_relation,
    MessageType.TYPE: parse_type,
    MessageType.MESSAGE: parse_logical_message,
}
"""The parsers of messages that carry an xid inside a stream block. O never does."""


def parse_message(
    data: Buffer, *, in_stream: bool, parallel: bool = False, lsn: Lsn, offset: int = 0
) -> Message:
    """Parse the pgoutput message in ``data[offset:]``, which is not of a row. Raises MalformedMessage for any other.

    ``in_stream``: between Stream Start and Stream Stop. ``parallel``: see ``parse_stream_abort``.
    """
    if not 0 <= offset < len(data):
        raise malformed("empty", lsn, "it has not even a type byte")
    kind = data[offset]
    streamable = _STREAMABLE_PARSERS.get(kind)
    if streamable is not None:
        return streamable(data, in_stream=in_stream, lsn=lsn, offset=offset)
    plain = _PLAIN_PARSERS.get(kind)
    if plain is not None:
        return plain(data, lsn=lsn, offset=offset)
    if kind == MessageType.STREAM_ABORT:
        return parse_stream_abort(data, parallel=parallel, lsn=lsn, offset=offset)
    raise malformed("pgoutput", lsn, f"unknown type byte 0x{kind:02x}")


# -- CopyData --------------------------------------------------------------------------------------------


def parse_keepalive(data: Buffer) -> Keepalive:
    if len(data) != _KEEPALIVE.size:
        raise MalformedMessage(f"malformed keepalive message: {len(data)} bytes instead of {_KEEPALIVE.size}")
    kind, end_lsn, time, reply = _KEEPALIVE.unpack_from(data)
    if kind != ord("k"):
        raise malformed("keepalive", end_lsn, f"type byte 0x{kind:02x}")
    if reply > 1:
        raise malformed("keepalive", end_lsn, f"reply byte 0x{reply:02x}")
    return Keepalive(lsn_of(end_lsn), time + _UNIX, bool(reply))
