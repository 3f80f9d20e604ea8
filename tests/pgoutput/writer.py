"""Messages -> bytes: the exact inverse of ``parser``, as the server writes them.

``parse_message(write(m)) == m`` for every message, and ``write`` of what was parsed gives the server's bytes again.

A row message is written for inside a stream block exactly if its ``xid`` is not None, and a StreamAbort for
``streaming=parallel`` exactly if it has an LSN: the messages carry what the layout depends on, so there is no
mode to pass and none to contradict.

Raises UsageError for what the wire cannot hold (a NUL in a name, a number too wide), never struct.error.

Source: ``src/backend/replication/logical/proto.c``, each ``logicalrep_write_...``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from tests.pgoutput.messages import (
    Delete,
    Insert,
    Message,
    StandbyStatusUpdate,
    Truncate,
    TupleData,
    Update,
    XLogData,
)
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Keepalive,
    LogicalMessage,
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

_NO_FLAGS: Final = 0


def write(message: Message) -> bytes:
    """One pgoutput message, without CopyData framing. Raises UsageError for what the wire cannot hold."""
    try:
        return bytes((message.type,)) + _BODIES[type(message)](message)
    except struct.error as error:
        raise UsageError(f"a field of a {type(message).__name__} is out of range: {error}") from None
    except UnicodeEncodeError:
        raise UsageError(f"a name of a {type(message).__name__} cannot be written in UTF-8") from None


def xlog_data(
    lsn: Lsn, payload: bytes, *, end_lsn: Lsn | None = None, send_timestamp_us: int = POSTGRES_EPOCH_UNIX_US
) -> bytes:
    """A CopyData message around ``payload``. ``end_lsn`` defaults to ``lsn``, as pgoutput's always is."""
    return write_copy_header(XLogData(lsn, lsn if end_lsn is None else end_lsn, send_timestamp_us)) + payload


def write_copy_header(header: XLogData) -> bytes:
    return _copy("!cQQq", b"w", header.start_lsn, header.end_lsn, _time(header.send_timestamp_us))


def keepalive(
    end_lsn: Lsn, *, reply_requested: bool = False, send_timestamp_us: int = POSTGRES_EPOCH_UNIX_US
) -> bytes:
    return write_keepalive(Keepalive(end_lsn, send_timestamp_us, reply_requested))


def write_keepalive(message: Keepalive) -> bytes:
    return _copy("!cQq?", b"k", message.end_lsn, _time(message.send_timestamp_us), message.reply_requested)


def write_standby_status_update(message: StandbyStatusUpdate) -> bytes:
    return _copy(
        "!cQQQq?",
        b"r",
        message.write_lsn,
        message.flush_lsn,
        message.apply_lsn,
        _time(message.client_timestamp_us),
        message.reply_requested,
    )


def _copy(layout: str, *fields: object) -> bytes:
    try:
        return struct.pack(layout, *fields)
    except struct.error as error:
        raise UsageError(f"a field of a CopyData message is out of range: {error}") from None


# -- fields ----------------------------------------------------------------------------------------------


def _time(unix_us: int) -> int:
    return unix_us - POSTGRES_EPOCH_UNIX_US


def _string(text: str) -> bytes:
    encoded = text.encode()
    if b"\0" in encoded:
        raise UsageError("a name with a NUL cannot be written")
    return encoded + b"\0"


def _schema(name: str) -> bytes:
    """The server writes nothing for the most frequent schema."""
    return b"\0" if name == "pg_catalog" else _string(name)


def _stream_xid(xid: Xid | None) -> bytes:
    return b"" if xid is None else struct.pack("!I", xid)


def _tuple(marker: bytes, data: TupleData) -> bytes:
    parts = [marker, struct.pack("!h", len(data.columns))]
    for column in data.columns:
        parts.append(column.kind.value.encode())
        if column.value is not None:
            parts += (struct.pack("!i", len(column.value)), column.value)
    return b"".join(parts)


# -- messages --------------------------------------------------------------------------------------------


def _begin(m: Begin) -> bytes:
    return struct.pack("!QqI", m.final_lsn, _time(m.commit_timestamp_us), m.xid)


def _commit(m: Commit) -> bytes:
    return struct.pack("!BQQq", _NO_FLAGS, m.commit_lsn, m.end_lsn, _time(m.commit_timestamp_us))


def _origin(m: Origin) -> bytes:
    return struct.pack("!Q", m.commit_lsn) + _string(m.name)


