"""A batch's parts by table and by layout: what a DataFrame or a Delta table is made from.

This is bookkeeping over ``exchange.Batch`` that touches no rows. The parts of a table are in one ``VersionParts`` for
each distinct layout, in the order in which the layouts first appear. Two relation versions that differ only in relid or
replica identity have one layout.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from xidstream.pipeline.exchange import Batch, MemoryPart, SegmentPart
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema

PARTITION_BYTES: Final = 32 << 20
"""Small parts share a task up to this size. A task costs some ten milliseconds, 32 MB of Arrow about as much."""

TableName = tuple[str, str]
"""``(schema, table)``; ``table_label`` makes one text of it."""


@dataclass
class VersionParts:
    """The parts of one layout. ``schema`` is the contract's."""

    relation: RelationVersion
    schema: pa.Schema
    memory: list[MemoryPart] = field(default_factory=list)
    segments: list[SegmentPart] = field(default_factory=list)


@dataclass(frozen=True)
class Appearance:
    """A relation version among the parts of a table, from ``commit_lsn`` on. ``layout``: the index of its version in
    ``TableParts.versions``."""

    commit_lsn: int
    relation: RelationVersion
    layout: int


@dataclass
class TableParts:
    """``appearances``: in commit order; the last one is the newest. Versions of one layout may differ in types and
    keys."""

    name: TableName
    versions: list[VersionParts] = field(default_factory=list)
    appearances: list[Appearance] = field(default_factory=list)

    @property
    def label(self) -> str:
        return table_label(*self.name)

    @property
    def schemas(self) -> list[pa.Schema]:
        """The schema of each layout."""
        return [version.schema for version in self.versions]

    @property
    def n_rows(self) -> int:
        return sum(
            sum(part.n_rows for part in version.memory) + sum(part.n_rows for part in version.segments)
            for version in self.versions
        )

    @property
    def memory_bytes(self) -> int:
        return sum(part.n_bytes for version in self.versions for part in version.memory)

    def first_commit_lsns(self) -> set[int]:
        """The first commit LSN of each part: of transactions that surely have rows of the table."""
        segments = {part.commit.commit_lsn for version in self.versions for part in version.segments}
        return segments | {part.first_commit_lsn for version in self.versions for part in version.memory}

    def without(self, parts: Collection[MemoryPart | SegmentPart]) -> TableParts:
        """The other parts, in the same layouts."""
        gone = {id(part) for part in parts}
        versions = [
            VersionParts(
                version.relation,
                version.schema,
                [part for part in version.memory if id(part) not in gone],
                [part for part in version.segments if id(part) not in gone],
            )
            for version in self.versions
        ]
        return TableParts(self.name, versions)

    def segments(self) -> list[tuple[int, SegmentPart]]:
        """All segments with the index of their version, in the order of the batch within each version."""
        return [(i, part) for i, version in enumerate(self.versions) for part in version.segments]


def tables_of(batch: Batch) -> dict[TableName, TableParts]:
    """The parts of each table. Parts without a row are left out, and so are tables that have no other parts."""
    tables: dict[TableName, TableParts] = {}
    layouts: dict[tuple[TableName, tuple[tuple[str, str], ...]], int] = {}

    def version_of(relation: RelationVersion, commit_lsn: int) -> VersionParts:
        name = (relation.schema, relation.table)
        table = tables.setdefault(name, TableParts(name))
        if table.appearances and table.appearances[-1].relation == relation:
            return table.versions[table.appearances[-1].layout]
        key = (name, tuple((f.name, str(f.type)) for f in relation.arrow_fields))
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = len(table.versions)
            table.versions.append(VersionParts(relation, contract_schema(relation)))
        # In a unit of many transactions the parts of two tables of one name (DROP and CREATE) are in no order.
        appearance = Appearance(commit_lsn, relation, layout)
        bisect.insort(table.appearances, appearance, key=lambda each: each.commit_lsn)
        return table.versions[layout]

    for unit in batch.units:
        for segment in unit.segments:
            if segment.n_rows:
                version_of(segment.relation, segment.commit.commit_lsn).segments.append(segment)
        for memory in unit.memory:
            if memory.n_rows:
                version_of(memory.relation, memory.first_commit_lsn).memory.append(memory)
    return tables


def group_by_bytes(sizes: Sequence[int], parallelism: int) -> list[tuple[int, ...]]:
    """Consecutive indexes, in groups of about ``PARTITION_BYTES``, or smaller ones to keep ``parallelism`` tasks busy.

    Each group has at least one index. A part that is larger than the limit is a group of its own.
    """
    limit = max(1, min(PARTITION_BYTES, sum(sizes) // max(1, parallelism)))
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    n_bytes = 0
    for index, size in enumerate(sizes):
        if current and n_bytes + size > limit:
            groups.append(tuple(current))
            current, n_bytes = [], 0
        current.append(index)
        n_bytes += size
    if current:
        groups.append(tuple(current))
    return groups
