"""What a verification found, as values, as JSON and as text.

Keys of rows that differ are in it, because somebody must look at these rows. Other values are not, unless they were
asked for.

Called by ``verifying`` and the command line. Plain values: no Spark, no server.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xidstream.pipeline.quantities import counted, human_s

_MOST_REPAIRS: Final = 10


class Verdict(enum.Enum):
    EQUAL = "equal"
    DIFFERS = "differs"
    NOT_VERIFIED = "not_verified"


class DifferenceKind(enum.Enum):
    """How a row differs, seen from the source."""

    MISSING = "missing"  # the source has it, the log has not
    EXTRA = "extra"  # the log has it, the source has not
    CHANGED = "changed"  # both have its key, with other values


Texts = Mapping[str, str | None]
"""Column → the value's text; None for null."""


@dataclass(frozen=True)
class DifferingRange:
    """Rows with keys from ``first`` on, and before ``end``; None: without that limit. ``columns``: of the key (of a
    table without one: its first column)."""

    columns: tuple[str, ...]
    first: tuple[str | None, ...] | None
    end: tuple[str | None, ...] | None
    source_rows: int
    log_rows: int

    def __str__(self) -> str:
        name = ", ".join(self.columns)
        parts = [f"from {_values_text(self.first)}"] if self.first is not None else []
        parts += [f"before {_values_text(self.end)}"] if self.end is not None else []
        which = f"{name} {' '.join(parts)}" if parts else "all rows"
        return f"{which}: {self.source_rows:,} rows in the source, {self.log_rows:,} in the log"


@dataclass(frozen=True)
class DifferingRow:
    """``key`` is None for a table without one. ``columns``: those that differ, of a changed row. ``source`` and
    ``log``: all values, where they were asked for and there are any. ``n``: how many such rows there are."""

    kind: DifferenceKind
    key: Texts | None
    columns: tuple[str, ...] = ()
    n: int = 1
    source: Texts | None = None
    log: Texts | None = None

    def __str__(self) -> str:
        which = "a row" if self.key is None else ", ".join(f"{k}={_text(v)}" for k, v in self.key.items())
        which += f" ({self.n:,} of them)" if self.n > 1 else ""
        if self.kind is DifferenceKind.CHANGED:
            displayed = f"{which}: differs in {', '.join(self.columns)}"
        elif self.kind is DifferenceKind.MISSING:
            displayed = f"{which}: missing in the log"
        else:
            displayed = f"{which}: only in the log"
        for side, values in (("source", self.source), ("log", self.log)):
            if values is not None:
                displayed += f"\n      {side}: " + ", ".join(f"{k}={_text(v)}" for k, v in values.items())
        return displayed


@dataclass(frozen=True)
class Differences:
    """``missing``, ``extra``, ``changed``: rows. ``columns``: column → in how many changed rows it differs. ``rows``:
    some of them, in the order of their keys. ``repairs``: the conditions of `snapshot request --where` whose rows have
    all differences, one for each run of ranges; none where only the whole table has."""

    missing: int
    extra: int
    changed: int
    columns: Mapping[str, int]
    ranges: tuple[DifferingRange, ...]
    rows: tuple[DifferingRow, ...]
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableVerification:
    """``lsn``: commit LSN up to which the log's transactions count, as text; None where the table was not verified.
    ``left_out``: how many transactions up to there the source's snapshot did not see, so that they do not count.
    ``reason``: why it was not verified. ``absent``: columns that the log does not have; they count as null."""

    table: str
    verdict: Verdict
    lsn: str | None = None
    left_out: int = 0
    source_rows: int | None = None
    log_rows: int | None = None
    ranges: int = 0
    absent: tuple[str, ...] = ()
    reason: str | None = None
    elapsed_s: float = 0.0
    differences: Differences | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableVerification:
        found = value["differences"]
        differences = found and Differences(
            found["missing"],
            found["extra"],
            found["changed"],
            found["columns"],
            tuple(DifferingRange(**_tuples(each)) for each in found["ranges"]),
            tuple(
                DifferingRow(**{**_tuples(each), "kind": DifferenceKind(each["kind"])})
                for each in found["rows"]
            ),
            tuple(found.get("repairs", ())),
        )
        return cls(
            **{**_tuples(value), "verdict": Verdict(value["verdict"]), "differences": differences or None}
        )

    def __str__(self) -> str:
        if self.verdict is Verdict.NOT_VERIFIED:
            return f"{self.table}: not verified: {self.reason}"
        took = f"{counted(self.ranges, 'range')}, {human_s(self.elapsed_s)}"
        if self.verdict is Verdict.EQUAL:
            displayed = f"{self.table}: equal at {self.lsn}: {self.source_rows:,} rows ({took})"
        else:
            displayed = (
                f"{self.table}: differs at {self.lsn}: {self.source_rows:,} rows in the source, "
                f"{self.log_rows:,} in the log ({took})"
            )
        if self.left_out:
            displayed += f"; not compared: {counted(self.left_out, 'transaction')} still committing then"
        if self.absent:
            displayed += f"\n  not in the log, and null there: {', '.join(self.absent)}"
        if self.differences is None:
            return displayed
        return (
            displayed
            + _differences_text(self.differences)
            + _repairs_text(self.table, self.differences.repairs)
        )


