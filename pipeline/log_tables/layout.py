"""Which columns of a table its merged files are ordered by, and what stands against a column that a person asks for.

The table says it itself: the property ``xidstream.layout`` has the column of the source that the setting ``log_layout``
names (``table_metadata``). So whoever merges knows it, and no merge waits for a run's settings.

A column may be of a whole number, a date or a timestamp. Their least and greatest values go into the table's log, which
readers without the right to read its rows may see, and which an erasure does not rewrite. So no text is among them.

After a change of its type a source column has two columns in the table (``columns``). Files are ordered by the newer,
then by the older. A column that was dropped stays in the table, and is null in new rows: these keep their order.

Callers: ``delta`` for its merges, and ``delta_tables``, which warns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import pyarrow as pa

from xidstream.pipeline.log_tables.columns import TableColumn, delta_type_name
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema

LAYOUT: Final = "xidstream.layout"
_TYPES: Final = (
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
)


def layout_columns(columns: Sequence[TableColumn], properties: Mapping[str, str | None]) -> list[str]:
    """The table's columns to order by, the first one first; none where ``properties`` ask for none, or where none of
    the ``columns`` can be."""
    source = (properties.get(LAYOUT) or "").lower()
    if not source:
        return []
    fitting = (column for column in reversed(columns) if column.source.lower() == source)
    return [column.name for column in fitting if column.type in _TYPES]


@lru_cache(maxsize=512)
def layout_problem(relation: RelationVersion, column: str) -> str | None:
    """Why rows of this relation cannot be ordered by ``column``, or None."""
    if column.lower() not in {each.name.lower() for each in relation.columns}:
        return f"has no column {column}"
    schema = contract_schema(relation)
    (type_,) = (field.type for field in schema if field.name.lower() == column.lower())
    if type_ not in _TYPES:
        return f"has {column} as {delta_type_name(type_)}, which is no whole number, date or timestamp"
    return None
