"""Removes what no reader needs any more: lines of the manifest, and files of base tables.

A reader takes the newest lines of the manifest and then reads files, for as long as it likes up to ``retention``. So a
line is needed until the refresh behind it is older than that. Lines go first, in one commit. Then, of each base table,
all files go that neither a version that is still named needs, nor the present version: the next refresh starts from
that, named or not. A crash in between leaves files, which the next vacuum finds.

What is left of attempts that failed goes the same way. No mirror of this slot writes meanwhile: this one holds the
number (``ManifestWriter.claim``), and each table gets it before a file of it is removed. So an earlier mirror cannot
commit what it has in hand.

deltalake's own vacuum was rejected: it counts from the removal of a file and not from what the manifest names, and its
``keep_versions`` are read with the log of the last checkpoint only, unless all files are listed as here.

Rows of the log are not removed here. For folders only, as the refresh itself.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

from deltalake import DeltaTable

from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.mirror.kept_files import LOG, files_of_versions
from xidstream.pipeline.mirror.plan import kept_versions
from xidstream.pipeline.spark.delta_table import NOTHING, DeltaTableWriter
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.state.manifest import MANIFEST, ManifestWriter, current


@dataclass(frozen=True)
class Vacuumed:
    """What was removed."""

    n_files: int = 0
    n_bytes: int = 0


def vacuum(
    root: Location, application_id: str, manifest: ManifestWriter, retention: datetime.timedelta
) -> Vacuumed:
    """Raises Superseded, with nothing removed, where another mirror has taken over. OSError for files."""
    before = datetime.datetime.now(datetime.timezone.utc) - retention
    manifest.check()
    manifest.forget(before)
    reach("vacuuming_base")
    named: dict[str, set[int]] = {}
    for line in manifest.lines():
        named.setdefault(line.directory, set()).add(line.version)
    n_files = n_bytes = 0
    for directory in _directories(root):
        location = current(root).child(directory)
        writer = DeltaTableWriter.open(location, directory)
        if writer is None or writer.watermark(f"mirror/{application_id}") == NOTHING:
            continue
        if writer.watermark(f"mirror/{application_id}/owner") < manifest.owner:
            # An earlier mirror that still has this table in hand may have files that are removed now.
            writer.swap([], [], manifest.marks)
        needed = files_of_versions(location, kept_versions(named.get(directory, ()), writer.version))
        for path, size in _others(location, needed):
            os.unlink(path)
            n_files, n_bytes = n_files + path.endswith(".parquet"), n_bytes + size
        _remove_empty_folders(location)
    _shorten_manifest(root, before)
    return Vacuumed(n_files, n_bytes)


def _directories(root: Location) -> list[str]:
    with os.scandir(current(root).uri) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("_"))


def _others(location: Location, needed: set[str]) -> list[tuple[str, int]]:
    """The files of a table's folder that are not needed, with their sizes; Hadoop's checksums go with their files.

    Raises StorageFault where a file that is needed is not found: then names are not what they are taken for.
    """
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(location.uri):
        if LOG in folders:
            folders.remove(LOG)
        for name in names:
            of = name[1:-4] if name.startswith(".") and name.endswith(".crc") else name
            found[os.path.join(folder, name)] = os.path.join(folder, of)
    if missing := needed - found.keys():
        raise StorageFault(f"{len(missing)} files that the manifest names are missing below {location.uri}")
    return [(path, os.path.getsize(path)) for path, of in found.items() if of not in needed]


def _remove_empty_folders(location: Location) -> None:
    for folder, folders, names in list(os.walk(location.uri, topdown=False)):
        if folder != location.uri and os.path.basename(folder) != LOG and not folders and not names:
            os.rmdir(folder)


def _shorten_manifest(root: Location, before: datetime.datetime) -> None:
    """The manifest's own files that were removed from it. Whoever reads an older version of it has had the time."""
    location = current(root).child(MANIFEST)
    present = int(DeltaTable(location.uri).version())
    for path, _ in _others(location, files_of_versions(location, [present])):
        if os.path.getmtime(path) < before.timestamp():
            os.unlink(path)
    _remove_empty_folders(location)
