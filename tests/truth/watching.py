"""What the log answers beside the source: equal to the truth, refused with a reason, or different.

The lightest real path: ``ChangeLog.as_of`` in a local Spark session, of one or two of the tables at each look, over a
real run's Delta tables. There is no way to a state without Spark, and a fold in Python would be another program.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltalake import DeltaTable

from tests.truth.source import Rows, Source, Truth, row_of
from xidstream import ChangeLog, Mirror
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.manifest import newest, read_lines
from xidstream.pipeline.errors import PreconditionMissing, Unsupported, UsageError
from xidstream.pipeline.pg import Lsn


@dataclass
class Verdict:
    """``n_brought_in``: looks that lacked large values of rows which an UPDATE had brought into a row filter, and
    nothing else: nobody sends them (docs/current-state.md). ``refused_s``: by table, for how long looks at its newest
    state were refused. ``reasons``: of refusals."""

    n_equal: Counter[str] = field(default_factory=Counter)
    n_refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    refused_s: Counter[str] = field(default_factory=Counter)
    looked_s: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    n_brought_in: int = 0

    def __str__(self) -> str:
        n = sum(self.n_equal.values()) + sum(self.n_refused.values())
        refused_s, looked_s = sum(self.refused_s.values()), sum(self.looked_s.values())
        lines = [
            f"{n} looks: {dict(self.n_equal)} equal, {dict(self.n_refused)} refused, {len(self.differences)} different",
            f"{self.n_brought_in} looks lacked large values of rows that came into a row filter",
            f"the newest state of a table was refused for {refused_s:.0f} s of {looked_s:.0f} s between looks at it",
        ]
        lines += [f"  refused {n:5} {reason}" for reason, n in self.reasons.most_common(12)]
        return "\n".join([*lines, *self.differences])


class Watcher:
    def __init__(self, source: Source, log: ChangeLog, spark: Any, seed: int) -> None:
        self._source, self._log, self._spark = source, log, spark
        self._dice = random.Random(f"looks {seed}")
        self._mirror = Mirror(log.root.uri)
        self._last_look_s: dict[str, float] = {}
        self.verdict = Verdict()

    def look(self) -> None:
        """At the newest state and at an older one, of a table each."""
        self._at(None, self._some_table(), "default")
        readable = int(self._log.readable_lsn)
        first = int(self._source.truths[0].end)
        if readable > first:
            self._at(Lsn(self._dice.randint(first, readable)), self._some_table(), "older")

    def refresh(self) -> None:
        """Bring the base tables to the newest state, and compare all of them, as deltalake reads them."""
        self._mirror.refresh(self._spark)
        for line in newest(read_lines(DeltaBases(self._log.root), self._log.application_id)):
            location = self._log.root.child("current").child(line.directory)
            table = DeltaTable(location.uri, version=line.version).to_pyarrow_table()
            rows = [{k: v for k, v in row.items() if k != "_text"} for row in table.to_pylist()]
            self._judge(Lsn(line.lsn), line.table, "base", Counter(map(row_of, rows)))

    def all_standing(self, timeout_s: float) -> set[str]:
        """Look at all tables until each is readable at the end of all, and return those that are not."""
        last = self._source.truths[-1]
        deadline = time.monotonic() + timeout_s
        left = set(last.tables)
        while left and time.monotonic() < deadline:
            try:
                self._log.wait(last.begin, timeout_s=timeout_s)
            except PreconditionMissing:
                pass
            left -= {table for table in left if self._at(None, table, "end")}
        return left

    # -- inside ------------------------------------------------------------------------------------------

    def _some_table(self) -> str:
        return self._dice.choice(sorted({*self._source.truths[-1].tables, *self._source.truths[0].tables}))

    def _at(self, lsn: Lsn | None, table: str, kind: str) -> bool:
        """Whether it was answered."""
        now_s = time.monotonic()
        since_s = now_s - self._last_look_s.get(table, now_s)
        try:
            state = self._log.as_of(self._spark, lsn=lsn)
            frame = state[table]
            rows = Counter(row_of(row.asDict()) for row in frame.collect())
        except (PreconditionMissing, Unsupported, UsageError) as error:
            self.verdict.n_refused[kind] += 1
            self.verdict.reasons[_short(error.message)] += 1
            is_answered = False
        else:
            self._judge(state.lsn, table, kind, rows)
            is_answered = True
        if kind == "default":
            self._last_look_s[table] = now_s
            self.verdict.looked_s[table] += since_s  # type: ignore[assignment]
            if not is_answered:
                self.verdict.refused_s[table] += since_s  # type: ignore[assignment]
        return is_answered

    def _judge(self, lsn: Lsn, table: str, kind: str, rows: Rows) -> None:
        candidates = truths_at(self._source.truths, lsn)
        if any(truth.tables.get(table) == rows for truth in candidates):
            self.verdict.n_equal[kind] += 1
            return
        if any(
            table in truth.filtered and lacks_large_values(rows, truth.tables[table]) for truth in candidates
        ):
            self.verdict.n_brought_in += 1
            return
        truth = candidates[-1]
        expected = truth.tables.get(table)
        at = self._source.truths.index(truth)
        story = "\n".join(f"      {'; '.join(t.story)}" for t in self._source.truths[max(at - 6, 0) : at + 2])
        what = "no such table is published" if expected is None else _difference(rows, expected)
        self.verdict.differences.append(f"  DIFFERENT {kind} {table} at {lsn}, step {at}: {what}\n{story}")


def lacks_large_values(rows: Rows, expected: Rows) -> bool:
    """Whether the rows are the expected ones, but for large values (``t``) that are null."""
    more, less = rows - expected, expected - rows
    without = Counter(
        tuple((name, None if name == "t" else value) for name, value in row) for row in less.elements()
    )
    return more == without


def truths_at(truths: Sequence[Truth], lsn: Lsn) -> list[Truth]:
    """What may have stood at ``lsn``: one truth, but where a commit's LSN is not known as exactly as that."""
    found = []
    for i, truth in enumerate(truths):
        begins = truth.begin <= lsn or i == 0
        ended = i + 1 < len(truths) and truths[i + 1].end <= lsn
        if begins and not ended:
            found.append(truth)
    return found


def _difference(rows: Rows, expected: Rows) -> str:
    more, less = rows - expected, expected - rows
    return (
        f"{rows.total()} rows for {expected.total()}; too many: {[dict(r) for r in list(more)[:2]]}, "
        f"missing: {[dict(r) for r in list(less)[:2]]}"
    )


def _short(message: str) -> str:
    """Without what differs from one refusal to the next."""
    words = [
        "…" if any(c.isdigit() for c in word) or "." in word.strip(".,:;") else word
        for word in message.split()
    ]
    return " ".join(words)[:150]
