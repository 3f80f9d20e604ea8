"""The rows that a table had before its stream, as a user's function gets them: a batch of that one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.parquet_frames import parquet_frame
from xidstream.pipeline.spark.spark_batch import SparkBatch, TableSnapshot
from xidstream.pipeline.spark.spark_schemas import spark_schema
from xidstream.pipeline.storage.stored_folder import StoredFolder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class SnapshotBatch(SparkBatch):
    """``paths``: of the Parquet files with the rows, in contract layout; none for an empty table. They are absolute, or
    below ``folder`` in an object store."""

    def __init__(
        self,
        spark: SparkSession,
        generation: Generation,
        paths: Sequence[str],
        number: int,
        folder: StoredFolder | None = None,
    ) -> None:
        self._spark = spark
        self._generation = generation
        self._paths = list(paths)
        self._number = number
        self._folder = folder

    def __repr__(self) -> str:
        return f"SparkBatch(snapshot of {self._generation.name}, generation {self._generation.number})"

    @property
    def snapshot(self) -> TableSnapshot | None:
        generation = self._generation
        return TableSnapshot(generation.name, generation.number, generation.bounds.valid_from, generation.key)

    @property
    def tables(self) -> list[str]:
        return [self._generation.name]

    def dataframe(self, table: str | tuple[str, str]) -> DataFrame:
        relation = self._generation.relation
        if table not in (relation.name, (relation.schema, relation.table)):
            raise UsageError(f"the batch has no rows of table {table!r}", remedy="see batch.tables")
        return parquet_frame(self._spark, self._paths, contract_schema(relation), {}, self._folder)

    @property
    def transactions(self) -> DataFrame:
        return self._empty(TRANSACTIONS_SCHEMA)

    @property
    def messages(self) -> DataFrame:
        return self._empty(MESSAGES_SCHEMA)

    def _empty(self, schema: pa.Schema) -> DataFrame:
        return self._spark.createDataFrame([], spark_schema(schema))

    @property
    def first_commit_lsn(self) -> Lsn:
        return self._generation.bounds.snapshot_lsn

    @property
    def last_commit_lsn(self) -> Lsn:
        return self._generation.bounds.snapshot_lsn

    @property
    def number(self) -> int:
        return self._number

    @property
    def spark(self) -> SparkSession:
        return self._spark
