"""Small files of an Iceberg table become one, after the commits, as ``log_tables.small_files`` says.

A batch a second leaves 86,400 files a day in a table, and readers open every one. So after a commit that has made many
of one size, the same thread writes one file with their rows, and a commit of its own puts it in their place
(``IcebergTableWriter.replace``). Its snapshot is a *replace*: Iceberg's word for a change of files without a change of
rows, which readers of increments pass over.

New rows of the table are committed before anything is merged. Where the tables of a batch are not committed together,
its ``_transactions`` comes after their merges: a reader of states gets these rows that much later. A merge that cannot
be written is told, and tried again a hundred commits later. One that loses a race against another program's commit is
given up: its file is removed, and the next look begins anew, after a hundred commits where ``LOSSES`` were lost one
after the other: who commits all the time would make each commit of ours as slow as a merge. Where nobody knows what
became of the commit, the caller is told, as of any commit.

Left alone are

- files that are not the sink's (``small_files.OWN``);
- tables with delete files. A merged file would be newer than these, and rows that were deleted would come back;
- tables of format version 3: rows have ids there, which a file written anew would have to carry on;
- tables whose property ``SETTING`` is false. A compaction of the user's that began before a merge and takes one of its
  files is refused by Iceberg, and begins again.

The files have no field ids, and the table may call a column otherwise than they do. ``log_reading`` knows the names,
and refuses tables where a name has meant two columns: these are left alone, too.

Middling files (``small_files.MIDDLING``) are merged here as well, and not in a thread of their own, as Delta's are: it
takes up to a second, once in thousands of small commits, and these are paced to one a second.

What was replaced stays until no snapshot names it, and an hour longer (``upkeep``).

Called by ``iceberg_table`` and ``commit_together``, in the thread that commits. No Spark.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from xidstream.pipeline import events
from xidstream.pipeline.errors import Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.log_reading import IcebergTableSnapshot, SnapshotFile, todays_names
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.small_files import MIDDLING, OWN, Gathering, many_small, merge

if TYPE_CHECKING:
    from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile

SETTING: Final = "xidstream.merge-small-files"
"""A property of a table: ``false`` leaves its files as they are."""
RESTS: Final = 100
"""So many commits lie between a merge that was not possible and the next try."""
LOSSES: Final = 3
"""So many races that are lost one after the other have it rest, too."""
_LAST_VERSION: Final = 2
_LOGGER: Final = logging.getLogger(__name__)


@dataclass
class _State:
    """What is known of one table, whatever handle commits. ``rests``: commits until the next try. ``losses``: races
    that were lost since a merge was committed, or given a rest."""

    gathering: Gathering = field(default_factory=lambda: Gathering(MIDDLING))
    rests: int = 0
    losses: int = 0


@dataclass(frozen=True)
class _Merged:
    """``files`` have the rows of ``removed``, and no commit names them yet."""

    directory: str
    files: Sequence[WrittenFile]
    removed: Sequence[SnapshotFile]


class Merging:
    """The merges of one sink's tables."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def follow(self, table: IcebergTableWriter, added: Sequence[WrittenFile], lsn_column: str) -> None:
        """``table`` has just been committed to, with these files. Raises what a commit raises whose outcome is not
        known."""
        state = self._states.setdefault(table.label, _State())
        state.gathering.add(added)
        if state.rests:
            state.rests -= 1
            return
        if not state.gathering.is_due or not may_merge(table):
            return
        directory = f"{OWN}{uuid.uuid4().hex}-merged"
        try:
            merged = _write(table, state.gathering, lsn_column, directory)
            if merged is None:
                return
            removed = [each.named for each in merged.removed]
            staged = table.stage_replacement(merged.files, removed, lsn_column)
        except (OSError, pa.ArrowException, XidstreamError) as error:
            state.rests = RESTS
            _remove(table, directory)
            if not isinstance(error, Unsupported):
                text = f"{table.title}: small files could not be merged ({type(error).__name__})"
                _LOGGER.warning(events.Event("small_files_not_merged", text, table=table.label))
            return
        state.gathering.forget()
        reach("iceberg_merging")
        try:
            table.replace(staged)
        except SnapshotOutdated:
            _remove(table, directory)
            state.losses += 1
            if state.losses < LOSSES:
                return
            state.rests = RESTS
        state.losses = 0


def may_merge(table: IcebergTableWriter) -> bool:
    """Whether the table's format and its properties allow it."""
    says = table.loaded.properties.get(SETTING, "true").lower()
    return table.loaded.metadata.format_version <= _LAST_VERSION and says != "false"


def _write(
    table: IcebergTableWriter, gathering: Gathering, lsn_column: str, directory: str
) -> _Merged | None:
    """None where no class has many. Raises Unsupported for a table whose files are not its rows, and as ``merge``."""
    snapshot = IcebergTableSnapshot(table)
    files = _listed(snapshot.files, lsn_column)
    gathering.look(files)
    replaced = many_small(files, lsn_column, gathering.classes)
    if not replaced.num_rows:
        return None
    columns = snapshot.file_columns

    def names_of(names: Sequence[str]) -> Sequence[str]:
        return todays_names(columns, names)

    merged = merge(
        table.location, replaced, table.columns, lsn_column, directory, table.ranged, names_of=names_of
    )
    paths = set(replaced["path"].to_pylist())
    return _Merged(directory, merged, [each for each in snapshot.files if each.path in paths])


def _listed(files: Sequence[SnapshotFile], lsn_column: str) -> pa.Table:
    """The files in the columns that ``many_small`` takes."""
    return pa.table(
        {
            "path": pa.array([each.path for each in files], pa.string()),
            "size_bytes": pa.array([each.n_bytes for each in files], pa.int64()),
            "num_records": pa.array([each.n_rows for each in files], pa.int64()),
            f"min.{lsn_column}": pa.array([each.least.get(lsn_column) for each in files], pa.int64()),
        }
    )


def _remove(table: IcebergTableWriter, directory: str) -> None:
    """What cannot be removed is found as a leftover."""
    with suppress(OSError):
        attempt_files.remove(table.location, directory)
