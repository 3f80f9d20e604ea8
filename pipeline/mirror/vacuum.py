"""Removes what no reader needs any more: lines of the manifest, and files of base tables.

The rule is the same for every format. What a format does for it are ``VacuumedTables``: those of Delta are here, those
of Iceberg in ``iceberg_vacuum``.

A reader takes the newest lines of the manifest and then reads files, for as long as it likes up to ``retention``. So a
line is needed until the refresh after it is older than that. Lines go first, in one commit. Then, of each base table,
all files go that neither a version that is still named needs, nor the present version: the next refresh starts from
that, named or not. What is left of attempts that failed goes the same way. The log goes, too, as far as none of these
versions is read from it (``short_log``). A crash in between leaves files, which the next vacuum finds.

Nobody may lose a file by that, and other mirrors of the slot may be at work:

- An *earlier* mirror, which does not know yet that it was overtaken: each table gets this mirror's number
  (``ManifestWriter.claim``) before a file of it is removed. What the earlier one has in hand is refused then.
- A *later* mirror may take over at any moment. So the order is: list the folder; open the table anew, and find out what
  is needed; look whether this mirror was overtaken; remove, of what was listed alone. Who takes over after that look
  writes files that were not listed, and begins with a version whose files stay. Who took over ahead of it is seen.
- The same mirror's refresh: ``BaseTables`` does one thing at a time.

Machines that share a folder may see each other's commits later than each other's files. So files younger than ``GRACE``
stay, whoever wrote them.

The manifest is shortened by the same rule. Several slots write it, and its readers read all of it. So what was removed
from it stays for ``GRACE``, and what it never named for ``retention`` at least.

A base table that is left out (``base_table.LEFT_OUT``) goes as a whole when it has been so for longer than
``retention`` and no line names it: the table was dropped or renamed, or has no snapshot that stands. One that comes
back is built anew. A folder is renamed first, and so is never half there. A store renames nothing, and whoever deleted
a log object by object could meet the same names anew, of a table that came back under another mirror. So there the
table is emptied (``BaseTable.empty``): its rows go, and a few small files of its log stay.

All ages are as much longer as the process's clock may be ahead (``watched_clock``). Lines of the manifest have the time
of whoever refreshed, on whatever machine. So one that is behind does not make its lines older than those that it
follows (``manifest``), and one that is ahead does not make those of others older (``_now``).

deltalake's own vacuum was rejected: it counts from the removal of a file and not from what the manifest names, and its
``keep_versions`` are read with the log of the last checkpoint only, unless all files are listed as here.

Rows of the log are not removed here.
"""

from __future__ import annotations

import datetime
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from deltalake import DeltaTable

from xidstream.pipeline.changelog.base_stores import BaseStore
from xidstream.pipeline.changelog.delta_bases import DeltaBase, DeltaBases, current
from xidstream.pipeline.changelog.manifest import MANIFEST, ManifestWriter, check_owner
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.attempt_files import Below, store_of
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import NOTHING
from xidstream.pipeline.log_tables.watched_clock import WatchedClock
from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks
from xidstream.pipeline.mirror.kept_files import LOG, commit_name, files_of_versions
from xidstream.pipeline.mirror.plan import kept_versions
from xidstream.pipeline.mirror.short_log import shorten_log
from xidstream.pipeline.mirror.table_folder import TableFolder, Vacuumed, log_files, now_s_of

_GONE: Final = "_gone-"
"""Begins the name of a folder that is being removed."""
GRACE: Final = datetime.timedelta(minutes=10)
"""For how long a file stays that no commit is known to name. An NFS client may take what it knows of a folder for up to
60 s (``acdirmax``), so another machine's commit can be unknown for so long when its files are seen. This is ten times
that. It costs the room of what failed attempts left within it."""


def vacuum(
    root: Location,
    application_id: str,
    manifest: ManifestWriter,
    retention: datetime.timedelta,
    check: Callable[[], None] = lambda: None,
    ages: WatchedClock | None = None,
) -> Vacuumed:
    """``check`` raises where the vacuum is to be given up, and is called between tables and between files.
    ``ages``: the clock of the process, which says by how much it may be ahead.

    Raises Superseded where another mirror has taken over: then nothing was removed that it can know. SnapshotOutdated
    where others have committed meanwhile: begin again. OSError for files.
    """
    return vacuum_tables(VacuumedDeltaTables(root, application_id), manifest, retention, check, ages)


