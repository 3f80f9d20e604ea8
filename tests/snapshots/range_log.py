"""Which ranges a run has read, as ``observed_run`` noted it: how far it is, and what each kill cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class RangeCosts:
    """``n_ranges``: of the snapshots that count. ``n_again``: ranges that were begun besides; ``n_whole`` of these had
    been read to their end. ``n_tables_anew``: snapshots that were given up. ``by_kill``: n_again, n_whole."""

    n_ranges: int = 0
    n_again: int = 0
    n_whole: int = 0
    n_tables_anew: int = 0
    by_kill: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.n_ranges} ranges, {self.n_again} read again ({self.n_whole} of them whole, "
            f"{self.n_tables_anew} tables anew)"
        )

    @property
    def by_kill_told(self) -> list[str]:
        return [
            f"{kill}: {n} ranges again, {whole} of them whole" for kill, (n, whole) in self.by_kill.items()
        ]


class RangeLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """A last line that is half written is left out."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]

    def percent(self, n_rows: int) -> int:
        """Of ``n_rows``, in the ranges that are read and not lost."""
        last: dict[str, tuple[int, int]] = {}
        for line in self.lines():
            place, rows = last.get(line["table"], (0, 0))
            last[line["table"]] = (line["place"], line["rows"] + (rows if line["place"] == place else 0))
        return 100 * sum(rows for _, rows in last.values()) // n_rows

    def costs(self, places: Mapping[str, int], kills: Sequence[tuple[int, str]]) -> RangeCosts:
        """``places``: of each table's snapshot that counts. ``kills``: how many lines there were at each.

        A range that was begun again under the same snapshot is the cost of the last kill before that. A snapshot that
        was given up, with all its ranges, is the cost of the kill that is nearest to its last line: the table may have
        been taken anew much later.
        """
        lines = self.lines()
        begun: Counter[tuple[str, int, int]] = Counter()
        done: set[tuple[str, int, int]] = set()
        last: dict[tuple[str, int], int] = {}
        wasted: list[tuple[str, bool]] = []
        for at, line in enumerate(lines):
            name = (line["table"], line["place"], line["number"])
            last[name[:2]] = at
            if line["what"] == "done":
                done.add(name)
            elif line["what"] == "begun":
                begun[name] += 1
                if begun[name] > 1:
                    wasted.append((next((k for n, k in reversed(kills) if n <= at), "no kill"), False))
        for table, place, number in begun:
            if place != places[table]:
                end = last[table, place]
                nearest = min(kills, key=lambda kill: abs(kill[0] - end), default=(0, "no kill"))
                wasted.append((nearest[1], (table, place, number) in done))
        costs = RangeCosts(sum(place == places[table] for table, place, _ in done))
        costs.by_kill = {kill: (0, 0) for _, kill in kills}
        for cause, whole in wasted:
            n, n_whole = costs.by_kill.get(cause, (0, 0))
            costs.by_kill[cause] = (n + 1, n_whole + whole)
        costs.n_again = sum(n for n, _ in costs.by_kill.values())
        costs.n_whole = sum(n for _, n in costs.by_kill.values())
        costs.n_tables_anew = sum(place != places[table] for table, place in last)
        return costs
