"""How a Delta table stores a column: its name, its type, and in its metadata which source column it takes.

Whoever opens a table reads its columns here, and whoever makes or widens one writes them here. deltalake is imported
where it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from xidstream.pipeline.log_tables.columns import TableColumn

if TYPE_CHECKING:
    from deltalake import DeltaTable, Field

SOURCE_KEY: Final = "xidstream.column"
"""Metadata of a Delta column whose name is not its source's: the source column's name."""
COMMENT: Final = "comment"
"""Metadata that Spark shows in DESCRIBE TABLE."""


def columns_of(table: DeltaTable) -> tuple[TableColumn, ...]:
    """The columns of the version that is open."""
    schema = table.schema()
    arrow = pa.schema(schema.to_arrow())
    return tuple(
        TableColumn(field.name, arrow.field(i).type, str(field.metadata.get(SOURCE_KEY, field.name)))
        for i, field in enumerate(schema.fields)
    )


def delta_field(column: TableColumn, comment: str | None = None) -> Field:
    from deltalake import Field, Schema

    field = Schema.from_arrow(pa.schema([column.field])).fields[0]
    metadata = {} if column.source == column.name else {SOURCE_KEY: column.source}
    if comment is not None:
        metadata[COMMENT] = comment
    return Field(field.name, field.type, nullable=True, metadata=metadata) if metadata else field
