"""What a buffer is told, and what it tells of a block: the values in the calls of ``transactions.transaction_buffer``.

They are made in one process and read in another (``transactions.parcels``, ``actors.reader``, ``actors.xid_buffer``).
Nobody changes one after it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import NO_SKIPS, Skips
from xidstream.pipeline.settings.file_modes import DEFAULT
from xidstream.pipeline.storage.keys import Layout


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
