"""What a vacuum does with base tables in Iceberg: it expires snapshots, and removes files that nothing names any more.

The rule, and the order of the steps, are ``vacuum``'s. Here a version is a snapshot. All go but those that the manifest
names, the newest, and each that was the newest within ``grace``: who reads a table alone, without the manifest, has
just found it. How long it was so tell the files, by the file system's clock: a snapshot was the newest until the list
of manifests of the next one came.

Then all files go that were listed ahead of it, are older than ``grace``, and that the table's metadata do not reach
any more: data, manifests, lists of manifests and metadata, of snapshots that are gone and of attempts that failed.

A table that is left out is emptied, and its name stays in the catalog: whoever dropped it could meet the same name
anew, of a table that came back under another mirror.

Called by ``base_tables``. It imports pyiceberg.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.manifest import MANIFEST, ManifestWriter, check_owner
from xidstream.pipeline.errors import SinkFailed, Unsupported
from xidstream.pipeline.iceberg.base_table import IcebergBase, newest_until, reachable
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import NOTHING
from xidstream.pipeline.mirror.table_folder import TableFolder, Vacuumed


class IcebergVacuumedTables:
    """``vacuum.VacuumedTables`` of ``bases``."""

    def __init__(self, bases: IcebergBases, application_id: str) -> None:
        self.bases = bases
        self.application_id = application_id

    @property
    def location(self) -> Location:
        manifest = self.bases.open(MANIFEST, MANIFEST)
        assert manifest is not None, "a mirror has claimed it"
        return manifest.location

    def directories(self) -> list[str]:
        return [key for key in self.bases.tables.names() if key != MANIFEST and self._is_of_the_slot(key)]

    def _is_of_the_slot(self, key: str) -> bool:
        """Others may have made tables of their own there, such as a mirror would not open."""
        try:
            table = self.bases.open(key, key)
        except (SinkFailed, Unsupported):
            return False
        return table is not None and table.watermark(f"mirror/{self.application_id}") != NOTHING

    def remove(self, directory: str) -> Vacuumed | None:
        return None

    def vacuum_table(
        self,
        directory: str,
        manifest: ManifestWriter,
        named: set[int],
        grace: datetime.timedelta,
        check: Callable[[], None],
    ) -> Vacuumed:
        listed = self._listed(directory)
        table = self.bases.open(directory, directory)
        if listed is None or table is None or table.watermark(f"mirror/{self.application_id}") == NOTHING:
            return Vacuumed()
        check_owner(table, self.application_id, manifest.owner)
        if table.watermark(f"mirror/{self.application_id}/owner") < manifest.owner:
            manifest.check()
            table.put([], [], manifest.marks)
        return _cleaned(listed, table, named, grace, grace, manifest.check, check)

    def shorten_manifest(self, retention: datetime.timedelta, grace: datetime.timedelta) -> None:
        listed, table = self._listed(MANIFEST), self.bases.open(MANIFEST, MANIFEST)
        if listed is not None and table is not None:
            _cleaned(listed, table, set(), grace, max(retention, grace), lambda: None, lambda: None)

    def _listed(self, directory: str) -> TableFolder | None:
        table = self.bases.open(directory, directory)
        return None if table is None else TableFolder.listed(table.location)


def _cleaned(
    listed: TableFolder,
    table: IcebergBase,
    named: set[int],
    grace: datetime.timedelta,
    age: datetime.timedelta,
    check_owner_again: Callable[[], None],
    check: Callable[[], None],
) -> Vacuumed:
    """``age``: of files that go."""
    modified_s = {
        path.removeprefix(f"{listed.location.uri}/"): s.modified_s for path, s in listed.files.items()
    }
    before_s = listed.now_s - grace.total_seconds()
    recent = {id_ for id_, until_s in newest_until(table.loaded, modified_s).items() if until_s > before_s}
    check_owner_again()
    table.expire(named | recent)
    read, metadata = reachable(table.loaded)
    needed = {f"{listed.location.uri}/{path}" for path in read}
    listed.check_for(needed)
    needed |= {f"{listed.location.uri}/{path}" for path in metadata}
    unneeded = listed.unneeded(needed, age.total_seconds())
    check_owner_again()
    return unneeded.remove(check)
