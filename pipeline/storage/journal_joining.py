"""Units of the journal that were small and stand side by side, joined to a few larger ones.

A unit costs a journal file some kilobytes, whatever is in it: a stream of its own for each table, a line in the
directory, and later a place in memory and a task's share of a batch. At ten small commits a second that is many times
their rows. So a file that takes in others joins them: the rows of each table are one object then.

What a sink sees stays the same: transactions, rows and messages in the order of commits, none of them split. A joined
unit is no larger than a batch may be (``most_rows``). What the sink has in part is never joined
(``commits.journal``), so nothing is released twice because of it.

Units with segments, with packs of many tables, or with two versions of one table are left as they are: the first cost
a line already, and the others would need their rows written anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from xidstream.pipeline.exchange import (
    ArrowRef,
    MemoryPart,
    Sealed,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.packs import FEW_TABLES
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.schema import RelationVersion

JOINED_BYTES: Final = 256 << 10
"""The bytes of rows and messages of a joined unit: what is beside them is little then, and small batches stay small."""
_MOST_MESSAGES: Final = 64

Unit = tuple[UnitEnd, Sealed]


@dataclass(eq=False)
class JoinedRows:
    """Stands for a reference in a joined unit: the rows of all of these, one after the other."""

    refs: tuple[ArrowRef, ...]

    def table(self, fetch: Callable[[ArrowRef], pa.Table]) -> pa.Table:
        return pa.concat_tables([fetch(ref) for ref in self.refs]).combine_chunks()


def joined(units: Sequence[Unit], most_rows: int) -> list[Unit]:
    """The content in fewer units, of ``most_rows`` each where they were no larger before. A reference may be a
    ``JoinedRows`` then."""
    made: list[Unit] = []
    group = _Group(most_rows)
    for unit in units:
        if not group.takes(unit[1]):
            made += group.units()
            group = _Group(most_rows)
        if _may_be_joined(unit[1]):
            group.add(unit)
        else:
            made.append(unit)
    return made + group.units()


def _may_be_joined(unit: Sealed) -> bool:
    relations = {part.relation for part in unit.memory}
    return not (
        unit.segments
        or len({relation.relid for relation in relations}) < len(relations)
        or unit.bad_tables
        or unit.undeliverable is not None
        or any(part.pack_index is not None for part in unit.memory)
        or any(isinstance(part, SpilledMessages) for part in unit.messages)
    )


class _Group:
    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._units: list[Unit] = []
        self._n_rows = self._n_bytes = self._n_messages = 0
        self._relations: dict[int, RelationVersion] = {}

    def takes(self, unit: Sealed) -> bool:
        """Whether it has room for the unit, or is empty."""
        if not self._units:
            return True
        if not _may_be_joined(unit):
            return False
        relations = {part.relation.relid: part.relation for part in unit.memory}
        return (
            self._n_rows + unit.n_rows <= self._most_rows
            and self._n_bytes + unit.n_bytes <= JOINED_BYTES
            and self._n_messages + len(unit.messages) <= _MOST_MESSAGES
            and len(self._relations.keys() | relations.keys()) <= FEW_TABLES
            and all(self._relations.get(relid, each) == each for relid, each in relations.items())
        )

    def add(self, unit: Unit) -> None:
        content = unit[1]
        self._units.append(unit)
        self._n_rows += content.n_rows
        self._n_bytes += content.n_bytes
        self._n_messages += len(content.messages)
        self._relations.update({part.relation.relid: part.relation for part in content.memory})

    def units(self) -> list[Unit]:
        if len(self._units) < 2:
            return self._units
        ends, contents = [end for end, _ in self._units], [content for _, content in self._units]
        joined = Sealed(
            transactions=_one_batch([content.transactions for content in contents]),
            memory=_joined_parts([part for content in contents for part in content.memory]),
            segments=(),
            messages=tuple(part for content in contents for part in content.messages),
            n_rows=self._n_rows,
            n_bytes=self._n_bytes,
            skipped=tuple(pair for content in contents for pair in content.skipped),
        )
        return [(_joined_end(ends), joined)]


def _joined_parts(parts: Sequence[MemoryPart]) -> tuple[MemoryPart, ...]:
    by_relation: dict[RelationVersion, list[MemoryPart]] = {}
    for part in parts:
        by_relation.setdefault(part.relation, []).append(part)
    return tuple(
        dataclasses.replace(
            found[0],
            n_rows=sum(part.n_rows for part in found),
            n_bytes=sum(part.n_bytes for part in found),
            ref=found[0].ref if len(found) == 1 else JoinedRows(tuple(part.ref for part in found)),
        )
        for found in by_relation.values()
    )


def _joined_end(ends: Sequence[UnitEnd]) -> UnitEnd:
    """Units of messages outside of transactions have no LSN."""
    return UnitEnd(
        next((end.first_commit_lsn for end in ends if end.first_commit_lsn), INVALID_LSN),
        max(end.last_commit_lsn for end in ends),
        max(end.end_lsn for end in ends),
        sum(end.n_transactions for end in ends),
    )


def _one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches).combine_chunks()
    return table.to_batches()[0] if table.num_rows else batches[0]
