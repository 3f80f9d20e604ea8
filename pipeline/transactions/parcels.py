"""What goes to a buffer in one call: blocks and commits of one or several transactions, in stream order.

Each call costs Ray some milliseconds of CPU, here, there and in the raylet, and with many open transactions blocks are
cut several at a time. So the reader's ``BufferPool`` gathers a parcel for each buffer, and tests do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Xid
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.stream import TransactionBlock
from xidstream.pipeline.transactions.buffer_calls import BlockHead, End, RawBlock


@dataclass
class Parcel:
    """``versions``: of all blocks, by number; ``n_bytes``: raw bytes of the blocks."""

    heads: list[BlockHead] = field(default_factory=list)
    versions: dict[int, RelationVersion] = field(default_factory=dict)
    blocks: list[RawBlock] = field(default_factory=list)
    n_bytes: int = 0
    ends: list[End] = field(default_factory=list)

    def add_block(self, event: TransactionBlock, step: int) -> None:
        """``step``: how many blocks the transaction had before."""
        versions = event.block.relations.versions
        aborted = tuple(map(int, event.aborted))
        self.heads.append(
            BlockHead(event.xid, step, event.first_lsn, event.streamed, tuple(versions), aborted)
        )
        self.versions.update(versions)
        self.blocks.append((event.block.payload, event.block.lengths))
        self.n_bytes += event.block.n_bytes

    def add_end(self, end: TransactionEnd, step: int, aborted: Iterable[Xid] = ()) -> None:
        """After the blocks that are in the parcel now; ``step`` as above."""
        self.ends.append(End(end, step, len(self.heads), tuple(map(int, aborted))))

    def relation_numbers(self) -> Iterator[int]:
        """The relation numbers of each block, in order."""
        return (number for head in self.heads for number in head.relations)
