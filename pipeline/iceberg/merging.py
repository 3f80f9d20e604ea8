"""Small files of an Iceberg table become one, in a commit behind the one that brought the last of them.

The rule which files go together is that of every format (``log_tables.small_files``), and so is their writing. Here is
what Iceberg adds:

- *The commit* is a snapshot of its own whose operation is ``replace``: rows as before, in other files. A follower that
  passes over such snapshots misses no row, and reads none twice. It requires that the main branch is still at the
  snapshot whose files were read, so a run that was taken over merges nothing any more.
- *Files that are left alone*: those of other programs, and all where somebody has deleted rows of files without writing
  them anew (delete files), or where a column's name has meant two columns: the rows of a file are not what the table
  says there.
- *The replaced files* stay until the snapshots that name them are expired, and an hour more (``upkeep``).

The commits count what they add. All files are listed, from the table's manifests, only where so many have come that
some may go together: after 32 small commits, mostly.

Middling files (``small_files.MIDDLING``) are merged here as well. That takes up to a second, once in thousands of small
commits; these are paced to one a second anyway. Rejected: a thread of its own as for Delta, whose handles and whose
races with the committing thread it would need.

A merge that fails keeps no row waiting: the rows are committed already. It is told, and tried again later.

Called by ``iceberg_table`` and ``commit_together``, in the thread that commits. pyiceberg and pyarrow, no Spark.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, FileFormat, ManifestContent
from pyiceberg.types import LongType

from xidstream.pipeline import events
from xidstream.pipeline.errors import Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.log_reading import TableSnapshot
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.small_files import (
    MIDDLING,
    OWN,
    SIZE_CLASSES,
    fewest_to_come,
    many_small,
    merge,
)

if TYPE_CHECKING:
    from xidstream.pipeline.iceberg.iceberg_table import IcebergTable
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile

CLASSES: Final = SIZE_CLASSES + MIDDLING
PAUSE_COMMITS: Final = 50
"""So many commits of a table follow one whose files could not be merged before the next attempt."""
_LOGGER: Final = logging.getLogger(__name__)


class SmallFiles:
    """Those of one table, for as long as its handle is kept. One thread at a time."""

    def __init__(self) -> None:
        self._to_come = 0
        """How many files must be added at least before all are listed again."""

    def added(self, table: IcebergTable, n_files: int, lsn_column: str) -> None:
        """``table`` has committed ``n_files``: merge some of its files, where there are many. Raises SnapshotOutdated
        where somebody else has committed meanwhile, and what the catalog raises whose answer is not known."""
        self._to_come -= n_files
        if self._to_come > 0:
            return
        try:
            live = _live(table)
            files = _listed(table, list(live.values()), lsn_column)
            replaced = many_small(files, lsn_column, CLASSES)
            if not replaced.num_rows:
                self._to_come = fewest_to_come(files, CLASSES)
                return
            directory = f"{OWN}{uuid.uuid4().hex}-merged"
            written = _merged(table, replaced, lsn_column, directory)
        except Unsupported:
            self._to_come = PAUSE_COMMITS
            return  # whoever reads the table is told
        except (OSError, pa.ArrowException, XidstreamError) as error:
            self._to_come = PAUSE_COMMITS
            text = f"{table.title}: small files could not be merged ({type(error).__name__})"
            _LOGGER.warning(events.Event("small_files_not_merged", text, table=table.label))
            return
        reach("iceberg_merging")
        try:
            table.replace([live[path] for path in replaced["path"].to_pylist()], written, lsn_column)
        except SnapshotOutdated:
            with suppress(OSError, XidstreamError):
                attempt_files.remove(table.location, directory)
            raise


def _live(table: IcebergTable) -> dict[str, DataFile]:
    """The files of the snapshot, by their paths below the table's location. Raises Unsupported where rows of them are
    deleted."""
    loaded = table.loaded
    snapshot, base = loaded.current_snapshot(), f"{loaded.location().rstrip('/')}/"
    found = {}
    for manifest in [] if snapshot is None else snapshot.manifests(loaded.io):
        if manifest.content is ManifestContent.DELETES:
            raise Unsupported(f"rows of {table.title} were deleted without writing its files anew")
        for entry in manifest.fetch_manifest_entry(loaded.io):
            found[entry.data_file.file_path.removeprefix(base)] = entry.data_file
    return found


def _listed(table: IcebergTable, files: Sequence[DataFile], lsn_column: str) -> pa.Table:
    """As ``many_small`` takes them: ``path: string``, ``size_bytes: int64``, ``num_records: int64``, ``min.…: int64``,
    null where the file has no such bound."""
    base = f"{table.loaded.location().rstrip('/')}/"
    lsn_id = table.loaded.schema().find_field(lsn_column).field_id
    least = [(each.lower_bounds or {}).get(lsn_id) for each in files]
    return pa.table(
        {
            # Of another format, or elsewhere: no file of the sink's.
            "path": [
                each.file_path.removeprefix(base) if each.file_format is FileFormat.PARQUET else ""
                for each in files
            ],
            "size_bytes": pa.array([each.file_size_in_bytes for each in files], pa.int64()),
            "num_records": pa.array([each.record_count for each in files], pa.int64()),
            f"min.{lsn_column}": pa.array(
                [None if each is None else from_bytes(LongType(), each) for each in least], pa.int64()
            ),
        }
    )


def _merged(table: IcebergTable, replaced: pa.Table, lsn_column: str, directory: str) -> list[WrittenFile]:
    """Raises as ``small_files.merge``; what it has written then is removed."""
    renamed = {former: each.names[0] for each in TableSnapshot(table).file_columns for former in each.names}
    try:
        return merge(table.location, replaced, table.columns, lsn_column, directory, table.ranged, renamed)
    except BaseException:
        with suppress(OSError, XidstreamError):
            attempt_files.remove(table.location, directory)
        raise
