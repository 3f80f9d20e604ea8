"""The rows of ``_snapshots``: the lines of a generation, and the events of the stream that end one.

Two events of the stream end generations at their position: a table is parked, or DDL changes it. Each is a ``Spoiler``.
The sink ends what it spoils before ``_transactions`` says that the batch is whole, so nobody reads it in between.

Plain values. Used by ``snapshot_log`` and ``generation_lines``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.ddl import Ddl
from xidstream.pipeline.snapshot.generation import Generation, GenerationState


def row_of(generation: Generation, n_rows: int) -> dict[str, Any]:
    bounds = generation.bounds
    return {
        "table": generation.name,
        "relid": generation.relid,
        "generation": generation.number,
        "place": int(bounds.snapshot_lsn),
        "valid_from": int(bounds.valid_from),
        "xmin": bounds.xmin,
        "xmax": bounds.xmax,
        "xip": list(bounds.xip),
        "key": None if generation.key is None else list(generation.key),
        "state": GenerationState.FINISHED.value,
        "reason": None,
        "until": None,
        "contained_upto": int(bounds.whole_upto) or None,
        "rows": n_rows,
    }


def ended_row(row: Mapping[str, Any], reason: str, until: int) -> dict[str, Any]:
    return {**row, "state": GenerationState.ENDED.value, "reason": reason, "until": until}


@dataclass(frozen=True)
class Spoiler:
    """What ends generations of the tables that it ``concerns``, by relid, at ``since``: that commit is not part of them
    any more. ``reason_of`` a row of one that finished: None if this does not end it."""

    concerns: Callable[[int], bool]
    since: Lsn
    reason_of: Callable[[Mapping[str, Any]], str | None]

    def ended(self, row: Mapping[str, Any], proven: Callable[[], int]) -> dict[str, Any] | None:
        reason = self.reason_of(row)
        return None if reason is None else ended_row(row, reason, min(proven(), int(self.since) - 1))


def park_spoiler(parked: ParkedTable) -> Spoiler:
    def reason_of(row: Mapping[str, Any]) -> str | None:
        spoils = parked.concerns(row["relid"]) and parked.spoils(row["place"])
        return parked.why_no_snapshot_stands if spoils else None

    return Spoiler(parked.concerns, parked.since_lsn, reason_of)


def ddl_spoiler(ddl: Ddl) -> Spoiler:
    def reason_of(row: Mapping[str, Any]) -> str | None:
        return ddl.reason(row["relid"], row["table"]) if ddl.commit_lsn > row["place"] else None

    return Spoiler(ddl.relids.__contains__, ddl.commit_lsn, reason_of)


def spoiled_rows(
    rows: Sequence[Mapping[str, Any]], spoilers: Sequence[Spoiler], newest: int, proven: Callable[[], int]
) -> list[dict[str, Any]]:
    """The lines that end generations of one table: each generation that stands at a spoiler's position, because its
    successor does not begin before that. The last one is ours if it has the number ``newest``."""
    ended = {row["place"] for row in rows if row["state"] == GenerationState.ENDED.value}
    finished = [row for row in rows if row["state"] == GenerationState.FINISHED.value]
    finished.sort(key=lambda row: row["place"])
    found = []
    for row, later in itertools.zip_longest(finished, finished[1:]):
        if row["place"] in ended or (later is None and row["generation"] != newest):
            continue
        spoiling = (each for each in spoilers if later is None or later["valid_from"] > each.since)
        lines = (each.ended(row, proven) for each in spoiling)
        if (line := next((line for line in lines if line is not None), None)) is not None:
            found.append(line)
    return found
