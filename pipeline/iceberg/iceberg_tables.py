"""The Iceberg tables of one namespace, as a sink of tables, and all that goes with it, asks for them.

A source's table ``public.orders`` is the table ``public__orders`` of the namespace, so that nobody needs quotes for it
in SQL. Names that have other characters than letters, digits, ``_`` and ``-`` are encoded as in the directories of
Delta tables (``locations``), and an underscore is encoded where it could be taken for one of the two between schema
and table: at an end, and after another.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.iceberg.catalog_errors import answering
from xidstream.pipeline.iceberg.catalogs import IcebergAddress, location_of
from xidstream.pipeline.iceberg.commit_together import together_of
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter, Newest
from xidstream.pipeline.iceberg.iceberg_types import RULES, schema_of
from xidstream.pipeline.iceberg.merging import Merging
from xidstream.pipeline.iceberg.table_properties import first_properties, name_mapping_of
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.log_table import Together
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.table_metadata import (
    OF_OWN_TABLES,
    SOURCE,
    TableMetadata,
    metadata_of_source,
)
from xidstream.pipeline.pg_rules import labelled_table
from xidstream.pipeline.schema import RelationVersion

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_AMBIGUOUS: Final = re.compile(r"^_|(?<=_)_|_$")
_STATISTICS: Final = "delta.dataSkippingStatsColumns"


def table_name(schema: str, table: str) -> str:
    """The name of a source's table, at most ``locations.MAX_DIRECTORY`` ASCII characters; the same in every version."""
    return locations.cut(f"{_part(schema)}__{_part(table)}")


def _has_no_catalog(error: Exception) -> bool:
    """Whether a database has no table of a catalog yet: PostgreSQL's error, or SQLite's, which is one of operation."""
    return type(error).__name__ == "ProgrammingError" or "no such table" in str(error.__cause__)


def _part(name: str) -> str:
    return _AMBIGUOUS.sub("~5F", locations.encode(name))


def source_of(key: str) -> tuple[str, str] | None:
    """``(schema, table)`` of a table's name. None for one that is no source's table's, or that is cut."""
    parts = key.split("__")
    if len(parts) != 2 or locations.CUT in key:
        return None
    try:
        found = locations.decode(parts[0]), locations.decode(parts[1])
    except (UnicodeDecodeError, UnicodeEncodeError):
        return None
    return found if table_name(*found) == key else None


class IcebergTables:
    """``makes``: a sink asks, which makes what is not there, and merges small files. Who only looks makes nothing.
    ``upkeep``: is told of what is expired, and closed with the tables. ``newest``: shared by all through whom one sink
    commits."""

    rules = RULES
    kept_handles = 100

    def __init__(
        self,
        address: IcebergAddress,
        *,
        makes: bool = False,
        upkeep: IcebergUpkeep | None = None,
        newest: Newest | None = None,
    ) -> None:
        self.address = address
        self.root = f"iceberg:{address.argument}"
        self._makes = makes
        self._upkeep = upkeep
        self._newest = newest
        self._merging = Merging() if makes else None
        self._lock = threading.Lock()
        self._opened: Catalog | None = None
        self._namespace = tuple(address.namespace.split("."))

    def __repr__(self) -> str:
        return f"IcebergTables({self.root})"

    def title(self, label: str) -> str:
        return f"Iceberg table {label}"

    def key_of(self, schema: str, table: str) -> str:
        return table_name(schema, table)

    def about(self, relation: RelationVersion) -> TableMetadata:
        return metadata_of_source(relation)

    def about_own(self, key: str) -> TableMetadata:
        return OF_OWN_TABLES[key]

    def sources(self) -> list[tuple[str, str]]:
        """The source's tables that the namespace has, each ``(schema, table)``. Raises as ``open``."""
        from pyiceberg.exceptions import NoSuchNamespaceError

        with answering(self.root):
            catalog = self._catalog()
            try:
                listed = [] if catalog is None else catalog.list_tables(self._namespace)
            except NoSuchNamespaceError:
                return []
        found = (self._source(each[-1]) for each in listed)
        return [each for each in found if each is not None]

    def _source(self, key: str) -> tuple[str, str] | None:
        if locations.CUT not in key:
            return source_of(key)
        # The name does not say all of it, and the table does.
        table = self.open(key, key)
        parts = None if table is None else labelled_table(table.loaded.properties.get(SOURCE, ""))
        return parts if parts is not None and table_name(*parts) == key else None

    def open(self, key: str, label: str) -> IcebergTableWriter | None:
        """Raises StorageFault where the catalog does not answer, PreconditionMissing where it lets nobody in,
        ConfigError where none is configured."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            with answering(self.root):
                catalog = self._catalog()
                table = None if catalog is None else catalog.load_table((*self._namespace, key))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except Exception as error:
            if _has_no_catalog(error) and not self._makes:
                return None
            raise
        return None if table is None else self._table(table, key, label)

    def open_or_create(
        self,
        key: str,
        label: str,
        columns: Sequence[TableColumn],
        about: TableMetadata,
        brought: Sequence[VersionSince] = (),
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> IcebergTableWriter:
        """A table is made without a snapshot, so it has no ``marks``. Raises as ``open``, and Unsupported where the
        catalog puts tables where no file can be linked or written."""
        found = self.open(key, label)
        if found is not None:
            return found
        with answering(self.root):
            table = self._create(key, label, columns, about, brought)
        return self._table(table, key, label)

    def together(self) -> Together | None:
        """Where the catalog takes commits of several tables in one request. Raises as ``open``."""
        with answering(self.root):
            catalog = self._catalog()
        return None if catalog is None else together_of(catalog, self.root)

    def close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.close()
        with self._lock:
            catalog, self._opened = self._opened, None
        if catalog is not None:
            catalog.close()

    def _catalog(self) -> Catalog | None:
        with self._lock:
            if self._opened is None:
                self._opened = self.address.open(makes=self._makes)
            return self._opened

    def _create(
        self,
        key: str,
        label: str,
        columns: Sequence[TableColumn],
        about: TableMetadata,
        brought: Sequence[VersionSince],
    ) -> Table:
        from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError
        from pyiceberg.table import TableProperties

        catalog = self._catalog()
        assert catalog is not None, "whoever only looks creates no table"
        try:
            catalog.create_namespace_if_not_exists(self._namespace)
        except NamespaceAlreadyExistsError:
            pass  # another process made it first
        schema = schema_of(columns, dict(about.comments))
        sources = {
            field.field_id: column.source for field, column in zip(schema.fields, columns, strict=True)
        }
        properties = first_properties(about, brought, sources, label)
        properties[TableProperties.DEFAULT_NAME_MAPPING] = name_mapping_of(schema)
        name = (*self._namespace, key)
        try:
            table = catalog.create_table(name, schema, properties=properties)
        except TableAlreadyExistsError:
            return catalog.load_table(name)
        if table.schema().as_struct() != schema.as_struct():
            raise SinkFailed(
                f"{self.title(label)}: the catalog has given its columns other ids, or other types"
            )
        return table

    def _table(self, table: Table, key: str, label: str) -> IcebergTableWriter:
        own = OF_OWN_TABLES.get(key)
        ranged = ("_commit_lsn",) if own is None else tuple(own.properties[_STATISTICS].split(","))
        opened = IcebergTableWriter(
            table, location_of(table.location(), table.io.properties, self.title(label)), label, ranged
        )
        opened.upkeep = self._upkeep
        opened.merging = self._merging
        opened.newest = None if own is None else self._newest
        return opened