class VacuumedTables(Protocol):
    """The base tables of one slot, and their manifest. ``location``: whose clock counts."""

    application_id: str

    @property
    def bases(self) -> BaseStore: ...

    @property
    def location(self) -> Location: ...

    def directories(self) -> list[str]:
        """All base tables, as the manifest calls them; some may be of other slots."""
        ...

    def remove(self, directory: str) -> Vacuumed | None:
        """All of a table; None where this cannot be done in one step: it is emptied then."""
        ...

    def vacuum_table(
        self,
        directory: str,
        manifest: ManifestWriter,
        named: set[int],
        grace: datetime.timedelta,
        check: Callable[[], None],
    ) -> Vacuumed:
        """The steps are in the order that the module's head gives reasons for."""
        ...

    def shorten_manifest(self, retention: datetime.timedelta, grace: datetime.timedelta) -> None:
        """The manifest's own files that were removed from it, and its log."""
        ...


def vacuum_tables(
    tables: VacuumedTables,
    manifest: ManifestWriter,
    retention: datetime.timedelta,
    check: Callable[[], None] = lambda: None,
    ages: WatchedClock | None = None,
) -> Vacuumed:
    """The other parameters, and what it raises: ``vacuum``."""
    check()
    manifest.check()
    believed = _Believed(ages or WatchedClock(), manifest)
    grace, retention = believed.age(GRACE), believed.age(retention)
    before = _now(tables.location) - retention
    manifest.forget(before)
    reach("vacuuming_base")
    check()
    named: dict[str, set[int]] = {}
    for line in (*manifest.lines(), *manifest.retired_lines()):
        named.setdefault(line.directory, set()).add(line.version)
    vacuumed = Vacuumed()
    for directory in tables.directories():
        check()
        if directory not in named and _is_gone(tables, directory, manifest, before):
            manifest.check()
            removed = tables.remove(directory)
            if removed is not None:
                vacuumed += removed
                continue
            _empty(tables, directory, manifest)
        vacuumed += tables.vacuum_table(directory, manifest, named.get(directory, set()), grace, check)
    check()
    tables.shorten_manifest(retention, grace)
    return vacuumed


class VacuumedDeltaTables:
    """``VacuumedTables`` below ``root``."""

    def __init__(self, root: Location, application_id: str) -> None:
        self._root = root
        self.application_id = application_id
        self.bases = DeltaBases(root)

    @property
    def location(self) -> Location:
        return current(self._root)

    def directories(self) -> list[str]:
        return _directories(self._root)

    def remove(self, directory: str) -> Vacuumed | None:
        location = current(self._root).child(directory)
        return _remove(location) if location.is_local else None

    def vacuum_table(
        self,
        directory: str,
        manifest: ManifestWriter,
        named: set[int],
        grace: datetime.timedelta,
        check: Callable[[], None],
    ) -> Vacuumed:
        location = current(self._root).child(directory)
        return _vacuum_table(location, self.application_id, manifest, named, grace, check)

    def shorten_manifest(self, retention: datetime.timedelta, grace: datetime.timedelta) -> None:
        _shorten_manifest(self._root, retention, grace)


def _now(location: Location) -> datetime.datetime:
    """By this machine's clock, or by that of the file system or the store, where that is earlier: lines may be stamped
    by another machine, and this one's clock be ahead of it."""
    theirs = datetime.datetime.fromtimestamp(now_s_of(location), datetime.timezone.utc)
    return min(datetime.datetime.now(datetime.timezone.utc), theirs)


class _Believed:
    """Ages, by a clock that may have been set forward. What is known from before the process began is the newest
    refresh of then."""

    def __init__(self, ages: WatchedClock, manifest: ManifestWriter) -> None:
        self._ages = ages
        refreshed_s = (line.refreshed_at.timestamp() for line in manifest.lines())
        self._before_s = max((s for s in refreshed_s if s < ages.began_at_s), default=ages.began_at_s)

    def age(self, age: datetime.timedelta) -> datetime.timedelta:
        """How old a thing must be by the clock to be as old as ``age``."""
        ahead_s = self._ages.ahead_s(age.total_seconds(), self._before_s)
        return age + datetime.timedelta(seconds=ahead_s)


