"""What an open transaction has in memory, by group: the rows of one relation version, or its logical messages.

A transaction may have rows of ten thousand tables. So the questions that come with each block or spill are answered
without a look at all groups: how much is held, which group is the largest, and whether one has a block that is too
large for memory. The largest group comes from a heap, which has outdated entries, too. Such an entry is dropped when it
comes to the top, and all of them are dropped when they outnumber the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from xidstream.pipeline.schema import RelationVersion, rows

GroupKey = RelationVersion | None
"""The key of a group; None for the logical messages."""

_LARGEST_BYTES: Final = 64 << 20
"""The limit for one decoded block in memory. It is the default of ``buffer_memory_bytes``, so that only a larger
setting is affected by it."""

_ARRAY_BYTES: Final = 800
"""What one array takes besides its values: its objects, and the rounding of its allocations. A hundred open
transactions have many small blocks each, and 16 MiB of values in batches of 100 rows took 41 MiB."""

_OUTDATED_ENTRIES: Final = 64
"""The heap may have so many entries more than twice the number of groups."""


def is_too_large_for_memory(n_bytes: int) -> bool:
    """Whether a decoded block of ``n_bytes`` has to go to storage."""
    return n_bytes > _LARGEST_BYTES


@dataclass
class Group:
    """``sizes``: the bytes of each batch. ``end``: the number after the last row's; 0 for messages."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    n_bytes: int = 0
    end: int = 0


class Groups:
    def __init__(self) -> None:
        self._groups: dict[GroupKey, Group] = {}
        """What is in memory, by relation version; None is the key of the messages."""
        self._too_large: dict[GroupKey, None] = {}
        """The groups that have a block which is too large for memory, in the order in which they got it."""
        self._by_size: list[tuple[int, int, GroupKey]] = []
        """A heap with the largest group at the top. It has outdated entries, too."""
        self._n_entries = 0
        """How many entries the heap ever got: it tells entries of one size apart."""
        self.n_bytes = 0
        """The bytes of all groups, with what Arrow needs besides the values."""

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._groups

    def __iter__(self) -> Iterator[GroupKey]:
        """In the order in which the groups began."""
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def size(self, key: GroupKey) -> int:
        """The bytes of one group; 0 if there is none."""
        group = self._groups.get(key)
        return 0 if group is None else group.n_bytes

    def n_rows(self, key: GroupKey) -> int:
        """The rows of one group; 0 if there is none."""
        group = self._groups.get(key)
        return 0 if group is None else sum(batch.num_rows for batch in group.batches)

    def add(self, key: GroupKey, batch: pa.RecordBatch) -> None:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
        n_bytes: int = batch.nbytes + _ARRAY_BYTES * batch.num_columns
        group.batches.append(batch)
        group.sizes.append(n_bytes)
        group.n_bytes += n_bytes
        if key is not None:
            group.end = rows.last_seq(batch) + 1
        self.n_bytes += n_bytes
        if is_too_large_for_memory(n_bytes):
            self._too_large[key] = None
        self._enter(key, group)

    def take(self, key: GroupKey) -> Group:
        """Hand a group over. Raises KeyError if there is none."""
        group = self._groups.pop(key)
        self.n_bytes -= group.n_bytes
        self._too_large.pop(key, None)
        return group

    def truncate(self, n_rows: int) -> None:
        """Drop the rows of all groups from number ``n_rows`` on.

        A batch that loses some of its rows keeps its size here, because it keeps its memory. That is at most one batch
        of each group.
        """
        for key in [key for key, group in self._groups.items() if group.end > n_rows]:
            group = self._groups[key]
            while group.batches and rows.first_seq(group.batches[-1]) >= n_rows:
                group.batches.pop()
                n_bytes = group.sizes.pop()
                group.n_bytes -= n_bytes
                self.n_bytes -= n_bytes
            if not any(map(is_too_large_for_memory, group.sizes)):
                self._too_large.pop(key, None)
            if not group.batches:
                del self._groups[key]
                continue
            group.batches[-1] = rows.up_to(group.batches[-1], n_rows)
            group.end = rows.last_seq(group.batches[-1]) + 1
            self._enter(key, group)

    @property
    def has_too_large(self) -> bool:
        """Whether a group has a block that is too large for memory."""
        return bool(self._too_large)

    def to_spill(self) -> tuple[int, GroupKey] | None:
        """The size and key of the group to spill next: one with a block that is too large for memory, else the
        largest, and of equal ones the first. None if nothing is held."""
        for key in self._too_large:
            return self._groups[key].n_bytes, key
        while self._by_size:
            size, _, key = self._by_size[0]
            if self.size(key) == -size:
                return -size, key
            heapq.heappop(self._by_size)
        return None

    def _enter(self, key: GroupKey, group: Group) -> None:
        self._n_entries += 1
        heapq.heappush(self._by_size, (-group.n_bytes, self._n_entries, key))
        if len(self._by_size) > 2 * len(self._groups) + _OUTDATED_ENTRIES:
            self._by_size = [(-g.n_bytes, i, k) for i, (k, g) in enumerate(self._groups.items())]
            heapq.heapify(self._by_size)
