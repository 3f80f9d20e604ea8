"""Open transactions in memory: what a buffer holds, what it spills, what it hands over at the end."""

from xidstream.pipeline.buffer.buffer_shares import BufferQuota
from xidstream.pipeline.buffer.groups import is_too_large_for_memory
from xidstream.pipeline.buffer.known_relations import KnownRelations
from xidstream.pipeline.buffer.memory import MOST_PIECES, BufferMemory, Spill, take_last_segments
from xidstream.pipeline.buffer.pool import BufferPoolPolicy, Move, PoolFull
from xidstream.pipeline.buffer.transaction import OpenTransaction

__all__ = [
    "MOST_PIECES",
    "BufferMemory",
    "BufferPoolPolicy",
    "BufferQuota",
    "KnownRelations",
    "Move",
    "OpenTransaction",
    "PoolFull",
    "Spill",
    "is_too_large_for_memory",
    "take_last_segments",
]
