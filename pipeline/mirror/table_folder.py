"""What is in a table's folder at one moment, and the removal of what is there and not needed.

Whoever removes files makes the listing first, and finds out afterwards what is needed. Only what was listed is removed.
So a file that comes later is safe, whatever is known of it.

Ages are by the clock of whoever stamps the files: the file system's, which is that of a file server for a shared
folder, or the store's. A file without a name is made there, or a small object, and its time is now. The host's clock
does not count.

A folder goes when nothing is left in it, if it was listed and is old enough, too: one that was made a moment ago is
empty until its first file comes. Hadoop's checksums go with their files. A store has no folders.

Called by ``pipeline.mirror.vacuum``, ``short_log`` and ``erased_base``.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables.attempt_files import Below, store_of
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.kept_files import LOG

_CLOCK: Final = "clock-"
"""Begins the name of an object that is there to be dated."""


class FileStatus(NamedTuple):
    """What is known of a file or a folder. ``modified_s``: by the clock of the file system or the store."""

    n_bytes: int
    modified_s: float


@dataclass(frozen=True)
class Vacuumed:
    """What was removed."""

    n_files: int = 0
    n_bytes: int = 0

    def __add__(self, other: Vacuumed) -> Vacuumed:
        return Vacuumed(self.n_files + other.n_files, self.n_bytes + other.n_bytes)


@dataclass(frozen=True)
class TableFolder:
    """The files and folders below ``location`` but for the log's, by absolute path; a folder comes before what is in
    it. ``now_s``: just before, by the file system's clock."""

    location: Location
    now_s: float
    files: Mapping[str, FileStatus]
    folders: Mapping[str, FileStatus]

    @classmethod
    def listed(cls, location: Location) -> TableFolder:
        now_s = now_s_of(location)
        files: dict[str, FileStatus] = {}
        folders: dict[str, FileStatus] = {}
        if not location.is_local:
            below = stored(location, "")
            files = {
                f"{location.uri}/{path}": s for path, s in below.items() if not path.startswith(f"{LOG}/")
            }
            return cls(location, now_s, files, folders)
        for folder, names_of_folders, names in os.walk(location.uri):
            if folder == location.uri and LOG in names_of_folders:
                names_of_folders.remove(LOG)
            for found, there in ((folders, names_of_folders), (files, names)):
                for path in (os.path.join(folder, name) for name in there):
                    try:
                        found[path] = _status(os.lstat(path))
                    except FileNotFoundError:
                        continue  # Somebody else removed it meanwhile.
        return cls(location, now_s, files, folders)

    def check_for(self, needed: Collection[str]) -> None:
        """Raise StorageFault where a file that is needed is not there: then names are not what they are taken for."""
        missing = set(needed) - self.files.keys()
        # What was committed since the listing is only in another one.
        if missing and (missing := missing - self.listed(self.location).files.keys()):
            raise StorageFault(
                f"{len(missing)} files that are needed are missing below {self.location.uri}: nothing is removed there"
            )

    def unneeded(self, needed: Collection[str], age_s: float) -> Unneeded:
        """What was listed, is older than ``age_s``, and is not needed."""
        files: dict[str, int] = {}
        held: set[str] = set()
        for path, status in self.files.items():
            folder, name = os.path.split(path)
            of = name[1:-4] if name.startswith(".") and name.endswith(".crc") else name
            if os.path.join(folder, of) not in needed and self.now_s - status.modified_s >= age_s:
                files[path] = status.n_bytes
                continue
            while folder != self.location.uri and folder not in held:
                held.add(folder)
                folder = os.path.dirname(folder)
        folders = [
            path
            for path, status in self.folders.items()
            if path not in held and self.now_s - status.modified_s >= age_s
        ]
        return Unneeded(self.location, files, folders[::-1])


@dataclass(frozen=True)
class Unneeded:
    """``files``: path → bytes. ``folders``, of which each one comes after what is in it."""

    location: Location
    files: Mapping[str, int]
    folders: Collection[str]

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)

    def remove(self, check: Callable[[], None]) -> Vacuumed:
        """Raises OSError, and what ``check`` raises, which is called ahead of each file."""
        removed = Vacuumed()
        for path, n_bytes in self.files.items():
            check()
            try:
                remove_file(self.location, path[len(self.location.uri) + 1 :])
            except FileNotFoundError:
                continue  # Another mirror's vacuum came first.
            removed += Vacuumed(int(path.endswith(".parquet")), n_bytes)
        for folder in self.folders:
            try:
                os.rmdir(folder)
            except OSError:
                continue  # Something came into it; or it is the next vacuum's.
        return removed


def stored(location: Location, below: str, *, recursive: bool = True) -> dict[str, FileStatus]:
    """The objects of a store below ``location``, by their path from there. Raises OSError."""
    infos = store_of(location).get_file_info_selector(Below(below, recursive))
    return {
        i.path: FileStatus(i.size or 0, i.mtime_ns / 1e9)
        for i in infos
        if i.is_file and i.mtime_ns is not None
    }


def log_files(location: Location) -> dict[str, FileStatus]:
    """The files of a table's log, by name. Raises OSError."""
    if not location.is_local:
        found = stored(location, LOG, recursive=False)
        return {path.rpartition("/")[2]: status for path, status in found.items()}
    files = {}
    with os.scandir(os.path.join(location.uri, LOG)) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another mirror's vacuum came first
                files[entry.name] = _status(entry.stat())
    return files


def remove_file(location: Location, path: str) -> None:
    """``path`` is relative to ``location``. Raises FileNotFoundError, where the store tells it, and OSError."""
    if location.is_local:
        os.unlink(os.path.join(location.uri, path))
    else:
        store_of(location).delete_file(path)


def now_s_of(location: Location) -> float:
    """The time by the clock of the file system or the store. Raises OSError, StorageFault."""
    if location.is_local:
        with tempfile.TemporaryFile(dir=location.uri) as file:
            return _status(os.fstat(file.fileno())).modified_s
    name = f"{_CLOCK}{uuid.uuid4().hex}"
    # Parquet: deltalake does not take what ``write`` of such a stream passes on.
    with location.create(name) as file:
        pq.write_table(pa.table({"clock": [True]}), file)
    (info,) = store_of(location).get_file_info([name])
    # What a crash leaves of it goes as any other file that nobody needs.
    with suppress(FileNotFoundError):
        remove_file(location, name)
    if info.mtime_ns is None:
        raise StorageFault(f"the store does not say when {location.uri}/{name} was written")
    return float(info.mtime_ns / 1e9)


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(found.st_size, found.st_mtime)
