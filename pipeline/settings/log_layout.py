"""By which column the rows of a table are ordered inside its merged files: ``log_layout``, a setting of the Delta sink.

``public.orders=created_at, sales.*=day``: each pattern has a column of the source, and the first pattern that fits a
table's name counts (``by_pattern``). An empty column leaves tables in the order of their commits. A column without a
pattern is refused: there is none that all tables have.

Whether a table has the column is not known here. The sink says so when it sees the table (``log_tables.layout``), and
goes on without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.by_pattern import first_fitting, parts_of


@dataclass(frozen=True)
class LogLayout:
    """``by_pattern``: pattern and column, in order."""

    by_pattern: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> LogLayout:
        """Raises ConfigError."""
        parts = parts_of(text, "log_layout")
        if parts.others:
            raise ConfigError(
                f"log_layout has a column without a table: {parts.others[0]!r}",
                remedy="give PATTERN=COLUMN, for example public.orders=created_at",
            )
        return cls(tuple(parts.by_pattern))

    def of(self, table: str) -> str:
        """The column; empty where the rows keep the order of their commits. ``table``: ``schema.table``."""
        return first_fitting(table, self.by_pattern, "")


NO_LAYOUT: Final = LogLayout()
