"""Small plain transactions, gathered whole and one after the other into a *plain block*.

Non-transactional messages between them keep their place. After what is whole there may be the beginning of one more
transaction. Where that outgrows a block, or a relation changes in it, it is *promoted*: it goes on by itself, as
blocks of one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.pgoutput.message_buffer import HEADER_BYTES, MessageBuffer
from xidstream.pipeline.pgoutput.messages import Begin
from xidstream.pipeline.pgoutput.parser import parse_begin, parse_commit, parse_origin
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream.block_maker import BlockMaker
from xidstream.pipeline.stream.pending import NO_EVENTS, PendingMessages, lsn_of
from xidstream.pipeline.stream.stream_events import PlainBlock, StreamEvent


class PlainTransactions(MessageBuffer):
    __slots__ = ("_maker",)

    def __init__(self, spares: Spares, maker: BlockMaker) -> None:
        super().__init__(spares)
        self._maker = maker

    def flush(self) -> Sequence[StreamEvent]:
        """Cut the whole transactions. What is open stays, and is then the first here."""
        if not self.whole_messages:
            return NO_EVENTS
        last, n_transactions = self.last_commit, self.n_transactions
        if last is None:
            block = self._maker.block(None, *self.detach_whole())
            return (PlainBlock(block, INVALID_LSN, INVALID_LSN, INVALID_LSN, 0),)
        begin = _begin(self._first_begin())
        commit = parse_commit(last, lsn=lsn_of(last), offset=HEADER_BYTES)
        block = self._maker.block(None, *self.detach_whole())
        return (PlainBlock(block, begin.final_lsn, commit.commit_lsn, commit.end_lsn, n_transactions),)

    def open_begin(self) -> Begin:
        """The BEGIN of the open transaction, when ``flush`` has cut those before it."""
        return _begin(self.message(0))

    @property
    def has_open_rows(self) -> bool:
        """Whether the open transaction is more than its BEGIN and origin, when ``flush`` has cut the others."""
        return bool(self.kinds(3).strip(b"BO"))

    def promote(self) -> PendingMessages:
        """Move the open transaction out, when ``flush`` has cut the others. Its B and O stay behind, parsed."""
        first = self.message(0)
        begin = _begin(first)
        promoted = PendingMessages(
            self._spares, begin.xid, lsn_of(first) or begin.final_lsn, commit_lsn=begin.final_lsn
        )
        n_heads = 1
        if self.kinds(2)[1:] == b"O":
            data = self.message(1)
            promoted.origin = parse_origin(data, lsn=lsn_of(data), offset=HEADER_BYTES).name
            n_heads = 2
        promoted.move_from(self, n_heads)
        return promoted

    def _first_begin(self) -> bytes:
        """Other messages may stand between transactions before it."""
        n = 1
        while (at := self.kinds(n).find(b"B")) < 0:
            n *= 16
        return self.message(at)


def _begin(data: bytes) -> Begin:
    return parse_begin(data, lsn=lsn_of(data), offset=HEADER_BYTES)
