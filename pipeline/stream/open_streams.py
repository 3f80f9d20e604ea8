"""The streamed transactions that are open: many stream blocks of each become one block of ours.

Invariants: the bytes gathered stay under ``pending_limit_bytes`` between stream blocks, because the largest
transactions are cut when they would not; everything gathered of a transaction is cut before its end is.

A rolled-back subtransaction is told in the order of the stream: with the next block that is cut after it, or with the
end. It cuts no block itself, because ten thousand savepoints must not make ten thousand blocks. A rollback of several
subtransactions is told by several messages, and a block may be cut between them, because time is up. It is told whole
all the same: only where the transaction's next stream block has begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import StreamAbort, StreamCommit, StreamPrepare
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream.block_maker import BlockMaker
from xidstream.pipeline.stream.cuts import Aborted, Cut
from xidstream.pipeline.stream.pending import NO_CUTS, PendingMessages
from xidstream.pipeline.stream.relation_book import RelationBook


class OpenStreams:
    """The cutter has asked the grammar before it calls."""

    def __init__(
        self, spares: Spares, maker: BlockMaker, book: RelationBook, pending_limit_bytes: int
    ) -> None:
        self._spares = spares
        self._maker = maker
        self._book = book
        self._pending_limit_bytes = pending_limit_bytes
        self._streams: dict[Xid, PendingMessages] = {}
        self._current: PendingMessages | None = None
        self.n_waiting_bytes = 0
        """The waiting bytes of all streams but the current one, whose bytes change without being counted."""

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def has_rows(self) -> bool:
        return any(stream.n_messages for stream in self._streams.values())

    # -- one stream block ------------------------------------------------------------------------------

    def start(self, xid: Xid, lsn: Lsn) -> PendingMessages:
        """The stream that the next rows belong to."""
        stream = self._streams.get(xid)
        if stream is None:
            stream = self._streams[xid] = PendingMessages(self._spares, xid, lsn, streamed=True)
        self.n_waiting_bytes -= stream.n_bytes
        stream.resume()
        self._current = stream
        return stream

    def stop(self) -> Sequence[Cut]:
        stream = self._current
        assert stream is not None
        self._current = None
        self.n_waiting_bytes += stream.n_bytes
        if self.n_waiting_bytes <= self._pending_limit_bytes:
            return NO_CUTS
        # Several at once, because blocks for the same buffer share a call.
        cuts: list[Cut] = []
        for largest in sorted(self._streams.values(), key=lambda s: s.n_bytes, reverse=True):
            if self.n_waiting_bytes <= self._pending_limit_bytes // 2:
                break
            cuts += self.cut(largest)
        return cuts

    def cut(self, stream: PendingMessages) -> Sequence[Cut]:
        if stream is not self._current:
            self.n_waiting_bytes -= stream.n_bytes
        return self._maker.cut(stream)

    def cut_all(self) -> Sequence[Cut]:
        return [cut for stream in self._streams.values() for cut in self.cut(stream)]

    # -- ends ------------------------------------------------------------------------------------------

    def commit(self, message: StreamCommit) -> Sequence[Cut]:
        stream = self._streams.pop(message.xid)
        cuts = self.cut(stream)
        self._book.promote(message.xid)
        return [*cuts, stream.committed(message)]

    def prepare(self, message: StreamPrepare) -> Sequence[Cut]:
        stream = self._streams.pop(message.xid)
        cuts = self.cut(stream)
        self._book.drop(message.xid)
        return [*cuts, stream.prepared(message)]

    def abort(self, message: StreamAbort) -> Sequence[Cut]:
        stream = self._streams.get(message.xid)
        if stream is None:
            return NO_CUTS  # legal: all its changes were filtered out, or nothing of it was streamed
        if message.subxid != message.xid:
            stream.abort(message.subxid)
            return NO_CUTS
        return self.forget(message.xid)

    def forget(self, xid: Xid) -> Sequence[Cut]:
        """Drop the stream of ``xid``, where there is one.

        K and r call for it as well: under memory pressure the server streams a transaction again whose prepare we
        acknowledged before a reconnect, and ends it with K or r, without a p (seen on 16.14 and 18.4;
        ``ReorderBufferSkipPrepare`` leaves its changes in the reorder buffer). The durable record of the prepare has
        all of it.
        """
        stream = self._streams.pop(xid, None)
        if stream is None:
            return NO_CUTS
        self.n_waiting_bytes -= stream.n_bytes
        self._book.drop(xid)
        return (Aborted(xid),) if stream.has_blocks else NO_CUTS
