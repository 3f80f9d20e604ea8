"""Which part of which open transaction goes to storage when a buffer holds too much.

The rule: while the decoded bytes held are over the limit, the largest group (one relation version of one
transaction, or its logical messages) is spilled whole. Largest first makes the fewest and largest segments, and a
small transaction beside a giant keeps its rows in memory. It is a pure function of the sizes, so it is tested
without storage.

A block that is too large for memory (``is_too_large_for_memory``) is spilled whatever the limit leaves. Unless
``block_bytes`` is as large, it holds a value of tens of megabytes, or of a gigabyte. From memory such a value would
take its size in the object store, and several times its size in an executor's JVM; a segment is read without the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.buffer.transaction import OpenTransaction
from xidstream.pipeline.relations import RelationVersion

_LARGEST_BYTES: Final = 64 << 20
"""Of one decoded block in memory: the default of ``buffer_memory_bytes``, so that only a larger one is affected."""


def is_too_large_for_memory(n_bytes: int) -> bool:
    """Whether a decoded block of ``n_bytes`` has to go to storage."""
    return n_bytes > _LARGEST_BYTES


@dataclass(frozen=True)
class Spill:
    """An order to the shell: write this group to storage."""

    transaction: OpenTransaction
    relation: RelationVersion | None
    """None: its logical messages."""


@dataclass(frozen=True)
class BufferMemory:
    limit_bytes: int

    def next_spill(self, transactions: Iterable[OpenTransaction]) -> Spill | None:
        """The group to spill now, or None while everything fits. To be asked again after each spill."""
        held = list(transactions)
        fits = sum(transaction.n_bytes for transaction in held) <= self.limit_bytes
        if fits and not any(is_too_large_for_memory(transaction.largest_block_bytes) for transaction in held):
            # This is asked for each block, and must not look at all tables of a transaction that has thousands.
            return None
        largest: tuple[int, Spill] | None = None
        for transaction in held:
            for relation, size, largest_block in transaction.spillable():
                if is_too_large_for_memory(largest_block):
                    return Spill(transaction, relation)
                if largest is None or size > largest[0]:
                    largest = (size, Spill(transaction, relation))
        return None if largest is None else largest[1]
