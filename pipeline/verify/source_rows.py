"""The source's rows of one table under a held snapshot, in files that Spark reads: the layout of a snapshot's rows.

They are read as a snapshot reads them, range of pages by range of pages, over one connection, with a pause in between.
The files are in a folder of their own below the staging folder, and the caller removes them.

Called by ``verifying``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.changelog.log_table import rows_of_files
from xidstream.pipeline.changelog.shape import ColumnShape, TableShape, shaped
from xidstream.pipeline.initial_copy.range_reading import RangeOutput, RangeReader
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.snapshot.tables import RangeTask, plan_ranges
from xidstream.pipeline.spark.spark_schemas import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class SourceRows:
    """``files``: paths below ``folder``. ``schema``: theirs."""

    folder: Location
    files: tuple[str, ...]
    schema: pa.Schema
    shape: TableShape
    n_rows: int

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows, in the source's columns, and the contract's."""
        return shaped(rows_of_files(spark, self.folder, self.files, self.schema), self.shape)


def read_source(
    reader: RangeReader,
    held: HeldSnapshot,
    folder: Location,
    key: tuple[str, ...] | None,
    *,
    pause_ms: int,
    bytes_per_s: int,
    check: Callable[[], None],
) -> SourceRows:
    """All rows that the publication has of the table. ``key``: the log's, of columns that the source has.

    ``check`` is called between ranges, and may raise. Raises what ``RangeReader.read`` raises.
    """
    relation = held.source.relation
    mapping = map_columns((), contract_schema(relation))
    conform = Conform.of(mapping.columns, mapping.names)
    types = spark_schema(pa.schema(relation.arrow_fields))
    columns = {field.name: ColumnShape(field.dataType, (field.name,)) for field in types.fields}
    shape = TableShape(relation.name, columns, key if key and set(key) <= set(columns) else None)
    files = []
    ranges = plan_ranges(held.source.leaves, by_range=held.by_range)
    for i, pages in enumerate(ranges):
        check()
        if i and pause_ms:
            time.sleep(pause_ms / 1000)
        task = RangeTask(held.source, held.snapshot_name, pages)
        target = RangeOutput(folder, f"rows-{relation.relid}")
        files += reader.read(task, held.bounds, target, conform, bytes_per_s=bytes_per_s)
    n_rows = sum(file.n_rows for file in files)
    return SourceRows(folder, tuple(file.path for file in files), conform.schema, shape, n_rows)
