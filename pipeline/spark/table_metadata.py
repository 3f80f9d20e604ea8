"""What a Delta table says of itself beside its rows: its properties.

``delta.dataSkippingStatsColumns`` names the one column whose minimum and maximum stand in the log. It must be there:
deltalake takes each column that the property does not exclude for one with statistics. For a file without them it
compares with null, so every filter on another column of a ``to_pyarrow_dataset`` found no row (deltalake 1.6.6).
Statistics of all columns were considered. They would have to come from each file's footer with every commit, and
deltalake still gets columns wrong that are null throughout.

Who calls this: ``delta_table``, when it makes a table, and once for a table that an earlier version of this sink made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

STATISTICS: Final = "delta.dataSkippingStatsColumns"
_LSN_COLUMNS: Final = ("_commit_lsn", "lsn", "commit_lsn")
"""Of a source table, of ``_messages`` (which has the last one, too), of ``_transactions``: the first there counts."""


def table_properties(column_names: Iterable[str]) -> dict[str, str]:
    """The properties of a table with these columns."""
    names = set(column_names)
    lsn_columns = [name for name in _LSN_COLUMNS if name in names]
    return {STATISTICS: lsn_columns[0]} if lsn_columns else {}


def missing_properties(found: Mapping[str, str | None], wanted: Mapping[str, str]) -> dict[str, str]:
    """Those of ``wanted`` that the table has not, or has with another value."""
    return {key: value for key, value in wanted.items() if found.get(key) != value}
