"""A table's small files, and the rows of some of them in one new file.

Each batch adds at least one file to each of its tables, and readers open every one. Where a commit leaves many small
files, the next one replaces them by one. The rule is the same for every format, and the commit is the format's
(``delta.delta_table``, ``iceberg.merging``).

``SIZE_CLASSES`` keep the work small. Only files of one class go together, so a row is rewritten some times at most, and
a commit rewrites 4 MiB of Parquet at most. ``MIDDLING`` files are merged in the same way: into Delta tables beside the
commits (``delta.upkeep``). What has 4 MiB stays as it is: a year of small commits is some hundred files.

Where a table has a layout (``log_tables.layout``) the rows of a merge are ordered by it, and middling files become
several, each with a part of its range. Which files go together is the same: those with the lowest LSNs. So each of the
new files lies within the LSNs of the eight that it comes from, and a cut of the log waits for no more than these.

Only files that the sink has written are taken (``OWN``), and only where each of their rows counts, which the format
says.

To list all files of a table for each commit costs more than a tenth of the commit, and of an Iceberg table more than
the commit. So ``Gathering`` counts what is added, and says when a look is worth it.

Rejected: a merge in the commit of new rows, which a follower of the table cannot pass over, and in a thread of its own,
which may conflict with the next batch. deltalake's ``optimize``, which rewrites the newest file each time until it has
256 MB.

Called in the thread that commits, and by Delta's ``upkeep``. pyarrow only, no Spark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.log_tables.clustered_files import GROUP_ROWS, ClusteredFiles
from xidstream.pipeline.log_tables.columns import Conform, TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile

OWN: Final = "data-"
"""How the paths of the files begin that the sink writes of batches."""
SNAPSHOT_FILES: Final = "snapshot-"
"""How those begin that readers write of a table's snapshot."""
_READS: Final = 8
"""Files that are read at a time: an object store lets each of them wait."""


class SizeClass(NamedTuple):
    """Files from ``least_bytes`` to below ``below_bytes``. ``many`` of them become one."""

    least_bytes: int
    below_bytes: int
    many: int


SIZE_CLASSES: Final = (SizeClass(0, 16 << 10, 32), SizeClass(16 << 10, 512 << 10, 8))
MIDDLING: Final = (SizeClass(512 << 10, 4 << 20, 8),)
CLUSTERED_BYTES: Final = 4 << 20
"""What a file of a table with a layout has, more or less, where a merge has as much: what stays as it is."""
CLUSTERED: Final = "-clustered/"
"""In the paths of these files. They are never merged again, though one may come out below 4 MiB."""


class Gathering:
    """How many of the sink's files a table has in each of the ``classes``, as far as one writer knows. What others add
    meanwhile is counted by the next look."""

    def __init__(self, more: Sequence[SizeClass] = ()) -> None:
        """``more``: classes beside ``SIZE_CLASSES``."""
        self._more = more
        self._counts: list[int] | None = None

    @property
    def classes(self) -> Sequence[SizeClass]:
        return (*SIZE_CLASSES, *self._more)

    @property
    def is_due(self) -> bool:
        """Whether ``many_small`` may find some: the files were not counted yet, or one class has many."""
        if self._counts is None:
            return True
        return any(n >= each.many for n, each in zip(self._counts, self.classes, strict=True))

    def look(self, files: pa.Table) -> None:
        """These are all files of the table, as ``many_small`` takes them."""
        self._counts = [fitting.num_rows for _, fitting in _by_class(files, self.classes)]

    def add(self, files: Iterable[WrittenFile]) -> None:
        """A commit has added these."""
        if self._counts is None:
            return
        for file in files:
            for i, each in enumerate(self.classes):
                if file.path.startswith(OWN) and each.least_bytes <= file.size < each.below_bytes:
                    self._counts[i] += 1

    def forget(self) -> None:
        """Files were merged, or may have been: look again."""
        self._counts = None


def many_small(files: pa.Table, lsn_column: str, classes: Sequence[SizeClass] | None = None) -> pa.Table:
    """The files of one of the ``classes`` (``SIZE_CLASSES``) to replace, those with the lowest LSNs first, or none.
    ``files`` has ``path``, ``size_bytes``, ``num_records`` and, where there are statistics,
    ``min.…`` of ``lsn_column``. Neighbours go together, and no clock says which these are."""
    for many, fitting in _by_class(files, classes):
        if fitting.num_rows >= many:
            least = f"min.{lsn_column}"
            order = [name for name in (least, "path") if name in fitting.column_names]
            return fitting.sort_by([(name, "ascending") for name in order]).slice(0, many)
    return files.slice(0, 0)


def _by_class(files: pa.Table, classes: Sequence[SizeClass] | None = None) -> Iterator[tuple[int, pa.Table]]:
    """``many`` of each class, and our own files that are of it."""
    own = files
    if files.num_rows:
        paths = files["path"]
        own = files.filter(pc.and_not(pc.starts_with(paths, OWN), pc.match_substring(paths, CLUSTERED)))
    for least_bytes, below_bytes, many in SIZE_CLASSES if classes is None else classes:
        sizes = own["size_bytes"]
        yield many, own.filter(pc.and_(pc.greater_equal(sizes, least_bytes), pc.less(sizes, below_bytes)))


def merge(
    table: Location,
    replaced: pa.Table,
    columns: Sequence[TableColumn],
    lsn_column: str,
    directory: str,
    ranged: Collection[str] = (),
    by: Sequence[str] = (),
    names_of: Callable[[Sequence[str]], Sequence[str]] = lambda names: names,
) -> list[WrittenFile]:
    """Write the rows of these files (as ``many_small`` gives them), in the table's ``columns``, to a new file in the
    new ``directory``. ``ranged``: the columns that the table has statistics of. ``by``: those to order the rows by, of
    which there are statistics then, too; then these are several files where they have ``CLUSTERED_BYTES`` each.
    ``names_of``: what the table calls the columns of a file, for each of them.

    Raises OSError, pa.ArrowException, StorageFault, and SinkFailed where they are not what the table says.
    """
    schema = pa.schema([column.field for column in columns])
    files: ParquetFiles | ClusteredFiles
    if by:
        n_rows, n_bytes = (pc.sum(replaced[name]).as_py() for name in ("num_records", "size_bytes"))
        plain = ParquetFiles(table, directory, schema, lsn_column, (*ranged, *by), GROUP_ROWS)
        files = ClusteredFiles(plain, by, math.ceil(n_rows / max(1, n_bytes // CLUSTERED_BYTES)))
    else:
        files = ParquetFiles(table, directory, schema, lsn_column, ranged)
    with ThreadPoolExecutor(_READS) as threads:
        for content in threads.map(
            table.read, replaced["path"].to_pylist(), replaced["size_bytes"].to_pylist()
        ):
            rows = pq.read_table(pa.BufferReader(content), partitioning=None)
            conform = Conform.of(columns, names_of(rows.schema.names))
            for batch in rows.to_batches():
                files.write(conform(batch))
    written = files.close()
    if sum(file.n_rows for file in written) != pc.sum(replaced["num_records"]).as_py():
        raise SinkFailed("small files do not have the rows that the table says")
    return written
