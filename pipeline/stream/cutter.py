"""Cut the stream of one slot into blocks, looking at no row.

The walsender needs about 2 microseconds for a row and so the reader has that long, on a core that it shares. A row
message is therefore appended to ``target`` by a compiled loop, and so are B and C of small transactions; ``settle``
then takes note of where the stream stands. Only the rare messages (R, Y, S, E, c, A, p, b, P, K, r) come to
``feed``, and of B and C only what a block's ends need is parsed. ``feed`` takes any message, so a stream may come
through it alone.

Messages are taken in order, and ``settle`` and ``feed`` return the cuts that they complete, mostly none:

- rows of a stream block are gathered per transaction (many stream blocks make one block of ours);
- small plain transactions are gathered whole into a *plain block*;
- a plain transaction that outgrows a block, and every two-phase one, is *promoted*: it goes on as
  transaction blocks, exactly like a streamed one.

Invariants: cuts come in stream order, and everything gathered of a transaction is cut before its end is;
a commit of any kind is preceded by the plain block of all commits before it; within one block a relid has one
version, because a changed R cuts first; the bytes gathered stay under ``pending_limit_bytes`` (the largest
open transactions are cut when they would not).

After an exception the cutter must not be used again: the connection is made anew, and the server repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.errors import IllegalTransition, XidstreamError
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.protocol.grammar import Grammar
from xidstream.pipeline.protocol.message_buffer import HEADER_BYTES, IN_PLAIN, IN_ROWS, OUTSIDE, MessageBuffer
from xidstream.pipeline.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
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
from xidstream.pipeline.protocol.parser import parse_message
from xidstream.pipeline.protocol.relids import relids_of
from xidstream.pipeline.protocol.spares import Spares
from xidstream.pipeline.stream.cuts import (
    Aborted,
    Block,
    Committed,
    CommittedPrepared,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    SubtransactionsAborted,
    TransactionBlock,
    Unsendable,
)
from xidstream.pipeline.stream.pending import ORIGIN, CopyData, PendingMessages, kind_of, lsn_of
from xidstream.pipeline.stream.relation_book import RelationBook

_ROWS: Final = frozenset(b"IUD")
_TRUNCATE, _MESSAGE = b"TM"
_BEGIN, _COMMIT, _START, _STOP = b"BCSE"
_START_XID: Final = slice(HEADER_BYTES + 1, HEADER_BYTES + 5)
_START_BYTES: Final = HEADER_BYTES + 6
_STOP_BYTES: Final = HEADER_BYTES + 1
_NONE: Final[Sequence[Cut]] = ()
_ALONE_BYTES: Final = 512 << 20
"""From here on a message is a block of its own. Its value may be in two rows of one column, where an old tuple fills
what the new one leaves out, and a column of a block has room for 2 GiB."""


class StreamCutter:
    """See the module. ``parallel`` is what START_REPLICATION asked for; into ``spares`` whoever has copied a block's
    payload may give it back."""

    def __init__(
        self, *, block_bytes: int, pending_limit_bytes: int, parallel: bool, spares: Spares | None = None
    ) -> None:
        self._spares = spares or Spares(0)
        self._block_bytes = block_bytes
        self._pending_limit_bytes = pending_limit_bytes
        self._parallel = parallel
        self._grammar = Grammar()
        self._book = RelationBook()
        self._streams: dict[Xid, PendingMessages] = {}
        self._plain = PendingMessages(self._spares)
        self._stream_bytes = 0
        self._in: PendingMessages | None = (
            None  # what a row message is appended to now; None: rows are illegal
        )
        self._promoted: PendingMessages | None = None
        self._promoted_lsn = INVALID_LSN  # of its commit or PREPARE
        self.n_messages_cut = 0

    # -- what the shell asks ---------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes gathered and not cut yet."""
        current = self._in.n_bytes if self._in is not None and self._in is not self._plain else 0
        return self._plain.n_bytes + self._stream_bytes + current

    @property
    def whole_bytes(self) -> int:
        """Bytes of whole small transactions that wait for ``flush``."""
        return self._plain.whole_bytes

    @property
    def has_open_rows(self) -> bool:
        """Whether rows of an open transaction wait here."""
        if self._promoted is not None and self._promoted.n_messages:
            return True
        return any(s.n_messages for s in self._streams.values())

    @property
    def open_transactions(self) -> int:
        return len(self._streams) + (self._promoted is not None)

    # -- the stream ------------------------------------------------------------------------------------

    def feed(self, data: CopyData) -> Sequence[Cut]:
        """Take one XLogData message. Raises ProtocolViolation, naming its LSN, for one that is not legal."""
        try:
            kind = data[HEADER_BYTES]
        except IndexError:
            raise IllegalTransition(f"an XLogData message of {len(data)} bytes holds no message") from None
        gathering = self._in
        if kind in _ROWS and gathering is not None:
            return self._append(gathering, data)
        if kind == _BEGIN and gathering is None:
            self._enter_plain()
            return self._append(self._plain, data)
        if kind == _COMMIT and gathering is self._plain:
            self._leave_plain()
            self._plain.end_transaction(data)
            return self.flush() if self._plain.n_bytes >= self._block_bytes else _NONE
        if kind == _START and len(data) == _START_BYTES and not data[-1]:
            return self._stream_resume(data)
        if kind == _STOP and len(data) == _STOP_BYTES:
            self._grammar.on_control(_STOP, lsn=lsn_of(data))
            return self._stream_stop()
        return self._control(kind, data)

    @property
    def target(self) -> MessageBuffer:
        """Where the messages go that need no look; its mode says which these are. ``settle`` must follow."""
        gathering = self._in
        if gathering is None:
            gathering, mode = self._plain, OUTSIDE
        else:
            mode = IN_PLAIN if gathering is self._plain else IN_ROWS
        gathering.make_room()
        gathering.mode = mode
        return gathering

    def settle(self) -> Sequence[Cut]:
        """Take note of what was appended to ``target``, perhaps many transactions."""
        gathering = self._plain if self._in is None else self._in
        if gathering is self._plain:
            if self._in is None and gathering.mode == IN_PLAIN:
                self._enter_plain()
            elif self._in is not None and gathering.mode == OUTSIDE:
                self._leave_plain()
        return self._full(gathering) if gathering.n_bytes >= self._block_bytes else _NONE

    def _enter_plain(self) -> None:
        self._grammar.on_control(_BEGIN, None)
        self._in = self._plain

    def _leave_plain(self) -> None:
        self._grammar.on_control(_COMMIT, None)
        self._in = None

    def position(self, wal_end: Lsn) -> Sequence[Cut]:
        """A keepalive said that all up to ``wal_end`` was decoded; nothing gathered may be overtaken by it."""
        if self._in is not None:
            return _NONE
        return (*self.flush(), Position(wal_end))

    def flush(self) -> Sequence[Cut]:
        """Cut the whole plain transactions gathered so far."""
        plain = self._plain
        if not plain.whole_messages:
            return _NONE
        last, n_transactions = plain.last_commit, plain.n_transactions
        if last is None:
            block = self._block(None, *plain.take_whole())
            return (PlainBlock(block, INVALID_LSN, INVALID_LSN, INVALID_LSN, 0),)
        begin = self._parse(plain.first_begin())
        commit = self._parse(last)
        assert isinstance(begin, Begin) and isinstance(commit, Commit)
        block = self._block(None, *plain.take_whole())
        return (PlainBlock(block, begin.final_lsn, commit.commit_lsn, commit.end_lsn, n_transactions),)

    def unsendable(self, error: XidstreamError) -> tuple[Sequence[Cut], Unsendable]:
        """The server ended the stream with ``error``: the last cuts, and the transaction that it was sending."""
        cuts = self.flush()
        xid, lsn = Xid(0), INVALID_LSN
        if self._in is self._plain:
            begin = self._parse(self._plain.message(0))
            assert isinstance(begin, Begin)
            xid, lsn = begin.xid, begin.final_lsn
        elif self._in is not None and self._in.xid is not None:
            xid = self._in.xid
            lsn = self._promoted_lsn if self._in is self._promoted else INVALID_LSN
        return cuts, Unsendable(xid, lsn, _naming(error, xid, lsn))

    def flush_open(self) -> Sequence[Cut]:
        """Cut what was gathered of open transactions, so that it does not wait for their end."""
        cuts: list[Cut] = []
        for stream in self._streams.values():
            cuts += self._cut(stream)
        if self._promoted is not None:
            cuts += self._cut(self._promoted)
        return cuts

    # -- blocks ----------------------------------------------------------------------------------------

    def _append(self, gathering: PendingMessages, data: CopyData) -> Sequence[Cut]:
        if len(data) >= _ALONE_BYTES:
            return self._append_alone(gathering, data)
        gathering.append(data)
        if gathering.n_bytes >= self._block_bytes:
            return self._full(gathering)
        return _NONE

    def _append_alone(self, gathering: PendingMessages, data: CopyData) -> Sequence[Cut]:
        cuts = [*self.flush(), *self._promote()] if gathering is self._plain else list(self._cut(gathering))
        gathering = self._in if self._in is not None else gathering
        gathering.append(data)
        return [*cuts, *self._cut(gathering)]

    def _full(self, gathering: PendingMessages) -> Sequence[Cut]:
        if gathering is not self._plain:
            return self._cut(gathering)
        cuts = list(self.flush())
        if gathering.n_bytes >= self._block_bytes:
            cuts += self._promote()
        return cuts

    def _promote(self) -> Sequence[Cut]:
        """The open plain transaction goes on by itself; its B and O stay behind, parsed."""
        plain = self._plain
        first = plain.message(0)
        begin = self._parse(first)
        assert isinstance(begin, Begin)
        promoted = PendingMessages(self._spares, begin.xid, lsn_of(first) or begin.final_lsn)
        self._promoted_lsn = begin.final_lsn
        n_heads = 1
        if plain.kinds(2)[1:] == bytes([ORIGIN]):
            origin = self._parse(plain.message(1))
            assert isinstance(origin, Origin)
            promoted.origin = origin.name
            n_heads = 2
        promoted.take_from(plain, n_heads)
        self._promoted = self._in = promoted
        return self._cut(promoted)

    def _cut(self, gathering: PendingMessages) -> Sequence[Cut]:
        if not gathering.n_messages:
            return _NONE
        assert gathering.xid is not None
        scope = gathering.xid if gathering.streamed else None
        if not gathering.first_lsn:
            # S carries no LSN where O follows it; the first row does.
            gathering.first_lsn = lsn_of(gathering.message(0))
        gathering.has_blocks = True
        block = self._block(scope, *gathering.take())
        if gathering.streamed and gathering is not self._in:
            self._stream_bytes -= block.n_bytes
        return (TransactionBlock(gathering.xid, block, gathering.streamed, gathering.first_lsn),)

    def _block(
        self, scope: Xid | None, payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]
    ) -> Block:
        self.n_messages_cut += len(lengths)
        relids = relids_of(payload, lengths, streamed=scope is not None)
        return Block(payload, lengths, self._book.used(scope, relids))

    # -- rare messages ---------------------------------------------------------------------------------

    def _parse(self, data: CopyData) -> Any:
        in_stream = self._in is not None and self._in.streamed
        return parse_message(
            data, in_stream=in_stream, parallel=self._parallel, lsn=lsn_of(data), offset=HEADER_BYTES
        )

    def _control(self, kind: int, data: CopyData) -> Sequence[Cut]:
        if kind == _TRUNCATE and self._in is not None:
            return self._append(self._in, data)
        if kind == _MESSAGE:
            return self._logical_message(data)
        if kind in _ROWS or kind == _TRUNCATE:
            raise IllegalTransition(f"a row message {chr(kind)!r} outside any transaction at {lsn_of(data)}")
        message = self._parse(data)
        scope = self._in.xid if self._in is not None and self._in.streamed else None
        if isinstance(message, Type):
            self._book.add_type(scope, message)
            return _NONE
        if isinstance(message, Relation):
            return self._relation(scope, message, data)
        if isinstance(message, Origin):
            return self._origin(message, data)
        xid = getattr(message, "xid", None)
        first = message.first_segment if isinstance(message, StreamStart) else None
        aborted = message.subxid if isinstance(message, StreamAbort) else None
        self._grammar.on_control(kind, xid, first=first, subxid=aborted, lsn=lsn_of(data))
        return self._sending(message, data)

    def _sending(self, message: Any, data: CopyData) -> Sequence[Cut]:
        if isinstance(message, StreamStart):
            return self._stream_start(message, data)
        if kind_of(data) == _STOP:
            return self._stream_stop()
        if isinstance(message, StreamCommit):
            return self._stream_end(message)
        if isinstance(message, StreamPrepare):
            return self._stream_prepare(message)
        if isinstance(message, StreamAbort):
            return self._stream_abort(message)
        if isinstance(message, Commit):
            return self._promoted_commit(message)
        if isinstance(message, BeginPrepare):
            cuts = self.flush()
            self._promoted = self._in = PendingMessages(
                self._spares, message.xid, message.prepare_lsn, streamed=False
            )
            self._promoted_lsn = message.prepare_lsn
            return cuts
        if isinstance(message, Prepare):
            return self._prepare(message)
        if isinstance(message, CommitPrepared):
            end = TransactionEnd(
                xid=message.xid,
                commit_lsn=message.commit_lsn,
                end_lsn=message.end_lsn,
                commit_timestamp_us=message.commit_timestamp_us,
                gid=message.gid,
            )
            return (*self.flush(), *self._forget_restreamed(message.xid), CommittedPrepared(end))
        assert isinstance(message, RollbackPrepared), message
        return (
            *self.flush(),
            *self._forget_restreamed(message.xid),
            RolledBackPrepared(message.xid, message.gid, message.prepare_end_lsn, message.rollback_end_lsn),
        )

    def _logical_message(self, data: CopyData) -> Sequence[Cut]:
        if self._in is not None:
            return self._append(self._in, data)
        message = self._parse(data)
        if message.transactional:
            raise IllegalTransition(f"a transactional message outside any transaction at {lsn_of(data)}")
        # Between transactions: it is whole by itself, and keeps its place among them.
        self._plain.add_whole(data)
        return self.flush() if self._plain.n_bytes >= self._block_bytes else _NONE

    def _relation(self, scope: Xid | None, message: Relation, data: CopyData) -> Sequence[Cut]:
        body = bytes(data[HEADER_BYTES + 1 + (4 if scope is not None else 0) :])
        cuts: list[Cut] = []
        if self._book.changes(scope, message, body):
            if self._in is self._plain:
                cuts += self.flush()
                if self._plain.kinds(3).strip(b"BO"):
                    cuts += self._promote()
            elif self._in is not None:
                cuts += self._cut(self._in)
            else:
                cuts += self.flush()
        self._book.declare(scope, message, body)
        return cuts

    def _origin(self, message: Origin, data: CopyData) -> Sequence[Cut]:
        if self._in is None:
            raise IllegalTransition(f"an origin outside any transaction at {lsn_of(data)}")
        if self._in is self._plain:
            return self._append(self._in, data)
        self._in.origin = message.name
        return _NONE

    # -- streams ---------------------------------------------------------------------------------------

    def _stream_start(self, message: StreamStart, data: CopyData) -> Sequence[Cut]:
        stream = self._streams.get(message.xid)
        if stream is None:
            stream = self._streams[message.xid] = PendingMessages(
                self._spares, message.xid, lsn_of(data), streamed=True
            )
        self._enter(stream)
        return _NONE

    def _stream_resume(self, data: CopyData) -> Sequence[Cut]:
        """A stream that is open goes on. With many of them the server sends pieces of some hundred rows, and a message
        that is parsed in full costs as much as all these."""
        xid = Xid(int.from_bytes(data[_START_XID], "big"))
        stream = self._streams.get(xid)
        if stream is None:
            return self._control(_START, data)
        self._grammar.on_control(_START, xid, first=False, lsn=lsn_of(data))
        self._enter(stream)
        return _NONE

    def _enter(self, stream: PendingMessages) -> None:
        # While a stream is current its bytes change without being counted; they are added again at its stop.
        self._stream_bytes -= stream.n_bytes
        self._in = stream

    def _stream_stop(self) -> Sequence[Cut]:
        stream = self._in
        assert stream is not None
        self._in = None
        self._stream_bytes += stream.n_bytes
        if self._stream_bytes <= self._pending_limit_bytes:
            return _NONE
        # Several at once, because blocks for the same buffer share a call.
        cuts: list[Cut] = []
        for largest in sorted(self._streams.values(), key=lambda s: s.n_bytes, reverse=True):
            if self._stream_bytes <= self._pending_limit_bytes // 2:
                break
            cuts += self._cut(largest)
        return cuts

    def _finish(self, stream: PendingMessages) -> Sequence[Cut]:
        """What is left of a stream that is to be kept: its last block, then its rolled-back parts."""
        cuts = self._cut(stream)
        if not stream.aborted or not stream.has_blocks:
            return cuts
        assert stream.xid is not None
        return [*cuts, SubtransactionsAborted(stream.xid, tuple(stream.aborted))]

    def _stream_end(self, message: StreamCommit) -> Sequence[Cut]:
        stream = self._streams[message.xid]
        cuts = [*self.flush(), *self._finish(stream)]
        del self._streams[message.xid]
        self._book.promote(message.xid)
        end = TransactionEnd(
            xid=message.xid,
            commit_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_timestamp_us=message.commit_timestamp_us,
            streamed=True,
            origin=stream.origin,
        )
        return [*cuts, Committed(end, stream.has_blocks)]

    def _stream_prepare(self, message: StreamPrepare) -> Sequence[Cut]:
        stream = self._streams[message.xid]
        cuts = [*self.flush(), *self._finish(stream)]
        del self._streams[message.xid]
        self._book.drop(message.xid)
        return [*cuts, self._prepared(stream, message)]

    def _stream_abort(self, message: StreamAbort) -> Sequence[Cut]:
        stream = self._streams.get(message.xid)
        if stream is None:
            return _NONE  # legal: all its changes were filtered out, or nothing of it was streamed
        if message.subxid != message.xid:
            # Not cut here: ten thousand savepoints must not make ten thousand blocks. Its rows carry the
            # subxid wherever they are, and a subxid is never used again, so the end is early enough.
            stream.aborted.append(message.subxid)
            return _NONE
        return self._forget_stream(stream, message.xid)

    def _forget_stream(self, stream: PendingMessages, xid: Xid) -> Sequence[Cut]:
        self._stream_bytes -= stream.n_bytes
        del self._streams[xid]
        self._book.drop(xid)
        return (Aborted(xid),) if stream.has_blocks else _NONE

    def _forget_restreamed(self, xid: Xid) -> Sequence[Cut]:
        """Drop the stream of a transaction whose prepare we acknowledged before a reconnect.

        Under memory pressure the server streams such a one again and ends it with K or r, without a p (seen
        on 16.14 and 18.4; ``ReorderBufferSkipPrepare`` leaves its changes in the reorder buffer). The durable
        record of the prepare has all of it.
        """
        stream = self._streams.get(xid)
        return _NONE if stream is None else self._forget_stream(stream, xid)

    # -- promoted and two-phase transactions -----------------------------------------------------------

    def _promoted_commit(self, message: Commit) -> Sequence[Cut]:
        promoted = self._take_promoted()
        assert promoted.xid is not None
        end = TransactionEnd(
            xid=promoted.xid,
            commit_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_timestamp_us=message.commit_timestamp_us,
            origin=promoted.origin,
        )
        return [*self._cut(promoted), Committed(end, promoted.has_blocks)]

    def _prepare(self, message: Prepare) -> Sequence[Cut]:
        if self._promoted is None:
            # Without its b: a transaction that only locked rows (PostgreSQL 18). It holds nothing, and yet K follows.
            alone = PendingMessages(self._spares, message.xid, message.prepare_lsn, streamed=False)
            return (*self.flush(), self._prepared(alone, message))
        promoted = self._take_promoted()
        cuts = self._cut(promoted)
        return [*cuts, self._prepared(promoted, message)]

    def _take_promoted(self) -> PendingMessages:
        promoted = self._promoted
        assert promoted is not None
        self._promoted = self._in = None
        return promoted

    def _prepared(self, gathering: PendingMessages, message: Prepare | StreamPrepare) -> Prepared:
        return Prepared(
            xid=message.xid,
            gid=message.gid,
            prepare_lsn=message.prepare_lsn,
            end_lsn=message.end_lsn,
            streamed=gathering.streamed,
            origin=gathering.origin,
            has_blocks=gathering.has_blocks,
        )


def _naming(error: XidstreamError, xid: Xid, lsn: Lsn) -> XidstreamError:
    """``error`` with the transaction, and the way past it."""
    if lsn:
        remedy = error.remedy.replace("XID", str(xid)).replace("LSN", str(lsn))
        return type(error)(f"xid {xid}: {error.message} (commit LSN {lsn})", remedy=remedy)
    return type(error)(
        f"xid {xid}: {error.message}" if xid else error.message,
        remedy="run once with `--streaming off`: it delivers all that commits before, passes over what was rolled "
        "back, and names the commit LSN that `xidstream slot skip` asks for",
    )