def _is_gone(
    tables: VacuumedTables, directory: str, manifest: ManifestWriter, before: datetime.datetime
) -> bool:
    """Whether it is a base table of this slot that was left out before then. No line of the manifest names it."""
    marks = MirrorMarks(tables.application_id, manifest.owner)
    try:
        base = BaseTable.open(tables.bases, directory, directory, marks)
    except Unsupported:
        return False  # another tool has written to it: somebody's work
    return base is not None and base.left_out_since is not None and base.left_out_since < before


def _remove(location: Location) -> Vacuumed:
    """All of the table. It leaves its name first: a crash in between leaves no half of a table, and the rest goes with
    the next vacuum."""
    folder = TableFolder.listed(location)
    aside = os.path.join(os.path.dirname(location.uri), f"{_GONE}{uuid.uuid4().hex}")
    os.rename(location.uri, aside)
    reach("vacuuming_base")
    shutil.rmtree(aside)
    return Vacuumed(len(folder.files), sum(status.n_bytes for status in folder.files.values()))


def _empty(tables: VacuumedTables, directory: str, manifest: ManifestWriter) -> None:
    marks = MirrorMarks(tables.application_id, manifest.owner)
    base = BaseTable.open(tables.bases, directory, directory, marks)
    if base is not None and base.lsn != NOTHING:
        base.empty()


def _directory(location: Location) -> str:
    return location.uri.rpartition("/")[2]


def _directories(root: Location) -> list[str]:
    if not current(root).is_local:
        below = store_of(current(root)).get_file_info_selector(Below("", recursive=False))
        names = sorted(i.base_name for i in below if not i.is_file)
        return [name for name in names if not name.startswith("_") and _is_table(current(root).child(name))]
    for left in glob.glob(f"{glob.escape(current(root).uri)}/{_GONE}*"):
        shutil.rmtree(left, ignore_errors=True)
    with os.scandir(current(root).uri) as entries:
        tables = [entry.name for entry in entries if os.path.isdir(f"{entry.path}/{LOG}")]
    return sorted(name for name in tables if not name.startswith("_"))


def _vacuum_table(
    location: Location,
    application_id: str,
    manifest: ManifestWriter,
    named: set[int],
    grace: datetime.timedelta,
    check: Callable[[], None],
) -> Vacuumed:
    folder = TableFolder.listed(location)
    writer = DeltaBase.open(location, _directory(location))
    if writer is None or writer.watermark(f"mirror/{application_id}") == NOTHING:
        return Vacuumed()
    check_owner(writer, application_id, manifest.owner)
    if writer.watermark(f"mirror/{application_id}/owner") < manifest.owner:
        manifest.check()
        writer.swap([], [], manifest.marks)
    versions = kept_versions(named, writer.version)
    needed = files_of_versions(location, versions)
    folder.check_for(needed)
    unneeded = folder.unneeded(needed, grace.total_seconds())
    manifest.check()
    vacuumed = unneeded.remove(check)
    shorten_log(location, versions[0], folder.now_s, grace.total_seconds(), check)
    return vacuumed


def _shorten_manifest(root: Location, retention: datetime.timedelta, grace: datetime.timedelta) -> None:
    location = current(root).child(MANIFEST)
    folder = TableFolder.listed(location)
    present = int(DeltaTable(location.uri, storage_options=location.storage_options).version())
    folder.check_for(files_of_versions(location, [present]))
    committed = {name: status.modified_s for name, status in log_files(location).items()}
    versions = _present_since(committed, present, folder.now_s, grace)
    needed = files_of_versions(location, versions)
    folder.unneeded(needed, max(retention, grace).total_seconds()).remove(lambda: None)
    shorten_log(location, versions[0], folder.now_s, grace.total_seconds())


def _present_since(
    committed: Mapping[str, float], present: int, now_s: float, grace: datetime.timedelta
) -> range:
    """The versions that were the present one at a time within ``grace``. ``committed``: by the name of each file of the
    log, when it was written."""
    for version in range(present, 0, -1):
        committed_s = committed.get(commit_name(version).rpartition("/")[2])
        if committed_s is None:  # The log was shortened, so it is older.
            return range(min(version + 1, present), present + 1)
        if now_s - committed_s >= grace.total_seconds():
            return range(version, present + 1)
    return range(present + 1)


def _is_table(location: Location) -> bool:
    return bool(DeltaTable.is_deltatable(location.uri, location.storage_options))
