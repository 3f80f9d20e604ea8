"""A simulated server for tests: a stream of CopyData messages, written by the writer beside the parser.

``Wire`` keeps an LSN that grows with each message, so that every message has a place of its own, and knows the
short forms of the rows that tests need.
"""

from __future__ import annotations

from tests.pgoutput import writer
from tests.pgoutput.messages import ColumnKind, Insert, Message, TupleColumn, TupleData
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
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
)

T0_US = POSTGRES_EPOCH_UNIX_US


def text_tuple(*values: str | None) -> TupleData:
    return TupleData(
        tuple(
            TupleColumn(ColumnKind.NULL) if v is None else TupleColumn(ColumnKind.TEXT, v.encode())
            for v in values
        )
    )


class Wire:
    """``out`` collects the messages; each method appends one and returns its LSN."""

    def __init__(self) -> None:
        self.lsn = 0x1000
        self.out: list[bytes] = []
        self._stream: Xid | None = None

    def take(self) -> list[bytes]:
        out, self.out = self.out, []
        return out

    def add(self, message: Message, *, at: int | None = None) -> Lsn:
        self.lsn += 8
        lsn = Lsn(self.lsn if at is None else at)
        self.out.append(writer.xlog_data(lsn, writer.write(message)))
        return lsn

    # -- plain -----------------------------------------------------------------------------------------

    def begin(self, xid: int, commit_lsn: int) -> None:
        self.add(Begin(Lsn(commit_lsn), T0_US, Xid(xid)))

    def commit(self, commit_lsn: int) -> None:
        self.add(Commit(Lsn(commit_lsn), Lsn(commit_lsn + 4), T0_US))

    def origin(self, name: str) -> None:
        self.add(Origin(Lsn(0), name))

    def relation(self, relid: int = 1, table: str = "t", columns: tuple[str, ...] = ("a",)) -> None:
        self.add(
            Relation(
                self._stream,
                relid,
                "public",
                table,
                "d",
                tuple(RelationColumn(i == 0, name, 25, -1) for i, name in enumerate(columns)),
            ),
            at=0,
        )

    def insert(self, *values: str | None, relid: int = 1, subxid: int | None = None) -> Lsn:
        xid = Xid(subxid) if subxid is not None else self._stream
        return self.add(Insert(xid, relid, text_tuple(*values)))

    def message(self, content: bytes, *, transactional: bool) -> Lsn:
        xid = self._stream if transactional else None
        return self.add(LogicalMessage(xid, transactional, Lsn(self.lsn), "prefix", content))

    # -- streams ---------------------------------------------------------------------------------------

    def start(self, xid: int, *, first: bool) -> None:
        self._stream = Xid(xid)
        self.add(StreamStart(Xid(xid), first))

    def stop(self) -> None:
        self._stream = None
        self.add(StreamStop())

    def stream_commit(self, xid: int, commit_lsn: int) -> None:
        self.add(StreamCommit(Xid(xid), Lsn(commit_lsn), Lsn(commit_lsn + 4), T0_US))

    def stream_abort(self, xid: int, subxid: int) -> None:
        self.add(StreamAbort(Xid(xid), Xid(subxid)))

    def stream_prepare(self, xid: int, gid: str, prepare_lsn: int) -> None:
        self.add(StreamPrepare(Lsn(prepare_lsn), Lsn(prepare_lsn + 4), T0_US, Xid(xid), gid))

    # -- two-phase -------------------------------------------------------------------------------------

    def begin_prepare(self, xid: int, gid: str, prepare_lsn: int) -> None:
        self.add(BeginPrepare(Lsn(prepare_lsn), Lsn(prepare_lsn + 4), T0_US, Xid(xid), gid))

    def prepare(self, xid: int, gid: str, prepare_lsn: int) -> None:
        self.add(Prepare(Lsn(prepare_lsn), Lsn(prepare_lsn + 4), T0_US, Xid(xid), gid))

    def commit_prepared(self, xid: int, gid: str, commit_lsn: int) -> None:
        self.add(CommitPrepared(Lsn(commit_lsn), Lsn(commit_lsn + 4), T0_US, Xid(xid), gid))

    def rollback_prepared(self, xid: int, gid: str, prepare_end_lsn: int, end_lsn: int) -> None:
        self.add(RollbackPrepared(Lsn(prepare_end_lsn), Lsn(end_lsn), T0_US, T0_US, Xid(xid), gid))
