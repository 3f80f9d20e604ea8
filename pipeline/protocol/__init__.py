"""pgoutput as values: messages, bytes to messages, messages to bytes, and their legal order.

    messages   one frozen dataclass per message, fields in wire order
    parser     bytes -> messages; any bytes give a message or MalformedMessage
    cursor     the parser's checked walk through a message
    writer     messages -> bytes, the parser's exact inverse
    grammar    which message may come where, as a table

Parsing knows nothing of order and the grammar nothing of bytes: the two ways in which a server can break
protocol (MalformedMessage, IllegalTransition) are found by different code, and each is tested alone. Nothing
here reads a socket, keeps rows, or knows what a relation means; and the hot path, rows in whole blocks, does
not come through here at all, but through ``pipeline.decode``.

Protocol 1 is PostgreSQL 10's, 2 adds streams (14), 3 two-phase (15), 4 the LSN and time of parallel stream
aborts (16). The layouts of a version are kept by the later ones, so the version itself is no parameter: only
being inside a stream block, and ``streaming=parallel``, change how a message is read.
"""

from xidstream.pipeline.protocol.grammar import TRANSITIONS, Grammar, State
from xidstream.pipeline.protocol.messages import (
    Begin,
    BeginPrepare,
    ColumnKind,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Keepalive,
    LogicalMessage,
    Message,
    MessageType,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    RowMessage,
    StandbyStatusUpdate,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleColumn,
    TupleData,
    Type,
    Update,
    XLogData,
)
from xidstream.pipeline.protocol.parser import (
    COPY_HEADER_BYTES,
    parse_copy_header,
    parse_keepalive,
    parse_message,
    parse_standby_status_update,
)
from xidstream.pipeline.protocol.writer import keepalive, write, write_standby_status_update, xlog_data

__all__ = [
    "COPY_HEADER_BYTES",
    "TRANSITIONS",
    "Begin",
    "BeginPrepare",
    "ColumnKind",
    "Commit",
    "CommitPrepared",
    "Delete",
    "Grammar",
    "Insert",
    "Keepalive",
    "LogicalMessage",
    "Message",
    "MessageType",
    "Origin",
    "Prepare",
    "Relation",
    "RelationColumn",
    "RollbackPrepared",
    "RowMessage",
    "StandbyStatusUpdate",
    "State",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "TupleColumn",
    "TupleData",
    "Type",
    "Update",
    "XLogData",
    "keepalive",
    "parse_copy_header",
    "parse_keepalive",
    "parse_message",
    "parse_standby_status_update",
    "write",
    "write_standby_status_update",
    "xlog_data",
]