@dataclass(frozen=True)
class Verification:
    """``tables``: in the order in which they were compared; each has what docs/verify.md lists. As text it is what the
    command line prints."""

    tables: Sequence[TableVerification] = field(default_factory=list)

    def of(self, verdict: Verdict) -> list[TableVerification]:
        """The tables with this verdict."""
        return [each for each in self.tables if each.verdict is verdict]

    @property
    def is_equal(self) -> bool:
        """Whether all tables were verified, and are equal. False if there are none."""
        return bool(self.tables) and len(self.of(Verdict.EQUAL)) == len(self.tables)

    @property
    def differs(self) -> bool:
        """Whether a table differs."""
        return bool(self.of(Verdict.DIFFERS))

    def to_json(self) -> dict[str, Any]:
        """The result as JSON: docs/verify.md lists its keys."""
        return {
            "equal": len(self.of(Verdict.EQUAL)),
            "differs": len(self.of(Verdict.DIFFERS)),
            "not_verified": len(self.of(Verdict.NOT_VERIFIED)),
            "tables": [each.to_json() for each in self.tables],
        }

    def __str__(self) -> str:
        return "\n".join([*map(str, self.tables), self.summary])

    @property
    def summary(self) -> str:
        """One line: how many tables are equal, different, not verified, and how many rows were compared."""
        equal, differs, not_verified = (len(self.of(verdict)) for verdict in Verdict)
        rows = sum(each.source_rows or 0 for each in self.tables)
        return (
            f"{counted(equal, 'table')} equal, {differs:,} different, {not_verified:,} not verified; "
            f"{counted(rows, 'row')} of the source compared"
        )


def _differences_text(found: Differences) -> str:
    lines = [f"  {found.changed:,} changed, {found.missing:,} missing in the log, {found.extra:,} only there"]
    if found.columns:
        lines.append("  columns: " + ", ".join(f"{name} ({n:,})" for name, n in found.columns.items()))
    lines += [f"  {each}" for each in found.ranges]
    lines += [f"    {each}" for each in found.rows]
    shown, n_rows = sum(each.n for each in found.rows), found.changed + found.missing + found.extra
    if shown < n_rows:
        lines.append(f"    … and {n_rows - shown:,} more" if found.rows else "    --show-values shows rows")
    return "".join(f"\n{line}" for line in lines)


def _repairs_text(table: str, repairs: Sequence[str]) -> str:
    command = f"xidstream snapshot request --table {shlex.quote(table)}"
    commands = [f"{command} --where {shlex.quote(where)}" for where in repairs[:_MOST_REPAIRS]] or [command]
    more = len(repairs) - len(commands)
    if more > 0:
        commands.append(f"… and {more:,} more ranges; or the whole table: {command}")
    each = ", one when the one before is done" if len(repairs) > 1 else ""
    return f"\n  what mends it{each}:" + "".join(f"\n    {text}" for text in commands)


def _text(value: str | None) -> str:
    return "null" if value is None else value


def _values_text(values: Sequence[str | None]) -> str:
    texts = [_text(value) for value in values]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _plain(value: Any) -> Any:
    """Values as JSON has them."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
