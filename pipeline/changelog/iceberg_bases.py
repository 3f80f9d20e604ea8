"""Base tables as Iceberg tables in a namespace beside the log's: ``base_stores`` over ``iceberg.base_table``.

The log in the namespace ``shop`` has its base tables in the namespace ``shop_current``, under the names that the tables
of the log have. It is a sibling, and not a namespace within, because Glue and Hive have one level alone.

A version is a snapshot's id, under which every engine reads it (DuckDB's ``snapshot_from_id``, pyiceberg's
``snapshot_id``, Spark's ``VERSION AS OF``).

It imports pyiceberg, so it is imported where such a log is asked for. Called by ``iceberg_root`` and the mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from xidstream.pipeline.changelog.base_stores import BaseVersion
from xidstream.pipeline.changelog.log_table import LogTable
from xidstream.pipeline.changelog.manifest import MANIFEST
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.iceberg.base_table import (
    KEPT,
    IcebergBase,
    check_plain,
    columns_of,
    listed,
    mark_of,
    schema_at,
)
from xidstream.pipeline.iceberg.base_tables import IcebergBaseTables
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.log_reading import reading
from xidstream.pipeline.iceberg.staged_commits import files_by_path
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import TRANSACTIONS
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot

    from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables

_CURRENT: Final = "_current"


def address_of_bases(log: IcebergAddress) -> IcebergAddress:
    """Where the base tables of a log are."""
    return IcebergAddress(log.catalog, f"{log.namespace}{_CURRENT}")


def refuse_base_tables(log: IcebergTables) -> None:
    """Raise ConfigError where the namespace has base tables, which have the names that a log's tables would have."""
    if log.open(MANIFEST, MANIFEST) is not None:
        raise ConfigError(
            f"the namespace {log.root} has the base tables of another log",
            remedy=f"give the sink a namespace of its own, which does not end with {_CURRENT}",
        )


class IcebergBases:
    """The base tables of the log at ``log``. ``makes``: whoever only looks makes nothing."""

    bounds_any_name = True

    def __init__(self, log: IcebergAddress, *, makes: bool = False) -> None:
        self.tables = IcebergBaseTables(address_of_bases(log), MANIFEST, "lsn", makes=makes)

    def key_of(self, schema: str, table: str) -> str:
        return self.tables.key_of(schema, table)

    def open(self, key: str, label: str) -> IcebergBase | None:
        with reading(self.tables.title(label)):
            found = self.tables.open(key, label)
        assert found is None or isinstance(found, IcebergBase)
        return found

    def open_or_create(
        self, key: str, label: str, columns: Sequence[TableColumn], about: TableMetadata
    ) -> IcebergBase:
        there = self.open(key, label)
        if there is not None:
            return there
        if key == MANIFEST and self.tables.open(TRANSACTIONS, TRANSACTIONS) is not None:
            raise ConfigError(
                f"the namespace {self.tables.root} has a change log, and its tables have the names of the base tables",
                remedy=f"give one of the two logs another namespace: NAMESPACE{_CURRENT} is for base tables",
            )
        kept = TableMetadata(about.description, {**about.properties, **KEPT}, about.comments)
        found = self.tables.open_or_create(key, label, columns, kept)
        assert isinstance(found, IcebergBase)
        return found

    def at(self, key: str, version: int) -> BaseVersion | None:
        table = self.open(key, key)
        snapshot = None if table is None else table.loaded.snapshot_by_id(version)
        if table is None or snapshot is None:
            return None
        opened = IcebergBaseVersion(table, snapshot)
        paths = tuple(f"{table.location.uri}/{path}" for path in opened.listed()["path"].to_pylist())
        return BaseVersion(table.location, paths, opened.watermark, lambda: opened)

    def is_newest(self, key: str, version: int) -> bool:
        table = self.open(key, key)
        return table is not None and table.version == version and table.is_as_made

    def forget(self) -> None:
        pass  # each look loads the table


class IcebergBaseVersion(LogTable):
    """One snapshot of a base table. Its files have its columns under their names: a mirror has written them."""

    format = "Iceberg"

    def __init__(self, table: IcebergBase, snapshot: Snapshot) -> None:
        self._table = table
        self._snapshot = snapshot
        self._columns = schema_at(table.loaded, snapshot)
        self.location = table.location
        self.columns = columns_of(self._columns)
        self.schema = pa.schema([column.field for column in self.columns])
        self.properties = table.properties

    @property
    def title(self) -> str:
        return self._table.title

    def watermark(self, application_id: str) -> int | None:
        return mark_of(self._snapshot, application_id)

    def slots(self) -> list[str]:
        return []

    def check_plain(self) -> None:
        check_plain(self._table.loaded, self._snapshot, self.title)

    def listed(self) -> pa.Table:
        with reading(self.title):
            return listed(files_by_path(self._table.loaded, self._snapshot), self._columns)
