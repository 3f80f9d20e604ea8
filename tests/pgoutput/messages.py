"""The messages of rows, which the product decodes in whole blocks, and what else only tests look at one by one.

Fields are named and typed as in ``pipeline.pgoutput.messages``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput import messages
from xidstream.pipeline.pgoutput.messages import LogicalMessage, MessageType


class ColumnKind(enum.Enum):
    """The byte before each column of a TupleData."""

    NULL = "n"
    UNCHANGED = "u"  # an unchanged TOAST value, which the server does not know here: not NULL
    TEXT = "t"
    BINARY = "b"

    @property
    def has_value(self) -> bool:
        return self is ColumnKind.TEXT or self is ColumnKind.BINARY


@dataclass(frozen=True, slots=True)
class TupleColumn:
    """LRMF, TupleData: one column. ``value`` is None exactly for the kinds n and u; UsageError if not."""

    kind: ColumnKind
    value: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind.has_value != (self.value is not None):
            raise UsageError(f"a tuple column of kind {self.kind.value!r} with or without a value wrongly")


@dataclass(frozen=True, slots=True)
class TupleData:
    """LRMF, TupleData."""

    columns: tuple[TupleColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """LRMF, Insert."""

    type: ClassVar[MessageType] = MessageType.INSERT
    xid: Xid | None
    relid: int
    new: TupleData


@dataclass(frozen=True, slots=True)
class Update:
    """LRMF, Update. At most one of ``key`` (marker K) and ``old`` (marker O) is there; UsageError if both."""

    type: ClassVar[MessageType] = MessageType.UPDATE
    xid: Xid | None
    relid: int
    key: TupleData | None
    old: TupleData | None
    new: TupleData

    def __post_init__(self) -> None:
        if self.key is not None and self.old is not None:
            raise UsageError("an Update carries a key or an old tuple, not both")


@dataclass(frozen=True, slots=True)
class Delete:
    """LRMF, Delete. Exactly one of ``key`` (marker K) and ``old`` (marker O) is there; UsageError if not."""

    type: ClassVar[MessageType] = MessageType.DELETE
    xid: Xid | None
    relid: int
    key: TupleData | None
    old: TupleData | None

    def __post_init__(self) -> None:
        if (self.key is None) == (self.old is None):
            raise UsageError("a Delete carries either a key or an old tuple")


@dataclass(frozen=True, slots=True)
class Truncate:
    """LRMF, Truncate. ``cascade`` and ``restart_identity`` are bits 0 and 1 of one byte."""

    type: ClassVar[MessageType] = MessageType.TRUNCATE
    xid: Xid | None
    cascade: bool
    restart_identity: bool
    relids: tuple[int, ...]


RowMessage = Insert | Update | Delete | Truncate | LogicalMessage
"""What a block may hold."""

Message = RowMessage | messages.Message


@dataclass(frozen=True, slots=True)
class XLogData:
    """SRP, XLogData ('w'): the 25 byte header before each pgoutput message.

    Both LSNs are that message's own and may be 0/0 or go backwards (fact 2): never acknowledge from them.
    """

    start_lsn: Lsn
    end_lsn: Lsn
    send_timestamp_us: int


@dataclass(frozen=True, slots=True)
class StandbyStatusUpdate:
    """SRP, Standby status update ('r'), sent by the client. Only ``flush_lsn`` moves the slot."""

    write_lsn: Lsn
    flush_lsn: Lsn
    apply_lsn: Lsn
    client_timestamp_us: int
    reply_requested: bool = False
