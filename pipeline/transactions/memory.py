"""Which part of which transaction goes to storage: when a buffer holds too much, and at a commit.

The rule: while a buffer holds more decoded bytes than the limit, it spills the largest group as a whole. A *group* is
the rows of one relation version of one transaction, or its logical messages. To spill the largest first makes the
fewest and largest segments, and a small transaction beside a giant keeps its rows in memory. The rule is a pure
function of the sizes, so it is tested without storage.

A block that is too large for memory (``is_too_large_for_memory``) is spilled whatever the limit leaves. Unless
``block_bytes`` is as large, it holds a value of tens of megabytes, or of a gigabyte. From memory such a value would
take its size in the object store, and several times its size in an executor's JVM; a segment is read without the JVM.

At a commit the rows in memory go to the sink from there, unless the sink takes segments as its own files (Delta). For
such a sink the rows of a large transaction become segments, if these are files worth having. Then the rows are written
once, here, and the sequencer and the driver have nothing to do with them. It is the one part of the lag after COMMIT
that grows with what is in memory, up to the limit. So a large rest is cut into several files, which are written side by
side: 48 MiB took 0.12 s as one file and 0.07 s as two, with two cores free. Beside other work it gains nothing, and
costs nothing but files. Small parts go from memory, because the driver writes them together with the rows that other
transactions have of the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.transactions.transaction import OpenTransaction

_LARGE_BYTES: Final = 4 << 20
"""A transaction with so much in memory becomes segments at its commit, even if none of it was spilled before. It makes
about 1 MB of Parquet."""
_FILE_BYTES: Final = 256 << 10
"""So much of one relation version becomes a file of its own at the commit. A file takes 2 ms here, whatever is in it,
so files of thousands of tables would take seconds."""
CHUNK_BYTES: Final = 16 << 20
"""In memory, for another file at the commit: 4 MB of Parquet. Smaller ones would cost readers more than this saves."""
MOST_CHUNKS: Final = 4
"""The most chunks of one relation version that are written at a time."""


@dataclass(frozen=True)
class Spill:
    """An order to the shell: write this group to storage."""

    transaction: OpenTransaction
    relation: RelationVersion | None
    """The group that is spilled; None for its logical messages."""


@dataclass(frozen=True)
class BufferMemory:
    limit_bytes: int

    def next_spill(self, transactions: Iterable[OpenTransaction]) -> Spill | None:
        """The group to spill now, or None while everything fits. Ask again after each spill."""
        held = list(transactions)
        too_large = [transaction for transaction in held if transaction.has_too_large_block]
        if not too_large and not self._is_over(held):
            return None
        largest: tuple[int, Spill] | None = None
        for transaction in too_large or held:
            found = transaction.to_spill()
            if found is not None and (largest is None or found[0] > largest[0]):
                largest = (found[0], Spill(transaction, found[1]))
        return None if largest is None else largest[1]

    def _is_over(self, held: Sequence[OpenTransaction]) -> bool:
        """A transaction of millions of savepoints keeps megabytes that no spill frees. Rows have half of the limit all
        the same: each block would be a segment of a few kilobytes otherwise."""
        n_row_bytes = sum(transaction.n_row_bytes for transaction in held)
        n_other_bytes = sum(transaction.n_bytes for transaction in held) - n_row_bytes
        return n_row_bytes > max(self.limit_bytes - n_other_bytes, self.limit_bytes // 2)


def take_last_segments(
    transaction: OpenTransaction,
) -> Iterator[tuple[RelationVersion, list[pa.RecordBatch]]]:
    """Take out of the transaction what a sink that takes segments as its own files is to get as such, of what is in
    memory at the commit: what each segment is to have."""
    if not transaction.has_segments and transaction.n_row_bytes < _LARGE_BYTES:
        return
    for relation, n_bytes in transaction.group_sizes().items():
        if n_bytes >= _FILE_BYTES:
            n_chunks = max(1, min(MOST_CHUNKS, n_bytes // CHUNK_BYTES))
            for chunk in _cut(transaction.take_group(relation), n_chunks):
                yield relation, chunk


def _cut(batches: list[pa.RecordBatch], n_chunks: int) -> list[list[pa.RecordBatch]]:
    """At most so many chunks, in order, of about as many rows; no batch is cut."""
    n_rows = sum(batch.num_rows for batch in batches)
    chunks: dict[int, list[pa.RecordBatch]] = {}
    n_before = 0
    for batch in batches:
        chunks.setdefault(n_before * n_chunks // n_rows, []).append(batch)
        n_before += batch.num_rows
    return list(chunks.values())
