"""The change log in the Iceberg tables of one namespace: ``log_root.LogRoot`` over ``pipeline.iceberg``.

A table's rows come from its files, as with Delta: what is special about them (names, types, files of other programs)
says ``iceberg.log_reading``. Spark's own Parquet reader reads them where every file is the sink's and calls each column
as the table does, in a type that is stored alike. Else pyarrow reads, in the executors, and finds each column.

The types of columns are Iceberg's: an ``int2`` is an ``int`` here.

Base tables are Iceberg tables, too (``iceberg_bases``). There are no positions of consumers, which are in a Delta
table.

It imports pyiceberg, so ``change_log`` imports this where such a log is asked for. Called by it alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.log_table import LogFile, LogTable
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.log_reading import IcebergTableSnapshot, reading
from xidstream.pipeline.spark.parquet_frames import ColumnLookup

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.batch_parts import TableName

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class IcebergRoot:
    """Raises ConfigError where nobody knows the catalog."""

    delta_location = None

    def __init__(self, address: IcebergAddress) -> None:
        self.address = address
        self._tables = IcebergTables(address)
        self._bases = IcebergBases(address)

    @property
    def name(self) -> str:
        return self._tables.root

    def bases(self, *, makes: bool = False) -> IcebergBases:
        return IcebergBases(self.address, makes=True) if makes else self._bases

    def close(self) -> None:
        """Let the catalogs go; whoever asks again opens them again."""
        self._tables.close()
        self._bases.tables.close()

    def title(self, label: str) -> str:
        return self._tables.title(label)

    def key_of(self, schema: str, table: str) -> str:
        return self._tables.key_of(schema, table)

    def open(self, key: str) -> LogTable | None:
        with reading(self.title(key)):
            table = self._tables.open(key, key)
            return None if table is None else IcebergLogTable(IcebergTableSnapshot(table))

    def table_names(self) -> list[TableName]:
        with reading(self.name):
            return self._tables.sources()


class IcebergLogTable(LogTable):
    """One snapshot of an Iceberg table."""

    format = "Iceberg"

    def __init__(self, snapshot: IcebergTableSnapshot) -> None:
        self._snapshot = snapshot
        self.location = snapshot.location
        self.schema = snapshot.schema
        self.columns = snapshot.columns
        self.properties = snapshot.properties

    @property
    def title(self) -> str:
        return self._snapshot.title

    def watermark(self, application_id: str) -> int | None:
        return self._snapshot.watermark(application_id)

    def watermark_now(self, application_id: str) -> int | None:
        with reading(self.title):
            return self._snapshot.watermark_now(application_id)

    def slots(self) -> list[str]:
        return self._snapshot.slots()

    def check_plain(self) -> None:
        assert self._snapshot.files is not None  # it raises

    def listed(self) -> pa.Table:
        files = self._snapshot.files
        found: dict[str, pa.Array] = {
            "path": pa.array([file.path for file in files], pa.string()),
            "size_bytes": pa.array([file.n_bytes for file in files], pa.int64()),
            "num_records": pa.array([file.n_rows for file in files], pa.int64()),
        }
        for name in {name for file in files for name in (*file.least, *file.greatest)}:
            type_ = self.schema.field(name).type
            found[f"min.{name}"] = _values([file.least for file in files], name, type_)
            found[f"max.{name}"] = _values([file.greatest for file in files], name, type_)
        return pa.table(found)

    def column_lookups(self, files: Sequence[LogFile]) -> Sequence[ColumnLookup] | None:
        columns = self._snapshot.file_columns
        foreign = {file.path for file in self._snapshot.files if not file.is_own}
        if not any(column.is_widened or len(column.names) > 1 for column in columns) and foreign.isdisjoint(
            file.path for file in files
        ):
            return None
        return [ColumnLookup(column.id, column.names) for column in columns]


def _values(bounds: Sequence[Mapping[str, int]], name: str, type_: pa.DataType) -> pa.Array:
    """In the column's type: Iceberg counts microseconds of a timestamp."""
    numbers = [each.get(name) for each in bounds]
    if not pa.types.is_timestamp(type_):
        return pa.array(numbers, type_)
    moments: list[Any] = [
        None if each is None else _EPOCH + datetime.timedelta(microseconds=each) for each in numbers
    ]
    return pa.array(moments, type_)
