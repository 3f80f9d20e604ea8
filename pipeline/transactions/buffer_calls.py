"""The arguments of the calls to a buffer (``transactions.transaction_buffer``), and how they are gathered.

Each call costs Ray some milliseconds of CPU, here, there and in the raylet, and with many open transactions several
blocks become ready at a time. So the reader's ``BufferPool`` gathers a ``BufferCall`` for each buffer, and tests do the
same. The other values are made in one process and read in another, and nobody changes one after it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import NO_SKIPS, Skips
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.settings.file_modes import DEFAULT
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.stream import TransactionBlock


@dataclass(frozen=True)
class BufferSettings:
    storage_uri: str = field(repr=False)
    layout: Layout
    memory_bytes: int
    skips: Skips = NO_SKIPS
    """Transactions of which nothing is released."""
    bind_late: bool = False
    """Whether the sink takes segments as its own files."""
    parks: bool = False
    """Whether a table that cannot be delivered is left out, and the rest goes on."""
    storage_mode: str = DEFAULT


@dataclass(frozen=True)
class BlockHead:
    """Whose rows a block holds, beside its bytes. ``step``: how many blocks its transaction had before; ``relations``:
    the numbers of the versions that its rows are of, which this call or an earlier one brought; ``aborted``: as in
    ``TransactionBlock``."""

    xid: Xid
    step: int
    first_lsn: Lsn
    streamed: bool
    relations: tuple[int, ...]
    aborted: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    """A commit among blocks: after the first ``n_blocks`` of its call. ``step`` as in ``BlockHead``, ``aborted`` as in
    ``Committed``."""

    end: TransactionEnd
    step: int
    n_blocks: int
    aborted: tuple[int, ...] = ()


RawBlock = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]
"""``payload: uint8[n_bytes]``, the raw messages one after the other; ``lengths: int32[n_messages]``."""


@dataclass
class BufferCall:
    """What goes to a buffer in one call: blocks and commits of one or several transactions, in stream order.

    ``versions`` are those of all blocks, by number; ``n_bytes`` are the raw bytes of the blocks.
    """

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
        """After the blocks that are in the call now; ``step`` as above."""
        self.ends.append(End(end, step, len(self.heads), tuple(map(int, aborted))))

    def relation_numbers(self) -> Iterator[int]:
        """The relation numbers of each block, in order."""
        return (number for head in self.heads for number in head.relations)
