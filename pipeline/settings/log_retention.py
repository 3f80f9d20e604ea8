"""For how long the change log keeps the changes of a table: ``log_retention``, a setting of the sinks
that keep one (Delta, Iceberg).

``30d`` is an age, ``100 GB`` is a size of one table's files, and ``base`` is as far back as the oldest base table that
a mirror keeps. An empty text keeps everything. One value is for all tables. Values for some stand before it, each with
a pattern, and the first pattern that fits a table's name counts::

    public.events_*=7d, public.audit=, 30d

``by_pattern`` says what a pattern is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.by_pattern import first_fitting, parts_of
from xidstream.pipeline.settings.sizes import parse_size
from xidstream.pipeline.settings.times import duration_s

LEAST_AGE_S: Final = 3600.0
"""Nothing younger is removed, whatever is asked for: what the server may send again, and what a snapshot in progress or
a session's own view needs, lies near the newest commit."""
BASE: Final = "base"
_SIZE_UNITS: Final = tuple("bB")


@dataclass(frozen=True)
class TableRetention:
    """One of the three, or none of them: then everything is kept. ``age_s``: seconds before the newest commit."""

    age_s: float | None = None
    n_bytes: int | None = None
    is_base: bool = False

    @property
    def keeps_all(self) -> bool:
        return self == TableRetention()

    @classmethod
    def parse(cls, text: str) -> TableRetention:
        """Raises ConfigError."""
        text = text.strip()
        if not text:
            return cls()
        if text == BASE:
            return cls(is_base=True)
        if text.isdecimal() or text.endswith(_SIZE_UNITS):
            return cls(n_bytes=parse_size(text, "log_retention"))
        age_s = duration_s(text, "log_retention")
        if age_s < LEAST_AGE_S:
            raise ConfigError(f"log_retention must be 1h or more, got {text!r}")
        return cls(age_s=age_s)


@dataclass(frozen=True)
class LogRetention:
    """``by_pattern``: in order. ``others``: of tables that no pattern fits."""

    by_pattern: tuple[tuple[str, TableRetention], ...] = ()
    others: TableRetention = TableRetention()

    @classmethod
    def parse(cls, text: str) -> LogRetention:
        """Raises ConfigError."""
        parts = parts_of(text, "log_retention")
        if len(parts.others) > 1:
            raise ConfigError("log_retention has more than one value without a pattern")
        by_pattern = tuple((pattern, TableRetention.parse(value)) for pattern, value in parts.by_pattern)
        return cls(by_pattern, TableRetention.parse("".join(parts.others)))

    def of(self, table: str) -> TableRetention:
        """``table``: ``schema.table``."""
        return first_fitting(table, self.by_pattern, self.others)

    @property
    def keeps_all(self) -> bool:
        return all(each.keeps_all for each in (self.others, *(each for _, each in self.by_pattern)))


KEEP_ALL: Final = LogRetention()
