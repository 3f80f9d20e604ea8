"""The lowest and highest key of a base table's file: from its Parquet footer into what the table says of it, and back.

Integers, text, dates and timestamps have ranges. Decimals have none, because a Delta log has them as JSON numbers,
which readers take for floats. Floats have none because of NaN, and booleans and bytes because it would not pay. A key
of such columns alone is right all the same: the table is then written as a whole (``pipeline.mirror.refresh``).

Values are kept as Parquet stores them: a date is days, a timestamp is microseconds, both since 1970. So years that
Python's datetime does not know are no trouble. A Delta log has them otherwise (``changelog.delta_bases``), with
milliseconds of a timestamp, so a file's lowest is rounded down and its highest up. A file with a key that its column
cannot hold (infinity, which is null there) or beyond the year 9999 has no range.

Other engines skip files by the same statistics. ``delta.dataSkippingStatsColumns`` must name the columns that have them
in each file, and no other (see ``pipeline.log_tables.table_metadata``). deltalake reads there no names but plain ones:
a blank, a hyphen, a dot or a letter beyond ASCII makes it take all columns for ones with statistics, and every filter
of a dataset then finds nothing (deltalake 1.6.6). So a column with such a name counts as one without range in a Delta
table. Iceberg knows columns by their ids.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from xidstream.pipeline.changelog.base_stores import Bounds
from xidstream.pipeline.changelog.manifest import OWN_FILES
from xidstream.pipeline.log_tables.table_metadata import STATISTICS
from xidstream.pipeline.mirror.plan import KeyRange

OWN: Final = OWN_FILES
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EPOCH: Final = datetime.datetime(1970, 1, 1)
_LAST_DAY: Final = (datetime.date(9999, 12, 31) - _EPOCH.date()).days
_FIRST_DAY: Final = (datetime.date(1, 1, 1) - _EPOCH.date()).days
_DAY_US: Final = 86_400_000_000


def _has_range(type_: pa.DataType) -> bool:
    return bool(
        pt.is_integer(type_)
        or pt.is_string(type_)
        or pt.is_large_string(type_)
        or pt.is_date32(type_)
        or pt.is_timestamp(type_)
    )


@dataclass(frozen=True)
class FileFacts:
    """What the footer of a new file says. ``range`` is None where a key column has no full statistics."""

    n_rows: int
    range: KeyRange | None


@dataclass(frozen=True)
class RangedKey:
    """The key columns of one base table that have ranges, in the key's order, and their Arrow types."""

    columns: tuple[str, ...]
    types: tuple[pa.DataType, ...]

    @classmethod
    def of(
        cls, key: Sequence[str] | None, types: Mapping[str, pa.DataType], *, any_name: bool = False
    ) -> RangedKey:
        """``any_name``: columns with names that are not plain have ranges, too."""
        named = [name for name in key or () if any_name or _PLAIN.fullmatch(name)]
        chosen = [name for name in named if _has_range(types[name])]
        return cls(tuple(chosen), tuple(types[name] for name in chosen))

    def ahead_in(self, key: Sequence[str]) -> list[str]:
        """``key``, which these columns are of, in the order in which its table's files are cut: these columns first,
        because files are found by them."""
        return [*self.columns, *(name for name in key if name not in self.columns)]

    @property
    def properties(self) -> dict[str, str]:
        """What the table must say of its statistics."""
        return {STATISTICS: ",".join(self.columns)}

    def facts_of(self, source: Any) -> FileFacts:
        """The facts of a Parquet file, by its path on this machine or opened. Raises OSError and what pyarrow raises
        for a file that is none."""
        footer = pq.read_metadata(source)
        lows, highs = [], []
        for name in self.columns:
            bounds = _bounds(footer, name)
            if bounds is None:
                return FileFacts(footer.num_rows, None)
            lows.append(bounds[0])
            highs.append(bounds[1])
        found = KeyRange(tuple(lows), tuple(highs)) if self.columns and footer.num_rows else None
        if found is not None and not self._is_writable(found):
            found = None
        return FileFacts(footer.num_rows, found)

    def bounds(self, facts: FileFacts) -> dict[str, Bounds]:
        """What a commit is to say of the file; nothing where it has no range."""
        if facts.range is None:
            return {}
        sides = zip(self.types, facts.range.low, facts.range.high, strict=True)
        return {name: Bounds(*each) for name, each in zip(self.columns, sides, strict=True)}

    def ranges_in(self, files: pa.Table) -> list[KeyRange | None]:
        """The ranges of the files that ``StoredTable.files`` lists. None for a file that no mirror has written:
        deltalake's ``optimize`` cuts a timestamp's highest value to milliseconds, which is no bound."""
        if not self.columns:
            return [None] * files.num_rows
        is_own = [path.startswith(OWN) for path in files["path"].to_pylist()]
        lows = [self._column(files, f"min.{name}", i) for i, name in enumerate(self.columns)]
        highs = [self._column(files, f"max.{name}", i) for i, name in enumerate(self.columns)]
        ranges: list[KeyRange | None] = []
        for own, low, high in zip(is_own, zip(*lows, strict=True), zip(*highs, strict=True), strict=True):
            ranges.append(KeyRange(low, high) if own and None not in low and None not in high else None)
        return ranges

    def _column(self, files: pa.Table, name: str, index: int) -> list[Any]:
        """None of a column that had another type before: its files are about to be written anew."""
        nothing = [None] * files.num_rows
        if name not in files.column_names:
            return nothing
        column = files[name]
        if pt.is_timestamp(self.types[index]):
            if not pt.is_timestamp(column.type):
                return nothing
            column = column.cast(pa.timestamp("us")).cast(pa.int64())
        elif pt.is_date32(self.types[index]):
            if not pt.is_date32(column.type):
                return nothing
            column = column.cast(pa.int32())
        values: list[Any] = column.to_pylist()
        return values

    def _is_writable(self, found: KeyRange) -> bool:
        for low, high, type_ in zip(found.low, found.high, self.types, strict=True):
            day_units = 1 if pt.is_date32(type_) else _DAY_US if pt.is_timestamp(type_) else 0
            if day_units and not (_FIRST_DAY * day_units <= low and high < _LAST_DAY * day_units):
                return False
        return True


def _bounds(footer: Any, name: str) -> tuple[Any, Any] | None:
    """The lowest and highest value of a column in a file; None where a null or a row group hides them."""
    index = next(
        (i for i in range(footer.num_columns) if footer.schema.column(i).path == name),
        None,
    )
    if index is None:
        return None
    lows, highs = [], []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(index).statistics
        if statistics is None or not statistics.has_min_max or statistics.null_count != 0:
            return None
        low, high = statistics.min_raw, statistics.max_raw
        lows.append(low.decode() if isinstance(low, bytes) else low)
        highs.append(high.decode() if isinstance(high, bytes) else high)
    return (min(lows), max(highs)) if lows else None
