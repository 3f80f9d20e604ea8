"""Which part of which transaction goes to storage: when a buffer holds too much, and at a commit.

The rule: while the decoded bytes held are over the limit, the largest group (one relation version of one
transaction, or its logical messages) is spilled whole. Largest first makes the fewest and largest segments, and a
small transaction beside a giant keeps its rows in memory. It is a pure function of the sizes, so it is tested
without storage.

A block that is too large for memory (``is_too_large_for_memory``) is spilled whatever the limit leaves. Unless
``block_bytes`` is as large, it holds a value of tens of megabytes, or of a gigabyte. From memory such a value would
take its size in the object store, and several times its size in an executor's JVM; a segment is read without the JVM.

At a commit what is in memory goes to the sink from there, unless the sink takes segments as its own files (Delta). To
such a sink a large transaction goes as segments alone: to write the rest here takes less time than a Spark job takes
to start, and a tenth of its CPU. Small transactions do not, because a file for each would be too many: the sink writes
several of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.buffer.transaction import OpenTransaction
from xidstream.pipeline.relations import RelationVersion

_LARGE_BYTES: Final = 4 << 20
"""In memory, for a transaction to become segments at its commit though none of it was spilled: 1 MB of Parquet."""
_FEW_TABLES: Final = 64
"""So many at most become segments only to end with their transaction: a file takes 1 ms here, and a link there."""


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
        too_large = [transaction for transaction in held if transaction.has_too_large_block]
        if not too_large and sum(transaction.n_bytes for transaction in held) <= self.limit_bytes:
            return None
        largest: tuple[int, Spill] | None = None
        for transaction in too_large or held:
            found = transaction.to_spill()
            if found is not None and (largest is None or found[0] > largest[0]):
                largest = (found[0], Spill(transaction, found[1]))
        return None if largest is None else largest[1]


def last_segments(transaction: OpenTransaction) -> list[RelationVersion]:
    """What a sink that takes segments as its own files is to get as such, of what is in memory at the commit."""
    if not transaction.segmented() and transaction.n_bytes < _LARGE_BYTES:
        return []
    sizes = transaction.group_sizes()
    if len(sizes) <= _FEW_TABLES:
        return list(sizes)
    segmented = transaction.segmented()
    return [
        relation for relation, n_bytes in sizes.items() if relation in segmented or n_bytes >= _LARGE_BYTES
    ]
