"""The events that the cutter makes of the stream, and that the reader hands on in stream order.

A block's bytes belong to whoever gets the event; the cutter keeps no reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import RelationMap, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion


@dataclass(frozen=True, slots=True)
class UsedRelations:
    """The relation versions that the rows of a block belong to, and no others, by number. An equal number means an
    equal version, within an epoch; a relation has one version in a block."""

    versions: Mapping[int, RelationVersion]

    @property
    def relations(self) -> RelationMap:
        """The relation versions by relid, as the decoder wants them."""
        return {version.relid: version for version in self.versions.values()}


@dataclass(frozen=True, slots=True)
class Block:
    """``payload: uint8[n_bytes]``, CopyData messages with their 25-byte headers; ``lengths: int32[n]``."""

    payload: npt.NDArray[np.uint8] = field(repr=False)
    lengths: npt.NDArray[np.int32] = field(repr=False)
    relations: UsedRelations = field(repr=False)

    @property
    def n_bytes(self) -> int:
        return len(self.payload)

    @property
    def n_messages(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class PlainBlock:
    """Whole small transactions and non-transactional messages, in commit order.

    Without a transaction in it the LSNs are 0: nothing may be confirmed from it. ``block`` is None once it was
    handed to a buffer: the sequencer needs the positions alone.
    """

    block: Block | None
    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    n_transactions: int


@dataclass(frozen=True, slots=True)
class TransactionBlock:
    """Rows of one open transaction, streamed or too large for a plain block; ``first_lsn`` names its spill.

    ``aborted`` are the subtransactions that were rolled back since the block before, each of them before the last rows
    of this one. Where among the rows does not matter: a rolled-back subtransaction has no row after its abort.
    """

    xid: Xid
    block: Block
    streamed: bool
    first_lsn: Lsn
    aborted: tuple[Xid, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """The whole transaction is void. Emitted only for one of which a block was cut."""

    xid: Xid


@dataclass(frozen=True, slots=True)
class Committed:
    """``has_blocks`` is False for a stream that held no row at all. ``aborted``: the subtransactions that were rolled
    back after the last block, or since."""

    end: TransactionEnd
    has_blocks: bool
    aborted: tuple[Xid, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """``has_blocks`` and ``aborted`` as in ``Committed``."""

    xid: Xid
    gid: str = field(repr=False)
    prepare_lsn: Lsn
    end_lsn: Lsn
    streamed: bool
    origin: str | None
    has_blocks: bool
    aborted: tuple[Xid, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedPrepared:
    end: TransactionEnd


@dataclass(frozen=True, slots=True)
class RolledBackPrepared:
    xid: Xid
    gid: str = field(repr=False)
    prepare_end_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class Unsendable:
    """The server itself cannot send what comes next, and has ended the stream: nothing follows.

    ``lsn`` is the transaction's commit (or PREPARE) LSN; 0/0 where the server has not told it, of a streamed one.
    """

    xid: Xid
    lsn: Lsn
    error: XidstreamError


@dataclass(frozen=True, slots=True)
class Position:
    """The server has decoded up to here, and everything before it was cut already."""

    wal_end: Lsn


StreamEvent = (
    PlainBlock
    | TransactionBlock
    | Aborted
    | Committed
    | Prepared
    | CommittedPrepared
    | RolledBackPrepared
    | Position
    | Unsendable
)
