"""Files of a log table that it does not name and that have rows of erased keys: which wait, and which go at once.

- A file that *no commit ever named* (of a batch or merge that failed, of a snapshot that is taken again) goes now:
  nobody has opened it, and nobody can name it any more. Rows up to the erasure's LSN are in the table already, so no
  batch brings them; a merge whose files were replaced is refused (``upkeep.take_merge``), and so is a snapshot that was
  read before (``snapshot_log``).
- A file that *a commit removed* may be open in a reader that came before. It goes when it has been removed for as long
  as the table keeps such files. The run's upkeep does that where the table is written; this does it where nobody
  writes.
- A file that *is none of ours* by its name is somebody's copy. It is told, and left.
- A file that cannot be read is being written, or was left half written. Nobody knows what is in it, so it counts.

What was in work while the table was erased from may write its file after that, and then nobody can name it.
``in_work`` finds it, without the keys: no batch has such old LSNs any more.

The ages of removed files are Delta's, by the wall clock. Any process may call this, at any time.
"""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial

import pyarrow as pa

from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.upkeep import remove_files
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, rows_of_keys
from xidstream.pipeline.log_tables.erased_rows import batches_of, paths_upto, rows_in_file
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.small_files import OWN, SNAPSHOT_FILES
from xidstream.pipeline.settings.delta_retention import kept_files_s


def copies_in_log(
    table: Location, label: str, keys: ErasedKeys, upto: int, *, at_once: bool
) -> tuple[list[str], list[str]]:
    """Remove what may go, and return what stays, and what no commit ever named and has no such row; as paths relative
    to the table. ``at_once``: all goes, also from under readers. Raises OSError and what pyarrow and deltalake
    raise."""
    writer = DeltaTableWriter.open(table, label)
    if writer is None:
        return [], []
    wanted = rows_of_keys(keys, writer.columns, writer.properties, label)
    removed = set(writer.removed_files(0))
    files_s = kept_files_s(writer.properties)
    old = removed if at_once else set()
    if files_s is not None:
        old |= set(writer.removed_files(math.ceil(files_s / 3600)))
    goes: list[str] = []
    stays: list[str] = []
    cleared: list[str] = []
    for path in _unnamed(table, writer):
        try:
            n_rows = rows_in_file(partial(batches_of, table), path, wanted, upto)
        except FileNotFoundError:
            continue  # the upkeep has removed it
        except pa.ArrowException:
            stays.append(path)
            continue
        may_go = path in old if path in removed else path.startswith((OWN, SNAPSHOT_FILES))
        if n_rows:
            (goes if may_go else stays).append(path)
        elif path not in removed:
            cleared.append(path)
    remove_files(table, goes, lambda: False)
    return stays, cleared


def in_work(table: Location, label: str, upto: int, known: Set[str]) -> list[str]:
    """Files that no commit has named and that may have rows up to an LSN, without those that are ``known``: of a merge
    or a snapshot that had read the table before it was erased from. It needs no key. Raises as ``copies_in_log``."""
    writer = DeltaTableWriter.open(table, label)
    if writer is None:
        return []
    known = known | set(writer.removed_files(0))
    unnamed = (path for path in _unnamed(table, writer) if path not in known)
    return paths_upto(unnamed, partial(batches_of, table), upto)


def _unnamed(table: Location, writer: DeltaTableWriter) -> list[str]:
    named = set(writer.files()["path"].to_pylist())
    there = attempt_files.files_below(table)
    return [path for path in there if path.endswith(".parquet") and path not in named]


def left_of(table: Location, paths: list[str]) -> list[str]:
    """Which of the files are there. Raises OSError."""
    gone = set(attempt_files.missing(table, paths))
    return [path for path in paths if path not in gone]
