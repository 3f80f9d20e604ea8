"""The messages of pgoutput that Python looks at, protocols 1 to 4, and the keepalive, as values.

One frozen dataclass per message, fields in wire order and under the names of PostgreSQL's manual and
``logicalproto.h``, chapter "Logical Replication Message Formats" (that is what "LRMF" cites below) or
"Streaming Replication Protocol" ("SRP"). ``parser`` makes them of bytes; the two modules change together. Messages of
rows have a type here and no class, because rows are decoded in whole blocks.

Where a field differs from the wire, it is said here once:

- LSNs are ``Lsn``, transaction ids ``Xid``, oids plain int (they index ``RelationVersion`` mappings).
- ``..._timestamp_us`` are microseconds since the Unix epoch, UTC; the wire counts from 2000-01-01.
- ``xid: Xid | None`` in front of R, Y and M is the Int32 that only a stream block has: the *sub*transaction, except
  in M, where it is the top-level transaction. None means outside a stream block.
- Counts, and the flag bytes that the manual calls unused, have no field: the parser insists on their only
  legal value, because a flag that we do not know may change what the message means.

The content of a logical message is never part of ``repr``, so a message can be put in a log. Considered and rejected:
one class with a type field (no exact types for callers).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid


class MessageType(enum.IntEnum):
    """The first byte of a pgoutput message. Hashes and compares as the int that indexing bytes gives."""

    BEGIN = ord("B")
    COMMIT = ord("C")
    ORIGIN = ord("O")
    RELATION = ord("R")
    TYPE = ord("Y")
    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    MESSAGE = ord("M")
    STREAM_START = ord("S")
    STREAM_STOP = ord("E")
    STREAM_COMMIT = ord("c")
    STREAM_ABORT = ord("A")
    BEGIN_PREPARE = ord("b")
    PREPARE = ord("P")
    COMMIT_PREPARED = ord("K")
    ROLLBACK_PREPARED = ord("r")
    STREAM_PREPARE = ord("p")

    @property
    def title(self) -> str:
        """``STREAM ABORT``: how errors name the message."""
        return self.name.replace("_", " ")


# -- transactions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """LRMF, Begin. ``final_lsn`` is the commit LSN of the transaction; it does not order (fact 11)."""

    type: ClassVar[MessageType] = MessageType.BEGIN
    final_lsn: Lsn
    commit_timestamp_us: int
    xid: Xid


@dataclass(frozen=True, slots=True)
class Commit:
    """LRMF, Commit."""

    type: ClassVar[MessageType] = MessageType.COMMIT
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_timestamp_us: int


@dataclass(frozen=True, slots=True)
class Origin:
    """LRMF, Origin. ``commit_lsn`` is the LSN on the origin server, 0 in streams."""

    type: ClassVar[MessageType] = MessageType.ORIGIN
    commit_lsn: Lsn
    name: str


# -- relations -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """LRMF, Relation: one column. ``is_key`` is flag bit 0, the only one."""

    is_key: bool
    name: str
    type_oid: int
    type_modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """LRMF, Relation. ``schema`` is ``pg_catalog`` where the wire has an empty name.

    ``replica_identity`` is ``pg_class.relreplident``: one of ``d n f i``.
    """

    type: ClassVar[MessageType] = MessageType.RELATION
    xid: Xid | None
    relid: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """LRMF, Type. Of a domain ``oid`` is the domain's, ``schema`` and ``name`` are the base type's."""

    type: ClassVar[MessageType] = MessageType.TYPE
    xid: Xid | None
    oid: int
    schema: str
    name: str


# -- messages of applications ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """LRMF, Message: ``pg_logical_emit_message``. ``xid`` is the top-level one, never a subtransaction's.

    Not transactional ones have no xid and come outside of transactions.
    """

    type: ClassVar[MessageType] = MessageType.MESSAGE
    xid: Xid | None
    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes = field(repr=False)


# -- streams of transactions in progress (protocol 2) ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamStart:
    """LRMF, Stream Start. ``first_segment`` tells the first stream block of this transaction."""

    type: ClassVar[MessageType] = MessageType.STREAM_START
    xid: Xid
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """LRMF, Stream Stop."""

    type: ClassVar[MessageType] = MessageType.STREAM_STOP


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """LRMF, Stream Commit."""

    type: ClassVar[MessageType] = MessageType.STREAM_COMMIT
    xid: Xid
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_timestamp_us: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """LRMF, Stream Abort. ``subxid == xid`` aborts the whole transaction.

    The last two are there, both, only under protocol 4 with ``streaming=parallel``; else both None.
    """

    type: ClassVar[MessageType] = MessageType.STREAM_ABORT
    xid: Xid
    subxid: Xid
    abort_lsn: Lsn | None = None
    abort_timestamp_us: int | None = None

    def __post_init__(self) -> None:
        if (self.abort_lsn is None) != (self.abort_timestamp_us is None):
            raise UsageError("a StreamAbort carries both an LSN and a timestamp, or neither")


# -- two-phase transactions (protocol 3) -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """LRMF, Begin Prepare."""

    type: ClassVar[MessageType] = MessageType.BEGIN_PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_timestamp_us: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """LRMF, Prepare."""

    type: ClassVar[MessageType] = MessageType.PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_timestamp_us: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """LRMF, Commit Prepared."""

    type: ClassVar[MessageType] = MessageType.COMMIT_PREPARED
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_timestamp_us: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """LRMF, Rollback Prepared."""

    type: ClassVar[MessageType] = MessageType.ROLLBACK_PREPARED
    prepare_end_lsn: Lsn
    rollback_end_lsn: Lsn
    prepare_timestamp_us: int
    rollback_timestamp_us: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """LRMF, Stream Prepare."""

    type: ClassVar[MessageType] = MessageType.STREAM_PREPARE
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_timestamp_us: int
    xid: Xid
    gid: str


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)


# -- CopyData --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keepalive:
    """SRP, Primary keepalive message ('k'). ``end_lsn`` is the end of what the server has decoded."""

    end_lsn: Lsn
    send_timestamp_us: int
    reply_requested: bool
