"""What goes to one buffer in one call."""

from __future__ import annotations

import numpy as np

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.stream import Block, TransactionBlock, UsedRelations
from xidstream.pipeline.transactions.buffer_calls import BufferCall


def rows(xid: int) -> TransactionBlock:
    block = Block(np.zeros(100, np.uint8), np.array([100], np.int32), UsedRelations({}))
    return TransactionBlock(Xid(xid), block, True, Lsn(1))


def test_a_commit_in_a_call_stands_after_the_blocks_that_came_before_it() -> None:
    call = BufferCall()
    call.add_block(rows(700), 0)
    call.add_block(rows(700), 1)
    call.add_end(TransactionEnd(Xid(700), Lsn(0x200), Lsn(0x208), 0, streamed=True), 2)
    call.add_block(rows(701), 0)
    assert [(end.end.xid, end.step, end.n_blocks) for end in call.ends] == [(700, 2, 2)]
    assert [(head.xid, head.step) for head in call.heads] == [(700, 0), (700, 1), (701, 0)]
    assert call.n_bytes == 300
