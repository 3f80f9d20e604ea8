"""The streamed transactions that are open: many stream blocks of each become one block of ours.

Which they are stands in the ledger. The grammar opens and closes them there, and here is what is gathered of each
(``TransactionRecord.pending``).

Invariants: the bytes gathered stay under ``pending_limit_bytes`` between stream blocks, because the largest
transactions are cut when they would not; everything gathered of a transaction is cut before its end is.

A rolled-back subtransaction is told in the order of the stream: with the next block that is cut after it, or with the
end. It cuts no block itself, because ten thousand savepoints must not make ten thousand blocks. A rollback of several
subtransactions is told by several messages, and a block may be cut between them, because time is up. It is told whole
all the same: only where the transaction's next stream block has begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import StreamAbort, StreamCommit, StreamPrepare
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream.block_maker import BlockMaker
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.stream.pending import NO_EVENTS, PendingMessages
from xidstream.pipeline.stream.relation_book import RelationBook
from xidstream.pipeline.stream.stream_events import Aborted, StreamEvent


class OpenStreams:
    """The cutter has asked the grammar before it calls."""

    def __init__(
        self,
        ledger: TransactionLedger,
        spares: Spares,
        maker: BlockMaker,
        book: RelationBook,
        pending_limit_bytes: int,
    ) -> None:
        self._ledger = ledger
        """All open transactions, and what is gathered of each."""
        self._spares = spares
        """Arrays to gather messages in, which others have given back."""
        self._maker = maker
        """Makes a block of what was gathered."""
        self._book = book
        """Which relation version holds for which row."""
        self._pending_limit_bytes = pending_limit_bytes
        """The bytes gathered stay under this between stream blocks."""
        self._current: PendingMessages | None = None
        """The stream whose block is being read."""
        self.n_waiting_bytes = 0
        """The waiting bytes of all streams but the current one, whose bytes change without being counted."""

    def __len__(self) -> int:
        return self._ledger.n_streams

    @property
    def has_rows(self) -> bool:
        return any(stream.n_messages for stream in self._streams())

    # -- one stream block ------------------------------------------------------------------------------

    def start(self, xid: Xid, lsn: Lsn) -> PendingMessages:
        """The stream that the next rows belong to."""
        record = self._ledger.of(xid)
        stream = record.pending
        if stream is None:
            stream = record.pending = PendingMessages(self._spares, xid, lsn, streamed=True)
        self.n_waiting_bytes -= stream.n_bytes
        stream.resume()
        self._current = stream
        return stream

    def stop(self) -> Sequence[StreamEvent]:
        stream = self._current
        assert stream is not None
        self._current = None
        self.n_waiting_bytes += stream.n_bytes
        if self.n_waiting_bytes <= self._pending_limit_bytes:
            return NO_EVENTS
        # Several at once, because blocks for the same buffer share a call.
        events: list[StreamEvent] = []
        for largest in sorted(self._streams(), key=lambda s: s.n_bytes, reverse=True):
            if self.n_waiting_bytes <= self._pending_limit_bytes // 2:
                break
            events += self.cut(largest)
        return events

    def cut(self, stream: PendingMessages) -> Sequence[StreamEvent]:
        if stream is not self._current:
            self.n_waiting_bytes -= stream.n_bytes
        return self._maker.cut(stream)

    def cut_all(self) -> Sequence[StreamEvent]:
        return [event for stream in self._streams() for event in self.cut(stream)]

    # -- ends ------------------------------------------------------------------------------------------

    def commit(self, message: StreamCommit) -> Sequence[StreamEvent]:
        stream, events = self._end(message.xid)
        self._book.promote(stream)
        return [*events, stream.committed(message)]

    def prepare(self, message: StreamPrepare) -> Sequence[StreamEvent]:
        stream, events = self._end(message.xid)
        self._book.drop(stream)
        return [*events, stream.prepared(message)]

    def abort(self, message: StreamAbort) -> Sequence[StreamEvent]:
        if message.subxid == message.xid:
            return self.forget(message.xid)
        record = self._ledger.get(message.xid)
        # Legal without a stream: all its changes were filtered out, or nothing of it was streamed.
        if record is not None and record.pending is not None:
            record.pending.abort(message.subxid)
        return NO_EVENTS

    def forget(self, xid: Xid) -> Sequence[StreamEvent]:
        """Drop the stream of ``xid``, where there is one.

        K and r call for it as well: under memory pressure the server streams a transaction again whose prepare we
        acknowledged before a reconnect, and ends it with K or r, without a p (seen on 16.14 and 18.4;
        ``ReorderBufferSkipPrepare`` leaves its changes in the reorder buffer). The durable record of the prepare has
        all of it.
        """
        stream = self._ledger.take_pending(xid)
        if stream is None:
            return NO_EVENTS
        self.n_waiting_bytes -= stream.n_bytes
        self._book.drop(stream)
        if stream.has_blocks:
            return (Aborted(xid),)
        self._ledger.remove(xid)
        return NO_EVENTS

    # -- inside ----------------------------------------------------------------------------------------

    def _streams(self) -> Iterator[PendingMessages]:
        return (record.pending for record in self._ledger.streams if record.pending is not None)

    def _end(self, xid: Xid) -> tuple[PendingMessages, Sequence[StreamEvent]]:
        """The stream, which has ended, and its last events."""
        stream = self._ledger.take_pending(xid)
        assert stream is not None, "the grammar has seen its first block"
        events = self.cut(stream)
        if not stream.has_blocks:
            self._ledger.remove(xid)
        return stream, events
