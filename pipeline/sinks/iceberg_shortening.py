"""The Iceberg tables of one namespace, as ``log_shortening`` cuts them.

A cut is one snapshot: a *delete* of whole files, or an *overwrite* where a fold takes their place. The watermark of the
cut stands in its summary and in the table's properties, as all watermarks do. The files go when no snapshot names them,
and an hour later (``iceberg.upkeep``).

There are no consumers of an Iceberg log. Its base tables are beside it, and hold a cut back as Delta's do.

Called by ``iceberg_sink``. It imports pyiceberg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import pyarrow as pa

from xidstream.pipeline.changelog.consumers import ConsumerPosition
from xidstream.pipeline.changelog.iceberg_root import IcebergLogTable, IcebergRoot
from xidstream.pipeline.changelog.log_root import LogRoot
from xidstream.pipeline.changelog.manifest import ManifestLine, base_of, read_lines
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.log_reading import IcebergTableSnapshot
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.sinks.shortened_tables import ShortenedTable


class IcebergShortenedTable(ShortenedTable):
    """``table`` as it was opened, until it is committed to. ``check_plain`` and ``files`` raise as
    ``IcebergTableSnapshot``: one that cannot be read is left alone, and holds up no other."""

    def __init__(self, table: IcebergTableWriter) -> None:
        super().__init__(table)
        self._table = table

    @cached_property
    def _log(self) -> IcebergLogTable:
        return IcebergLogTable(IcebergTableSnapshot(self._table))

    def check_plain(self) -> None:
        self._log.check_plain()

    def files(self) -> pa.Table:
        return self._log.listed()

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        removed: Sequence[str],
    ) -> None:
        self._table.commit(files, versions, lsn_column, marks=marks, merges=False, removed=removed)


class IcebergShortenedRoot:
    """``tables``: through which it commits. They are the caller's to close. Two catalogs are opened beside theirs, for
    all who look at the log and its base tables."""

    def __init__(self, address: IcebergAddress, tables: IcebergTables) -> None:
        self._log = IcebergRoot(address)
        self._tables = tables

    @property
    def log_root(self) -> LogRoot:
        return self._log

    def open(self, key: str, label: str) -> ShortenedTable | None:
        table = self._tables.open(key, label)
        return None if table is None else IcebergShortenedTable(table)

    def slots(self) -> list[str]:
        found = self._log.open(locations.TRANSACTIONS)
        return [] if found is None else found.slots()

    def positions(self, application_id: str) -> list[ConsumerPosition]:
        return []

    def base_lines(self, application_id: str) -> list[ManifestLine]:
        return read_lines(self._log.bases(), application_id)

    def has_base(self, line: ManifestLine) -> bool:
        return base_of(self._log.bases(), line) is not None

    def close(self) -> None:
        self._log.close()
