"""Where a change log's tables are, and how one of them is opened: the seam between the log's rules and the formats.

``ChangeLog`` and what stands below it know a table's key and ask for the table. What a table is, and where it lies, a
``LogRoot`` knows: ``DeltaRoot`` has a folder of Delta tables, ``iceberg_root`` a namespace of a catalog.

Beside the log are its base tables (``bases``), in the same format. The positions of consumers are Delta's in any case,
and so are only there where the log is: ``delta_location`` says where, or None.

Called by ``change_log``, ``transactions_table`` and the mirror.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xidstream.pipeline.changelog.base_stores import BaseStore
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.log_table import DeltaLogTable, LogTable, reading
from xidstream.pipeline.changelog.slots import table_directories, table_of
from xidstream.pipeline.delta.kept_tables import KeptTables
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import SOURCE
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.sink_kinds import DELTA, ICEBERG

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.batch_parts import TableName


class LogRoot(Protocol):
    """``name``: for people, without credentials. ``delta_location``: of the root, where it has Delta tables."""

    @property
    def name(self) -> str: ...

    @property
    def delta_location(self) -> Location | None: ...

    def bases(self, *, makes: bool = False) -> BaseStore:
        """Where its base tables are. ``makes``: whoever only looks makes nothing."""
        ...

    def title(self, label: str) -> str:
        """The format and the table."""
        ...

    def key_of(self, schema: str, table: str) -> str:
        """The key of a source's table. Those of the log's own are ``locations.TRANSACTIONS`` and so on."""
        ...

    def open(self, key: str) -> LogTable | None:
        """The table as it is now, or None where there is none. Raises StorageFault."""
        ...

    def table_names(self) -> list[TableName]:
        """The source's tables that there are, in no order. Raises StorageFault."""
        ...


def root_of(uri: str, storage_options: Mapping[str, str] | None = None) -> LogRoot:
    """What ``uri`` names: the setting ``sink`` of a run, or the URI of Delta tables alone. Raises ConfigError."""
    name, _, argument = uri.partition(":")
    if name == ICEBERG.name:
        from xidstream.pipeline.iceberg.catalogs import IcebergAddress

        if storage_options:
            raise ConfigError(
                "storage_options are for a log in Delta tables: what an Iceberg catalog needs is in its configuration",
                remedy="leave storage_options out (docs/iceberg.md says where credentials come from)",
            )
        address = IcebergAddress.parse(argument)
        # It imports pyiceberg, which may not be there.
        from xidstream.pipeline.changelog.iceberg_root import IcebergRoot

        return IcebergRoot(address)
    options = dict(storage_options) if storage_options else None
    return DeltaRoot(Location.parse(argument if name == DELTA.name else uri, options))


class DeltaRoot:
    """The Delta tables below ``location``. ``kept``: their handles are of these, for one thread that asks again and
    again."""

    def __init__(self, location: Location, kept: KeptTables | None = None) -> None:
        self._location = location
        self._kept = kept

    @property
    def name(self) -> str:
        return redacted(self._location.uri)

    @property
    def delta_location(self) -> Location:
        return self._location

    def bases(self, *, makes: bool = False) -> BaseStore:
        return DeltaBases(self._location, self._kept if makes else None)

    def title(self, label: str) -> str:
        return f"Delta table {label}"

    def key_of(self, schema: str, table: str) -> str:
        return locations.encode_table(schema, table)

    def open(self, key: str) -> LogTable | None:
        from deltalake.exceptions import TableNotFoundError

        try:
            with reading(self.title(key)):
                return DeltaLogTable(self._location.child(key), kept=self._kept)
        except TableNotFoundError:
            return None

    def table_names(self) -> list[TableName]:
        with reading(self.name):
            directories = table_directories(self._location)

        def source(directory: str) -> str | None:
            table = self.open(directory)
            return None if table is None else table.properties.get(SOURCE)

        found = [table_of(each, partial(source, each)) for each in directories]
        return [name for name in found if name is not None]
