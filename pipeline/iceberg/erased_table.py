"""An Iceberg table of the log, as an erasure takes it: ``log_tables.erased_rows``, and the copies that are left.

A commit is an *overwrite* with the files that are written anew. It requires the snapshot that was read, and so does
whatever is in work beside it. A merge, a compaction and a cut are refused then, and a batch or a snapshot of the sink
is made anew (``IcebergTableWriter._made_from``).

A file is read in the names and the types that the table has now, as a merge reads it (``merging``).

*Copies.* A file that the newest snapshot has not, and that has rows of the keys:

- one that an older snapshot names may be open in a reader. It stays until that snapshot is expired, which is done here
  an hour after another one followed it (``upkeep.DELAY_S``), or at once where that is asked for;
- one that no snapshot names may have been replaced just now, by this erasure, another one or a merge, and the run has
  expired the snapshot: nothing tells that. So what is found first stays for an hour as well (``recent``);
- any other goes: nobody can name it any more;
- one that is none of ours by its name is told, and left.

The metadata of a log's table have no value of a row.

Called by ``pipeline.erasure``, in whatever process. No Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from xidstream.pipeline.errors import StorageFault, Unsupported
from xidstream.pipeline.iceberg.log_reading import IcebergTableSnapshot, todays_names
from xidstream.pipeline.iceberg.staged_commits import files_by_path
from xidstream.pipeline.iceberg.upkeep import DELAY_S, remove_files, unnamed_by
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, rows_of_keys
from xidstream.pipeline.log_tables.erased_rows import paths_upto, rows_in_file
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.small_files import OWN, SNAPSHOT_FILES

if TYPE_CHECKING:
    from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
    from xidstream.pipeline.log_tables.parquet_files import WrittenFile

ATTEMPTS: Final = 20
_LAST_VERSION: Final = 2
_LSN: Final = "_commit_lsn"
Open = Callable[[], "IcebergTableWriter | None"]


class IcebergErasedTable:
    """``log_tables.erased_rows.ErasedTable``. Raises as ``IcebergTableSnapshot``."""

    def __init__(self, table: IcebergTableWriter) -> None:
        self._table = table
        table.expires = False
        self._snapshot = IcebergTableSnapshot(table)
        self.location = table.location
        self.columns = table.columns
        self.properties: Mapping[str, str] = self._snapshot.properties

    @property
    def title(self) -> str:
        return self._table.title

    @property
    def ranged(self) -> Sequence[str]:
        return list(self._table.ranged)

    def watermark(self, application_id: str) -> int:
        return self._table.watermark(application_id)

    def check(self) -> None:
        assert self._snapshot.files is not None  # it raises
        if self._table.loaded.metadata.format_version > _LAST_VERSION:
            raise Unsupported(
                f"{self.title} has format version {self._table.loaded.metadata.format_version}: rows have ids there, "
                "which files that are written anew would have to carry on",
                remedy="delete the rows by an engine that copies on write (docs/iceberg.md)",
            )

    def files(self) -> pa.Table:
        found = self._snapshot.files
        return pa.table(
            {
                "path": pa.array([each.path for each in found], pa.string()),
                "num_records": pa.array([each.n_rows for each in found], pa.int64()),
                f"min.{_LSN}": pa.array([each.least.get(_LSN) for each in found], pa.int64()),
                f"max.{_LSN}": pa.array([each.greatest.get(_LSN) for each in found], pa.int64()),
            }
        )

    def batches(self, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with (
            self.location.open(path) as source,
            pq.ParquetFile(source, page_checksum_verification=True) as file,
        ):
            names = file.schema_arrow.names
            todays = dict(zip(names, todays_names(self._snapshot.file_columns, names), strict=True))
            wanted = [each for each in self.columns if columns is None or each.name in columns]
            chosen = [name for name in names if todays[name] in {each.name for each in wanted}]
            for rows in file.iter_batches(columns=chosen):
                yield Conform.of(wanted, [todays[name] for name in rows.schema.names])(rows)

    def replace(self, added: Sequence[WrittenFile], removed: Sequence[str], marks: Mapping[str, int]) -> None:
        # Without files, too: what has read the table before it is refused, and a snapshot that was committed since may
        # have such rows.
        self._table.commit(added, {}, marks=marks, merges=False, removed=removed, once=True)


def copies_in_log(
    open_table: Open, keys: ErasedKeys, label: str, upto: int, *, at_once: bool, recent: Set[str] | None
) -> tuple[list[str], list[str]]:
    """Remove what may go, and return what stays, and what has no such row and is not in the newest snapshot; as paths
    below the table. ``recent``: what this erasure has found within the last hour; None: it has not looked before.
    Raises OSError, StorageFault and what pyarrow and pyiceberg raise."""
    table = _expired(open_table, at_once=at_once)
    if table is None:
        return [], []
    erased = IcebergErasedTable(table)
    wanted = rows_of_keys(keys, erased.columns, erased.properties, label)
    named = named_by_any(table)
    goes: list[str] = []
    stays: list[str] = []
    cleared: list[str] = []
    for path in _not_in_newest(table):
        try:
            n_rows = rows_in_file(erased.batches, path, wanted, upto)
        except FileNotFoundError:
            continue  # the upkeep has removed it
        except pa.ArrowException:
            stays.append(path)
            continue
        may_go = path not in named and (at_once or (recent is not None and path not in recent))
        if n_rows:
            (goes if may_go and path.startswith((OWN, SNAPSHOT_FILES)) else stays).append(path)
        else:
            cleared.append(path)
    remove_files(table.loaded.io, [f"{table.loaded.location().rstrip('/')}/{path}" for path in goes])
    return stays, cleared


def in_work(open_table: Open, upto: int, known: Set[str]) -> list[str]:
    """Files that no snapshot names and that may have rows up to an LSN, without those that are ``known``. Raises as
    ``copies_in_log``."""
    table = open_table()
    if table is None:
        return []
    named = named_by_any(table)
    unnamed = (path for path in _not_in_newest(table) if path not in known and path not in named)
    return paths_upto(unnamed, IcebergErasedTable(table).batches, upto)


def _expired(open_table: Open, *, at_once: bool) -> IcebergTableWriter | None:
    """The table without its old snapshots."""
    before_ms = None if at_once else int((time.time() - DELAY_S) * 1000)
    for _ in range(ATTEMPTS):
        table = open_table()
        if table is None:
            return None
        title = table.title
        try:
            expired, line = table.expire_until(before_ms)
        except SnapshotOutdated:
            continue
        loaded = table.loaded
        remove_files(loaded.io, unnamed_by(loaded.metadata, loaded.io, expired, line, loaded.location()))
        return table
    raise StorageFault(f"{title} was changed by others during {ATTEMPTS} attempts to expire snapshots")


def named_by_any(table: IcebergTableWriter) -> set[str]:
    """The files of all snapshots, by their paths below the table."""
    found: set[str] = set()
    seen: set[str] = set()
    io = table.loaded.io
    for snapshot in table.loaded.metadata.snapshots:
        manifests = {each.manifest_path for each in snapshot.manifests(io)}
        if not manifests <= seen:
            seen |= manifests
            found |= files_by_path(table.loaded, snapshot).keys()
    return found


def _not_in_newest(table: IcebergTableWriter) -> list[str]:
    newest = files_by_path(table.loaded, table.loaded.current_snapshot())
    there = attempt_files.files_below(table.location)
    return [path for path in there if path.endswith(".parquet") and path not in newest]
