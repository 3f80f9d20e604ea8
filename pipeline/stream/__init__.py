"""The stream of one slot, cut into what can be decoded in parallel: no server, no Ray, no rows looked at."""

from xidstream.pipeline.stream.cutter import StreamCutter
from xidstream.pipeline.stream.stream_events import (
    Aborted,
    Block,
    Committed,
    CommittedPrepared,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    StreamEvent,
    TransactionBlock,
    Unsendable,
    UsedRelations,
)

__all__ = [
    "Aborted",
    "Block",
    "Committed",
    "CommittedPrepared",
    "StreamEvent",
    "PlainBlock",
    "Position",
    "Prepared",
    "RolledBackPrepared",
    "StreamCutter",
    "TransactionBlock",
    "Unsendable",
    "UsedRelations",
]
