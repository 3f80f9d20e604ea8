"""Make blocks of gathered messages, each with the relations that its own rows need.

The three that gather messages (``plain_transactions``, ``open_streams`` and the cutter) have their blocks made here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.pgoutput.relids import relids_of
from xidstream.pipeline.stream.pending import PendingMessages, lsn_of
from xidstream.pipeline.stream.relation_book import RelationBook
from xidstream.pipeline.stream.stream_events import Block, TransactionBlock


class BlockMaker:
    def __init__(self, book: RelationBook) -> None:
        self._book = book
        self.n_messages = 0
        """In all blocks so far."""

    def block(
        self,
        stream: PendingMessages | None,
        payload: npt.NDArray[np.uint8],
        lengths: npt.NDArray[np.int32],
    ) -> Block:
        """``stream``: the open stream that the rows are of; None for those of plain transactions."""
        self.n_messages += len(lengths)
        relids = relids_of(payload, lengths, streamed=stream is not None)
        return Block(payload, lengths, self._book.used(stream, relids))

    def cut(self, pending: PendingMessages) -> Sequence[TransactionBlock]:
        """All that is gathered of one transaction as a block; nothing where there is no message."""
        if not pending.n_messages:
            return ()
        if not pending.first_lsn:
            # S carries no LSN where O follows it; the first row does.
            pending.first_lsn = lsn_of(pending.message(0))
        pending.has_blocks = True
        block = self.block(pending if pending.streamed else None, *pending.detach())
        aborted = pending.take_aborted()
        return (TransactionBlock(pending.xid, block, pending.streamed, pending.first_lsn, aborted),)
