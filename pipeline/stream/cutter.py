"""Cut the stream of one slot into blocks, looking at no row.

The walsender needs about 2 microseconds for a row and so the reader has that long, on a core that it shares. A row
message is therefore appended to ``target`` by a compiled loop, and so are B and C of small transactions; ``settle``
then takes note of where the stream stands. Only the rare messages (R, Y, S, E, c, A, p, b, P, K, r, O, M, T) come to
``feed``, and of B and C only what a block's ends need is parsed. ``feed`` takes any message, so a stream may come
through it alone.

Messages are taken in order, and ``settle`` and ``feed`` return the events that they complete, mostly none. Where the
messages of a transaction go:

- small plain transactions are gathered whole into a *plain block* (``plain_transactions``);
- rows of stream blocks are gathered for each transaction (``open_streams``);
- a plain transaction that outgrows a block is *promoted*: it goes on by itself, in blocks of its own like a streamed
  one, and so does every two-phase one from its BEGIN PREPARE on.

An example. Two transactions are streamed, 740 with a savepoint (subxid 741) and 750, and a small one, 760, is not
(the columns are what stands in the stream, and what comes out)::

    S 740, 3 rows, E                                    gathered in 740's own buffer
    S 750, 2 rows, E                                    gathered in 750's
    B, 1 row, C   (760 commits)                         gathered in the plain block
    S 740, 2 rows of 741, E                             gathered after 740's 3 rows
    A 740/741     (ROLLBACK TO SAVEPOINT)               noted: it is told with the next block of 740, or with its end
    c 740         (740 commits)                         PlainBlock(760), TransactionBlock(740: 5 rows),
                                                        Committed(740, aborted subxids: 741)
    A 750/750     (750 is rolled back as a whole)       nothing: none of its rows were cut, so nobody has them

The plain block comes first, because 760 committed before 740. Its buffer drops the 2 rows of 741 (``Survivors``).

What may come where is the grammar's: its table tells ``feed``, as it tells the compiled loop, which messages need no
look, and it is asked about all others.

Invariants: events come in stream order, and everything gathered of a transaction is cut before its end is;
a commit of any kind is preceded by the plain block of all commits before it; within one block a relid has one
version, because a changed R cuts first; the bytes gathered stay under ``pending_limit_bytes`` (the largest
open transactions are cut when they would not).

After an exception the cutter must not be used again: the connection is made anew, and the server repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

from xidstream.pipeline.errors import IllegalTransition, XidstreamError
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.pgoutput.grammar import Grammar
from xidstream.pipeline.pgoutput.message_buffer import (
    HEADER_BYTES,
    IN_PLAIN,
    IN_ROWS,
    LOOK,
    OUTSIDE,
    TRANSITIONS,
    MessageBuffer,
)
from xidstream.pipeline.pgoutput.messages import (
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    MessageType,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Type,
)
from xidstream.pipeline.pgoutput.parser import parse_message
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream.block_maker import BlockMaker
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.stream.open_streams import OpenStreams
from xidstream.pipeline.stream.pending import NO_EVENTS, CopyData, PendingMessages, lsn_of
from xidstream.pipeline.stream.plain_transactions import PlainTransactions
from xidstream.pipeline.stream.relation_book import RelationBook
from xidstream.pipeline.stream.stream_events import (
    CommittedPrepared,
    Position,
    RolledBackPrepared,
    StreamEvent,
    Unsendable,
)

_MOVES: Final = [
    bytes(row) for row in TRANSITIONS
]  # an item of bytes is found ten times as fast as an array's
_BEGIN, _COMMIT, _START, _STOP = b"BCSE"
_START_XID: Final = slice(HEADER_BYTES + 1, HEADER_BYTES + 5)
_START_BYTES: Final = HEADER_BYTES + 6
_STOP_BYTES: Final = HEADER_BYTES + 1
_BEHIND_PLAIN_BLOCK: Final = frozenset(b"cpbPKr")
"""The plain transactions that came before these are cut first."""
_ALONE_BYTES: Final = 512 << 20
"""From here on a message is a block of its own. Its value may be in two rows of one column, where an old tuple fills
what the new one leaves out, and a column of a block has room for 2 GiB."""


class StreamCutter:
    """See the module. ``parallel`` is what START_REPLICATION asked for; into ``spares`` whoever has copied a block's
    payload may give it back. ``ledger``: that of the reader's process."""

    def __init__(
        self,
        *,
        block_bytes: int,
        pending_limit_bytes: int,
        parallel: bool,
        spares: Spares | None = None,
        ledger: TransactionLedger | None = None,
        column_names: ColumnNames = MappingProxyType({}),
    ) -> None:
        self._spares = spares or Spares(0)
        """Arrays that messages were gathered in, to be used again."""
        self._block_bytes = block_bytes
        """A block is cut when it has so many bytes."""
        self._parallel = parallel
        """Whether an A has the LSN and the time of the abort."""
        ledger = ledger or TransactionLedger()
        self._grammar = Grammar(ledger)
        """Where the stream stands, and which messages may come."""
        self._book = RelationBook(column_names=column_names)
        """Which relation version holds for which row."""
        self._maker = BlockMaker(self._book)
        """Makes blocks, each with the relations that its rows need."""
        self._plain = PlainTransactions(self._spares, self._maker)
        """The small plain transactions that are gathered."""
        self._streams = OpenStreams(ledger, self._spares, self._maker, self._book, pending_limit_bytes)
        """The streamed transactions that are open, but for ``_current``."""
        self._mode = OUTSIDE
        """The messages that the compiled loop takes without a look."""
        self._current: PendingMessages | None = None
        """The transaction that rows are appended to; not None exactly where the mode is IN_ROWS."""

    # -- what the shell asks ---------------------------------------------------------------------------

    @property
    def n_messages_cut(self) -> int:
        return self._maker.n_messages

    @property
    def pending_bytes(self) -> int:
        """Bytes gathered and not cut yet. Any thread may ask: so ``_current`` is looked at once."""
        current = self._current
        n_current = 0 if current is None else current.n_bytes
        return self._plain.n_bytes + self._streams.n_waiting_bytes + n_current

    @property
    def whole_bytes(self) -> int:
        """Bytes of whole small transactions that wait for ``flush``."""
        return self._plain.whole_bytes

    @property
    def has_open_rows(self) -> bool:
        """Whether rows of an open transaction wait here."""
        return self._streams.has_rows or (self._current is not None and self._current.n_messages > 0)

    @property
    def open_transactions(self) -> int:
        own = self._current is not None and not self._current.streamed
        return len(self._streams) + own

    # -- the stream ------------------------------------------------------------------------------------

    @property
    def target(self) -> MessageBuffer:
        """Where the messages go that need no look; its mode says which these are. ``settle`` must follow."""
        target = self._plain if self._current is None else self._current
        target.make_room()
        target.mode = self._mode
        return target

    def settle(self) -> Sequence[StreamEvent]:
        """Take note of what was appended to ``target``, perhaps many transactions."""
        if self._current is not None:
            return self._cut(self._current) if self._current.n_bytes >= self._block_bytes else NO_EVENTS
        plain = self._plain
        if plain.mode != self._mode:
            self._move_plain(plain.mode)
        return self._cut_plain() if plain.n_bytes >= self._block_bytes else NO_EVENTS

    def feed(self, data: CopyData) -> Sequence[StreamEvent]:
        """Take one XLogData message. Raises ProtocolViolation, naming its LSN, for one that is not legal."""
        try:
            kind = data[HEADER_BYTES]
        except IndexError:
            raise IllegalTransition(f"an XLogData message of {len(data)} bytes holds no message") from None
        after = _MOVES[self._mode][kind]
        if after == self._mode:
            return self._append(data)
        if after != LOOK:
            self._move_plain(after)
            if after == IN_PLAIN:
                return self._append(data)
            self._plain.end_transaction(data)
            return self.flush() if self._plain.n_bytes >= self._block_bytes else NO_EVENTS
        if kind == _START and len(data) == _START_BYTES and not data[-1]:
            # A stream that is open goes on. With many of them the server sends pieces of some hundred rows, and a
            # message that is parsed in full costs as much as all these.
            xid = Xid(int.from_bytes(data[_START_XID], "big"))
            return self._enter_stream(xid, first=False, lsn=lsn_of(data))
        if kind == _STOP and len(data) == _STOP_BYTES:
            self._grammar.on_control(_STOP, lsn=lsn_of(data))
            self._current, self._mode = None, OUTSIDE
            return self._streams.stop()
        return self._look(kind, data)

    def position(self, wal_end: Lsn) -> Sequence[StreamEvent]:
        """A keepalive said that all up to ``wal_end`` was decoded; nothing gathered may be overtaken by it."""
        if self._mode != OUTSIDE:
            return NO_EVENTS
        return (*self.flush(), Position(wal_end))

    def flush(self) -> Sequence[StreamEvent]:
        """Cut the whole plain transactions gathered so far."""
        return self._plain.flush()

    def flush_open(self) -> Sequence[StreamEvent]:
        """Cut what was gathered of open transactions, so that it does not wait for their end."""
        events = self._streams.cut_all()
        if self._current is None or self._current.streamed:
            return events
        return [*events, *self._cut(self._current)]

    def unsendable(self, error: XidstreamError) -> tuple[Sequence[StreamEvent], Unsendable]:
        """The server ended the stream with ``error``: the last events, and the transaction that it was sending."""
        events = self.flush()
        xid, lsn = Xid(0), INVALID_LSN
        if self._current is not None:
            xid, lsn = self._current.xid, self._current.commit_lsn
        elif self._mode == IN_PLAIN:
            begin = self._plain.open_begin()
            xid, lsn = begin.xid, begin.final_lsn
        return events, Unsendable(xid, lsn, _naming(error, xid, lsn))

    # -- where messages go -----------------------------------------------------------------------------

    def _move_plain(self, mode: int) -> None:
        """A small transaction began or ended, or several did, and the last of these is in ``mode`` now."""
        self._grammar.on_control(_COMMIT if mode == OUTSIDE else _BEGIN)
        self._mode = mode

    def _set_current(self, current: PendingMessages | None) -> None:
        self._current = current
        self._mode = OUTSIDE if current is None else IN_ROWS

    def _enter_stream(self, xid: Xid, *, first: bool, lsn: Lsn) -> Sequence[StreamEvent]:
        self._grammar.on_control(_START, xid, first=first, lsn=lsn)
        self._current, self._mode = self._streams.start(xid, lsn), IN_ROWS
        return NO_EVENTS

    def _append(self, data: CopyData) -> Sequence[StreamEvent]:
        """To the transaction that is open."""
        if len(data) >= _ALONE_BYTES:
            return self._append_alone(data)
        target = self._plain if self._current is None else self._current
        target.append(data)
        if target.n_bytes < self._block_bytes:
            return NO_EVENTS
        return self._cut_plain() if self._current is None else self._cut(self._current)

    def _append_alone(self, data: CopyData) -> Sequence[StreamEvent]:
        if self._current is None:
            events = [*self.flush(), *self._promote()]
        else:
            events = list(self._cut(self._current))
        assert self._current is not None
        self._current.append(data)
        return [*events, *self._cut(self._current)]

    def _cut(self, current: PendingMessages) -> Sequence[StreamEvent]:
        return self._streams.cut(current) if current.streamed else self._maker.cut(current)

    def _cut_plain(self) -> Sequence[StreamEvent]:
        """A block of small transactions is full: it is all theirs, or the last one has outgrown it."""
        events = self.flush()
        return [*events, *self._promote()] if self._plain.n_bytes >= self._block_bytes else events

    def _promote(self) -> Sequence[StreamEvent]:
        """The open plain transaction goes on by itself."""
        promoted = self._plain.promote()
        self._set_current(promoted)
        return self._cut(promoted)

    # -- rare messages ---------------------------------------------------------------------------------

    def _look(self, kind: int, data: CopyData) -> Sequence[StreamEvent]:
        if kind in b"IUDT" or (kind == MessageType.MESSAGE and self._mode != OUTSIDE):
            self._grammar.check(kind, lsn=lsn_of(data))
            return self._append(data)
        in_stream = self._current is not None and self._current.streamed
        lsn = lsn_of(data)
        message = parse_message(
            data, in_stream=in_stream, parallel=self._parallel, lsn=lsn, offset=HEADER_BYTES
        )
        if isinstance(message, StreamStart):
            return self._enter_stream(message.xid, first=message.first_segment, lsn=lsn)
        staying = self._STAYING.get(kind)
        if staying is not None:
            return staying(self, message, data)
        subxid = message.subxid if isinstance(message, StreamAbort) else None
        self._grammar.on_control(kind, getattr(message, "xid", None), subxid=subxid, lsn=lsn)
        events = self.flush() if kind in _BEHIND_PLAIN_BLOCK else NO_EVENTS
        return [*events, *self._MOVING[kind](self, message)]

    @property
    def _stream(self) -> PendingMessages | None:
        """The open stream in which R and Y hold, as the book has it."""
        return self._current if self._current is not None and self._current.streamed else None

    def _type(self, message: Type, data: CopyData) -> Sequence[StreamEvent]:
        self._grammar.check(MessageType.TYPE, lsn=lsn_of(data))
        self._book.add_type(self._stream, message)
        return NO_EVENTS

    def _relation(self, message: Relation, data: CopyData) -> Sequence[StreamEvent]:
        self._grammar.check(MessageType.RELATION, lsn=lsn_of(data))
        stream = self._stream
        body = bytes(data[HEADER_BYTES + 1 + (4 if stream is not None else 0) :])
        events: Sequence[StreamEvent] = NO_EVENTS
        if self._book.changes(stream, message, body):
            if self._current is not None:
                events = self._cut(self._current)
            else:
                events = self.flush()
                if self._plain.has_open_rows:
                    events = [*events, *self._promote()]
        self._book.declare(stream, message, body)
        return events

    def _origin(self, message: Origin, data: CopyData) -> Sequence[StreamEvent]:
        if self._current is None:
            self._grammar.check(MessageType.ORIGIN, lsn=lsn_of(data))
            return self._append(data)
        self._grammar.on_control(MessageType.ORIGIN, lsn=lsn_of(data))
        self._current.origin = message.name
        return NO_EVENTS

    def _message_between(self, message: LogicalMessage, data: CopyData) -> Sequence[StreamEvent]:
        self._grammar.check(MessageType.MESSAGE, transactional=message.transactional, lsn=lsn_of(data))
        # Between transactions: it is whole by itself, and keeps its place among them.
        self._plain.add_whole(data)
        return self.flush() if self._plain.n_bytes >= self._block_bytes else NO_EVENTS

    def _commit(self, message: Commit) -> Sequence[StreamEvent]:
        promoted = self._take_current()
        return [*self._cut(promoted), promoted.committed(message)]

    def _begin_prepare(self, message: BeginPrepare) -> Sequence[StreamEvent]:
        lsn = message.prepare_lsn
        self._set_current(PendingMessages(self._spares, message.xid, lsn, commit_lsn=lsn))
        return NO_EVENTS

    def _prepare(self, message: Prepare) -> Sequence[StreamEvent]:
        if self._current is None:
            # Without its b: a transaction that only locked rows (PostgreSQL 18). It holds nothing, and yet K follows.
            return (PendingMessages(self._spares, message.xid, message.prepare_lsn).prepared(message),)
        prepared = self._take_current()
        return [*self._cut(prepared), prepared.prepared(message)]

    def _take_current(self) -> PendingMessages:
        current = self._current
        assert current is not None
        self._set_current(None)
        return current

    def _commit_prepared(self, message: CommitPrepared) -> Sequence[StreamEvent]:
        end = TransactionEnd(
            xid=message.xid,
            commit_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_timestamp_us=message.commit_timestamp_us,
            gid=message.gid,
        )
        return (*self._streams.forget(message.xid), CommittedPrepared(end))

    def _rollback_prepared(self, message: RollbackPrepared) -> Sequence[StreamEvent]:
        rolled_back = RolledBackPrepared(
            message.xid, message.gid, message.prepare_end_lsn, message.rollback_end_lsn
        )
        return (*self._streams.forget(message.xid), rolled_back)

    def _stream_commit(self, message: StreamCommit) -> Sequence[StreamEvent]:
        return self._streams.commit(message)

    def _stream_prepare(self, message: StreamPrepare) -> Sequence[StreamEvent]:
        return self._streams.prepare(message)

    def _stream_abort(self, message: StreamAbort) -> Sequence[StreamEvent]:
        return self._streams.abort(message)

    _STAYING: ClassVar[Mapping[int, Callable[[StreamCutter, Any, CopyData], Sequence[StreamEvent]]]] = {
        MessageType.TYPE: _type,
        MessageType.RELATION: _relation,
        MessageType.ORIGIN: _origin,
        MessageType.MESSAGE: _message_between,
    }
    _MOVING: ClassVar[Mapping[int, Callable[[StreamCutter, Any], Sequence[StreamEvent]]]] = {
        MessageType.COMMIT: _commit,
        MessageType.BEGIN_PREPARE: _begin_prepare,
        MessageType.PREPARE: _prepare,
        MessageType.COMMIT_PREPARED: _commit_prepared,
        MessageType.ROLLBACK_PREPARED: _rollback_prepared,
        MessageType.STREAM_COMMIT: _stream_commit,
        MessageType.STREAM_PREPARE: _stream_prepare,
        MessageType.STREAM_ABORT: _stream_abort,
    }


def _naming(error: XidstreamError, xid: Xid, lsn: Lsn) -> XidstreamError:
    """``error`` with the transaction, and the way past it."""
    if lsn:
        remedy = error.remedy.replace("XID", str(xid)).replace("LSN", str(lsn))
        return type(error)(f"xid {xid}: {error.message} (commit LSN {lsn})", remedy=remedy)
    return type(error)(
        f"xid {xid}: {error.message}" if xid else error.message,
        remedy="run once with `--streaming off` (in Python streaming='off'): it delivers all that commits before, "
        "passes over what was rolled back, and names the commit LSN that `xidstream slot skip` asks for",
    )