def _relation(m: Relation) -> bytes:
    parts = [
        _stream_xid(m.xid),
        struct.pack("!I", m.relid),
        _schema(m.schema),
        _string(m.table),
        m.replica_identity.encode(),
        struct.pack("!h", len(m.columns)),
    ]
    for column in m.columns:
        parts.append(struct.pack("!B", column.is_key))
        parts.append(_string(column.name))
        parts.append(struct.pack("!Ii", column.type_oid, column.type_modifier))
    return b"".join(parts)


def _type(m: Type) -> bytes:
    return _stream_xid(m.xid) + struct.pack("!I", m.oid) + _schema(m.schema) + _string(m.name)


def _row_head(m: Insert | Update | Delete) -> bytes:
    return _stream_xid(m.xid) + struct.pack("!I", m.relid)


def _insert(m: Insert) -> bytes:
    return _row_head(m) + _tuple(b"N", m.new)


def _update(m: Update) -> bytes:
    return _row_head(m) + _old(m) + _tuple(b"N", m.new)


def _delete(m: Delete) -> bytes:
    return _row_head(m) + _old(m)


def _old(m: Update | Delete) -> bytes:
    if m.key is not None:
        return _tuple(b"K", m.key)
    return b"" if m.old is None else _tuple(b"O", m.old)


def _truncate(m: Truncate) -> bytes:
    n = len(m.relids)
    options = m.cascade | m.restart_identity << 1
    return _stream_xid(m.xid) + struct.pack(f"!iB{n}I", n, options, *m.relids)


def _logical_message(m: LogicalMessage) -> bytes:
    head = _stream_xid(m.xid) + struct.pack("!?Q", m.transactional, m.lsn) + _string(m.prefix)
    return head + struct.pack("!i", len(m.content)) + m.content


def _stream_start(m: StreamStart) -> bytes:
    return struct.pack("!I?", m.xid, m.first_segment)


def _stream_stop(m: StreamStop) -> bytes:
    return b""


def _stream_commit(m: StreamCommit) -> bytes:
    return struct.pack("!IBQQq", m.xid, _NO_FLAGS, m.commit_lsn, m.end_lsn, _time(m.commit_timestamp_us))


def _stream_abort(m: StreamAbort) -> bytes:
    if m.abort_lsn is None or m.abort_timestamp_us is None:
        return struct.pack("!II", m.xid, m.subxid)
    return struct.pack("!IIQq", m.xid, m.subxid, m.abort_lsn, _time(m.abort_timestamp_us))


def _begin_prepare(m: BeginPrepare) -> bytes:
    return struct.pack("!QQqI", m.prepare_lsn, m.end_lsn, _time(m.prepare_timestamp_us), m.xid) + _string(
        m.gid
    )


def _prepare(m: Prepare | StreamPrepare) -> bytes:
    time = _time(m.prepare_timestamp_us)
    return struct.pack("!BQQqI", _NO_FLAGS, m.prepare_lsn, m.end_lsn, time, m.xid) + _string(m.gid)


def _commit_prepared(m: CommitPrepared) -> bytes:
    time = _time(m.commit_timestamp_us)
    return struct.pack("!BQQqI", _NO_FLAGS, m.commit_lsn, m.end_lsn, time, m.xid) + _string(m.gid)


def _rollback_prepared(m: RollbackPrepared) -> bytes:
    times = _time(m.prepare_timestamp_us), _time(m.rollback_timestamp_us)
    lsns = m.prepare_end_lsn, m.rollback_end_lsn
    return struct.pack("!BQQqqI", _NO_FLAGS, *lsns, *times, m.xid) + _string(m.gid)


_BODIES: Final[dict[type[Any], Callable[[Any], bytes]]] = {
    Begin: _begin,
    Commit: _commit,
    Origin: _origin,
    Relation: _relation,
    Type: _type,
    Insert: _insert,
    Update: _update,
    Delete: _delete,
    Truncate: _truncate,
    LogicalMessage: _logical_message,
    StreamStart: _stream_start,
    StreamStop: _stream_stop,
    StreamCommit: _stream_commit,
    StreamAbort: _stream_abort,
    BeginPrepare: _begin_prepare,
    Prepare: _prepare,
    CommitPrepared: _commit_prepared,
    RollbackPrepared: _rollback_prepared,
    StreamPrepare: _prepare,
}
