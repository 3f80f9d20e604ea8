"""The files of one attempt at a table's snapshot, which no commit names yet: are they there, and their end.

A snapshot may take longer than a user's vacuum keeps files that nobody names (a week, as a rule). So whoever is about
to name them asks whether all are there. An attempt that failed removes what it has written, else a table that fails
late each time would fill the disk.

Readers that were cancelled may still finish a file after the removal. It is removed with the next attempt's failure,
or by a vacuum.

Called by the sinks' snapshot logs (``snapshot_log``, ``pipeline.initial_copy.staged_snapshots``), by ``upkeep`` and by
erasures.
Plain files, or deltalake's file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from xidstream.pipeline.log_tables.locations import Location

_THREADS: Final = 16
"""An object store lets each question wait."""


def missing(table: Location, paths: Sequence[str]) -> list[str]:
    """The files among ``files`` that are not there. The paths are relative to ``table``. Raises OSError."""
    if table.is_local:
        return [path for path in paths if not os.path.isfile(os.path.join(table.uri, path))]
    store = store_of(table)
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda path: store.get_file_info([path])[0], paths)
        return [path for path, info in zip(paths, found, strict=True) if not info.is_file]


def files_below(table: Location) -> list[str]:
    """All files of a table's folder but those of its log, named or not, relative to it. Raises OSError."""
    if table.is_local:
        found = []
        for folder, folders, names in os.walk(table.uri):
            if folder == table.uri and "_delta_log" in folders:
                folders.remove("_delta_log")
            found += [os.path.relpath(os.path.join(folder, name), table.uri) for name in names]
        return sorted(found)
    listed = store_of(table).get_file_info_selector(Below("", recursive=True))
    return sorted(i.path for i in listed if i.is_file and not i.path.startswith("_delta_log/"))


def remove(table: Location, directory: str) -> int:
    """Remove what is in the directories below ``table`` whose names begin with ``directory``, an attempt's own. Returns
    how many files that were. Raises OSError."""
    n_files = 0
    if table.is_local:
        for name in os.listdir(table.uri) if os.path.isdir(table.uri) else []:
            if name.startswith(directory):
                path = os.path.join(table.uri, name)
                n_files += sum(len(files) for _, _, files in os.walk(path))
                shutil.rmtree(path, ignore_errors=True)
        return n_files
    store = store_of(table)
    for folder in store.get_file_info_selector(Below("", recursive=False)):
        if folder.base_name.startswith(directory):
            for info in store.get_file_info_selector(Below(folder.path, recursive=True)):
                if info.is_file:
                    store.delete_file(info.path)
                    n_files += 1
    return n_files


class Below(NamedTuple):
    """What pyarrow's ``FileSelector`` says."""

    base_dir: str
    recursive: bool
    allow_not_found: bool = True


def store_of(table: Location) -> Any:
    """deltalake's file system of a table in an object store. Paths are relative to the table."""
    from deltalake.fs import DeltaStorageHandler

    return DeltaStorageHandler(table.uri, table.storage_options)
