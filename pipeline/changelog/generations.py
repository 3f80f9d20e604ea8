"""Which generation of a table stands at an LSN: what ``_snapshots`` says, and no more than it says.

A generation stands from its ``valid_from`` on. A later snapshot of the same table does not touch it: at an LSN below
the later one's ``valid_from`` the former still is the table, if it has not ended.

A generation stands as far as it is proven: up to there the run has looked at the source's catalog, and found the table
as it was at the snapshot (``pipeline.snapshot.proven``). Beyond that something may have happened to the table that the
stream does not say, so nothing is answered there yet. A generation that has ended stands up to what was proven by then
(``until``), and answers below that for ever.

A table without any line is not known at all, even one that was made after the slot: nothing in the log proves that it
was empty when the stream began.

``_snapshots`` grows by two or three lines with each snapshot of a table, and all of it is read. Lines are made into
values for the tables that are asked for alone (``StoredGenerations``): that is what takes long.

Plain values, no Spark and no Delta. Called by ``change_log``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import GenerationState

_ASK = "`xidstream snapshot request --table {table}` has it taken; see docs/snapshots.md"


@dataclass(frozen=True)
class TableGeneration:
    """A generation as its lines of ``_snapshots`` tell it. ``ended``: why it does not stand any more, or None; then
    ``until`` is the last LSN at which it does. ``n_rows``: of its snapshot; None where it was not counted."""

    table: str
    relid: int
    number: int
    bounds: SnapshotBounds
    key: tuple[str, ...] | None
    ended: str | None
    until: Lsn | None = None
    n_rows: int | None = None

    @property
    def stands_somewhere(self) -> bool:
        return self.until is None or self.until >= self.bounds.valid_from


def generations_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[TableGeneration]]:
    """By table, in the order of their snapshots."""
    found: dict[tuple[str, int], TableGeneration] = {}
    # The line that ends a generation counts, wherever it stands; of two of them, the one that has it stand longer.
    for line in sorted(
        lines, key=lambda line: (line["state"] == GenerationState.ENDED.value, line.get("until") or 0)
    ):
        is_ended = line["state"] == GenerationState.ENDED.value
        bounds = SnapshotBounds(
            Lsn(line["place"]),
            Lsn(line["valid_from"]),
            line["xmin"],
            line["xmax"],
            tuple(line["xip"]),
            0,
            Lsn(line.get("contained_upto") or 0),
        )
        key = None if line["key"] is None else tuple(line["key"])
        reason = (line["reason"] or "for a reason that was not recorded") if is_ended else None
        found[line["table"], line["place"]] = TableGeneration(
            line["table"],
            line["relid"],
            line["generation"],
            bounds,
            key,
            reason,
            Lsn(line.get("until") or 0) if is_ended else None,
            line.get("rows"),
        )
    tables: dict[str, list[TableGeneration]] = {}
    for generation in sorted(found.values(), key=lambda g: g.bounds.snapshot_lsn):
        tables.setdefault(generation.table, []).append(generation)
    return tables


class StoredGenerations(Mapping[str, list[TableGeneration]]):
    """What ``generations_of`` makes of ``lines``, each table's when it is asked for."""

    def __init__(self, lines: pa.Table) -> None:
        self._lines = lines.sort_by("table")
        runs = pc.run_end_encode(self._lines["table"].combine_chunks())
        ends = runs.run_ends.to_pylist()
        self._spans = dict(zip(runs.values.to_pylist(), zip([0, *ends], ends, strict=False), strict=True))
        self._made: dict[str, list[TableGeneration]] = {}

    def __getitem__(self, table: str) -> list[TableGeneration]:
        if table not in self._made:
            first, end = self._spans[table]
            lines = self._lines.slice(first, end - first).to_pylist()
            self._made[table] = generations_of(lines)[table]
        return self._made[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def generation_at(table: str, generations: Sequence[TableGeneration], lsn: Lsn) -> TableGeneration:
    """The one that stands at ``lsn``. Raises PreconditionMissing, which says why there is none.

    ``lsn`` is proven, and was so before ``generations`` were read.
    """
    if not generations:
        raise PreconditionMissing(
            f"table {table} has no snapshot, so what it held before its changes is not known",
            remedy=_ASK.format(table=table),
        )
    begun = [g for g in generations if g.bounds.valid_from <= lsn]
    if begun and begun[-1].until is not None and lsn <= begun[-1].until:
        return begun[-1]
    if begun and begun[-1].ended is None:
        return begun[-1]
    if begun:
        later = next((g for g in generations[len(begun) :] if g.stands_somewhere), None)
        known = f"; it is known again from {later.bounds.valid_from}" if later else ""
        raise PreconditionMissing(
            f"table {table} is not known at {lsn}: the snapshot of {begun[-1].bounds.valid_from} is valid up to "
            f"{begun[-1].until} ({begun[-1].ended}){known}",
            remedy="ask for a later LSN" if later else _ASK.format(table=table),
        )
    first = next((g for g in generations if g.ended is None), generations[0])
    raise PreconditionMissing(
        f"table {table} is not known at {lsn}: its snapshot is valid from {first.bounds.valid_from}",
        remedy="ask for a later LSN; where that is beyond the newest complete commit, a run of the slot brings it "
        "within seconds",
    )
