"""The namespace of the base tables, and of their manifest: ``iceberg_tables`` with tables of another kind.

The manifest gets a small file with each refresh, and these are merged as those of the log are (``merging``).

Called by ``changelog.iceberg_bases`` and the mirror's vacuum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xidstream.pipeline.iceberg.base_table import IcebergBase
from xidstream.pipeline.iceberg.catalog_errors import answering
from xidstream.pipeline.iceberg.catalogs import IcebergAddress, location_of
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables

if TYPE_CHECKING:
    from pyiceberg.table import Table


class IcebergBaseTables(IcebergTables):
    """``manifest``: that table's name. ``lsn_column``: of its lines."""

    def __init__(
        self, address: IcebergAddress, manifest: str, lsn_column: str, *, makes: bool = False
    ) -> None:
        super().__init__(address, makes=makes)
        self._manifest = manifest
        self._lsn_column = lsn_column

    def names(self) -> list[str]:
        """The names of all tables. Raises as ``open``."""
        from pyiceberg.exceptions import NoSuchNamespaceError

        with answering(self.root):
            catalog = self._catalog()
            try:
                listed = [] if catalog is None else catalog.list_tables(self._namespace)
            except NoSuchNamespaceError:
                return []
        return sorted(each[-1] for each in listed)

    def _table(self, table: Table, key: str, label: str) -> IcebergBase:
        location = location_of(table.location(), table.io.properties, self.title(label))
        if key != self._manifest:
            return IcebergBase(table, location, label)
        found = IcebergBase(table, location, label, (self._lsn_column,))
        found.merging = self._merging
        return found
