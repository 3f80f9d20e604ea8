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

from xidstream.pipeline.buffer.transaction import OpenTransaction
from xidstream.pipeline.relations import RelationVersion


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
