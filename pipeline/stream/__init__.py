"""The stream of one slot, cut into what can be decoded in parallel: no server, no Ray, no rows looked at."""

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
    TransactionBlock,
    Unsendable,
    UsedRelations,
)
from xidstream.pipeline.stream.cutter import StreamCutter

__all__ = [
    "Aborted",
    "Block",
    "Committed",
    "CommittedPrepared",
    "Cut",
    "PlainBlock",
    "Position",
    "Prepared",
    "RolledBackPrepared",
    "StreamCutter",
    "TransactionBlock",
    "Unsendable",
    "UsedRelations",
]
