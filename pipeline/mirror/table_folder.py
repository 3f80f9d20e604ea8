"""What is in a table's folder at one moment, and the removal of what is there and not needed.

Whoever removes files makes the listing first, and finds out afterwards what is needed. Only what was listed is removed.
So a file that comes later is safe, whatever is known of it.

Ages are by the file system's own clock, which is that of a file server for a shared folder: a file without a name is
made there, and its time is now. The host's clock does not count.

A folder goes when nothing is left in it, if it was listed and is old enough, too: one that was made a moment ago is
empty until its first file comes. Hadoop's checksums go with their files.

Called by ``pipeline.mirror.vacuum``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.kept_files import LOG


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
    files: Mapping[str, os.stat_result]
    folders: Mapping[str, os.stat_result]

    @classmethod
    def listed(cls, location: Location) -> TableFolder:
        with tempfile.TemporaryFile(dir=location.uri) as file:
            now_s = os.fstat(file.fileno()).st_mtime
        files: dict[str, os.stat_result] = {}
        folders: dict[str, os.stat_result] = {}
        for folder, names_of_folders, names in os.walk(location.uri):
            if folder == location.uri and LOG in names_of_folders:
                names_of_folders.remove(LOG)
            for found, there in ((folders, names_of_folders), (files, names)):
                for path in (os.path.join(folder, name) for name in there):
                    try:
                        found[path] = os.lstat(path)
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
            if os.path.join(folder, of) not in needed and self.now_s - status.st_mtime >= age_s:
                files[path] = status.st_size
                continue
            while folder != self.location.uri and folder not in held:
                held.add(folder)
                folder = os.path.dirname(folder)
        folders = [
            path
            for path, status in self.folders.items()
            if path not in held and self.now_s - status.st_mtime >= age_s
        ]
        return Unneeded(files, folders[::-1])


@dataclass(frozen=True)
class Unneeded:
    """``files``: path → bytes. ``folders``, of which each one comes behind what is in it."""

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
                os.unlink(path)
            except FileNotFoundError:
                continue  # Another mirror's vacuum came first.
            removed += Vacuumed(int(path.endswith(".parquet")), n_bytes)
        for folder in self.folders:
            try:
                os.rmdir(folder)
            except OSError:
                continue  # Something came into it; or it is the next vacuum's.
        return removed
