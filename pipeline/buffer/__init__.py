"""Open transactions in memory: what a buffer holds, what it spills, what it gives when the end comes."""

from pipeline.buffer.memory import BufferMemory, Spill
from pipeline.buffer.pool import BufferPoolPolicy, Move, PoolFull
from pipeline.buffer.quota import BufferQuota
from pipeline.buffer.transaction import OpenTransaction

__all__ = [
    "BufferMemory",
    "BufferPoolPolicy",
    "BufferQuota",
    "Move",
    "OpenTransaction",
    "PoolFull",
    "Spill",
]
