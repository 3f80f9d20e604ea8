"""What a chaos run found, as one table for people and one JSON file for later.

``python -m tests.chaos.report FILE...`` adds up the files of several runs. Only kills of rounds that were judged to
the end count: a round that broke off proves nothing about the kills before, and is a failure itself.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.chaos_round import RoundResult
from tests.chaos.kills import STREAM_POINTS

_WRONGS = ("lost", "twice", "alien", "disordered")


@dataclass
class PointReport:
    kills: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """Of the kills after which no other came before the sink took something new."""


@dataclass
class Report:
    points: dict[str, PointReport] = field(default_factory=dict)
    pauses: dict[str, PointReport] = field(default_factory=dict)
    """By the point where a process stopped itself. Recovery begins when it goes on."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """The machine's one-minute load, sampled while it ran."""
    seconds: float = 0.0
    cpus: int = field(default_factory=lambda: os.cpu_count() or 0)

    @classmethod
    def of(cls, results: list[RoundResult], loads: list[float], seconds: float) -> Report:
        report = cls(loads=loads, seconds=seconds)
        for result in results:
            verdict = result.verdict
            report.rounds.append(
                {
                    "seed": result.seed,
                    "settings": result.settings,
                    "kills": sum(not kill.is_pause for kill in result.kills),
                    "pauses": sum(kill.is_pause for kill in result.kills),
                    "judged": verdict is not None,
                    "seconds": round(result.seconds, 1),
                    "not_reached": result.not_reached,
                    "statuses": result.n_statuses,
                    "connections": result.n_connections,
                    "prepared": result.n_prepared,
                    "accusations": result.accusations,
                    "problems": result.problems,
                    "ok": result.ok,
                    **({} if verdict is None else asdict(verdict)),
                }
            )
            for kill in result.kills if verdict is not None else ():
                points = report.pauses if kill.is_pause else report.points
                point = points.setdefault(kill.point, PointReport())
                point.kills += 1
                if kill.recovery_s is not None:
                    point.recoveries_s.append(round(kill.recovery_s, 1))
        return report

    def add(self, other: Report) -> None:
        for into, points in ((self.points, other.points), (self.pauses, other.pauses)):
            for name, point in points.items():
                mine = into.setdefault(name, PointReport())
                mine.kills += point.kills
                mine.recoveries_s += point.recoveries_s
        self.rounds += other.rounds
        self.loads += other.loads
        self.seconds += other.seconds

    # -- the judgement ---------------------------------------------------------------------------------

    def failures(self, least: int = 0) -> list[str]:
        """Why the run is no proof, in words; ``least`` kills are wanted at every fault point."""
        found = [f"seed {r['seed']} failed" for r in self.rounds if not r["ok"]]
        if not self.rounds:
            found.append("no round was run")
        short = [p for p in STREAM_POINTS if self._kills(p) < least]
        if short:
            found.append(
                f"less than {least} kills at: " + ", ".join(f"{p} ({self._kills(p)})" for p in short)
            )
        return found

    def _kills(self, point: str) -> int:
        return self.points[point].kills if point in self.points else 0

    def _sum(self, key: str) -> int:
        return sum(r.get(key, 0) for r in self.rounds)

    # -- for people and for later ----------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"{'fault point':24} {'process':10} kills  timed  recovery: median    max (s)"]
        everywhere = [*STREAM_POINTS, *sorted(self.points.keys() - STREAM_POINTS)]
        for name in everywhere:
            process = STREAM_POINTS[name].split(":")[0] if name in STREAM_POINTS else "outside"
            lines.append(_line(name, process, self.points.get(name, PointReport())))
        for title, driver in (("all of the driver", True), ("all others", False)):
            chosen = [
                p for n, p in self.points.items() if STREAM_POINTS.get(n, "").startswith("driver") == driver
            ]
            total = PointReport(sum(p.kills for p in chosen), [s for p in chosen for s in p.recoveries_s])
            lines.append(_line(title, "", total))
        n_pauses = sum(p.kills for p in self.pauses.values())
        if n_pauses:
            times = [s for p in self.pauses.values() for s in p.recoveries_s]
            lines.append(_line("all pauses", "", PointReport(n_pauses, times)))
        judged = [r for r in self.rounds if r["judged"]]
        n_kills = sum(p.kills for p in self.points.values())
        n_struck = sum(self._kills(p) > 0 for p in STREAM_POINTS)
        wrongs = ", ".join(f"{self._sum(key)} {key}" for key in _WRONGS)
        lines.append(
            f"{n_kills} kills at {n_struck} of {len(STREAM_POINTS)} fault points"
            + (f" and {n_pauses} pauses at {len(self.pauses)}" if n_pauses else "")
            + f" in {len(judged)} judged rounds "
            f"({len(self.rounds) - len(judged)} broke off), {self.seconds:.0f} s on {self.cpus} cores"
        )
        lines.append(
            f"{self._sum('n_transactions')} transactions, {self._sum('n_rows')} rows, {self._sum('n_messages')} "
            f"messages: {wrongs}, {sum(len(r.get('differences', ())) for r in self.rounds)} values differ"
        )
        lines.append(
            f"spy: {self._sum('statuses')} status updates on {self._sum('connections')} connections, "
            f"{self._sum('prepared')} prepared: {sum(len(r['accusations']) for r in self.rounds)} accusations; "
            f"{sum(len(r['problems']) for r in self.rounds)} other problems"
        )
        if self.loads:
            lines.append(f"load: median {statistics.median(self.loads):.1f}, max {max(self.loads):.1f}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        content = json.loads(path.read_text(encoding="utf-8"))
        # A file from before has no pauses.
        points, pauses = (
            {name: PointReport(**point) for name, point in content.pop(key, {}).items()}
            for key in ("points", "pauses")
        )
        return cls(points=points, pauses=pauses, **content)


def _line(name: str, process: str, point: PointReport) -> str:
    times = point.recoveries_s
    shown = f"{statistics.median(times):17.1f} {max(times):6.1f}" if times else f"{'-':>17} {'-':>6}"
    return f"{name:24} {process:10} {point.kills:5} {len(times):6} {shown}"


def main() -> None:
    first, *others = [Report.read(Path(name)) for name in sys.argv[1:]]
    for report in others:
        first.add(report)
    print(first)


if __name__ == "__main__":
    main()
