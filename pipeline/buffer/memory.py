"""Which part of which open transaction goes to storage when a buffer holds too much.

The rule: while the decoded bytes held are over the limit, the largest group (one relation version of one
transaction, or its logical messages) is spilled whole. Largest first makes the fewest and largest segments, and a
small transaction beside a giant keeps its rows in memory. It is a pure function of the sizes, so it is tested
without storage.
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
        if sum(transaction.n_bytes for transaction in held) <= self.limit_bytes:
            # This is asked for each block, and must not look at all tables of a transaction that has thousands.
            return None
        largest: tuple[int, Spill] | None = None
        for transaction in held:
            for relation, size in transaction.spillable():
                if largest is None or size > largest[0]:
                    largest = (size, Spill(transaction, relation))
        return None if largest is None else largest[1]
