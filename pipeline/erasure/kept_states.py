"""The states that an erasure would take from a log that is cut, kept as a fold of the log without the rows.

Where ``log_retention`` has cut a log, its oldest states come from a start that is still there: a snapshot, a fold, or
an older version of the base table, and the changes after it. An erasure takes such versions back, for they have the
rows (``mirror.erased_base``). All states from there up to the next start would go with the oldest one, for all keys.

So before anything is erased the oldest version that the log relies on is written into the log, as a fold
(``changelog.log_fold``), and the rows of the keys are left out on the way. Every change after it is in the log. So it
answers what that version answered, and what all later ones did. It needs no Spark: a version *is* a state, and is read
chunk by chunk.

- A table has one fold. Only the generation that the cut lies in can have lost its snapshot, and a usable fold of it
  lies at the cut, ahead of every base table that is usable. So there is nothing to take the place of.
- The commit carries the table's cut and its count of erasures as they were when the version was chosen. So Delta
  refuses it beside a cut or another erasure, and everything is looked at again. The sink's commits pass.
- A version that has lost a file answers nobody, and keeps nobody from erasing. Its states go, and ``erasing`` says so.
- A crash ahead of the commit leaves files without a name, which go like those of a failed snapshot. A crash after it
  leaves a log with one start more, and the next time there is nothing to do here.
- What the next erasure takes it takes from the fold, too, which stands in the log as a snapshot does. And the log's
  retention removes it when it cuts further.

Rejected: the old version written anew as a version of the base table. A version is a point of one line of commits, so
the table's newest would be an old state for a moment, for everybody who reads it without the manifest. A table of its
own for each such version: later erasures, the vacuum and every reader would have to look into it. All versions, and not
only the oldest: the changes in between are there.

Called by ``erasing``, ahead of ``log_tables.erased_rows``. pyarrow and deltalake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.folding import fold_fields, new_directory, write_rows
from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_fold import LogFold, fold_behind, fold_marks, fold_of
from xidstream.pipeline.changelog.manifest import Base, base_of, read_lines
from xidstream.pipeline.changelog.shortening import stretches_of
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import attempt_files, locations
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, StoredColumn, rows_of_keys
from xidstream.pipeline.log_tables.erased_marks import ERASURES
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.mirror.base_table import TEXT_FIELD
from xidstream.pipeline.mirror.erased_base import named_rows
from xidstream.pipeline.pg import Lsn

ATTEMPTS: Final = 20


@dataclass(frozen=True)
class _Start:
    """The version of the base table that the oldest states come from. ``snapshot_lsn``: of its generation's
    snapshot."""

    base: Base
    snapshot_lsn: int


@dataclass(frozen=True)
class _Written:
    """A fold's files, which no commit names yet. ``n_erasures``: of the table when they were written."""

    start: _Start
    files: tuple[WrittenFile, ...]
    n_erasures: int

    def fits(self, start: _Start, n_erasures: int) -> bool:
        mine, other = self.start.base, start.base
        return (mine.version, mine.lsn, self.n_erasures) == (other.version, other.lsn, n_erasures)


def keep_states(
    log: SlotLog,
    label: str,
    keys: ErasedKeys,
    stored_columns: Mapping[str, Sequence[StoredColumn]],
    check: Callable[[], None] = lambda: None,
) -> Lsn | None:
    """Fold what the oldest states of the table need, without the rows of ``keys``, if the erasure would take it.
    Returns the LSN from which on the fold answers; None where none was needed, or the version has lost files.
    ``stored_columns``: as ``erase_base`` takes it. ``check`` raises where this is to be given up.

    Raises StorageFault, SinkFailed, OSError and what pyarrow and deltalake raise; then nothing is committed, or all of
    it, and it may be called again."""
    location = log.log_table(label)[1].location
    written: _Written | None = None
    torn: set[int] = set()
    directory = new_directory()
    try:
        for _ in range(ATTEMPTS):
            writer = DeltaTableWriter.open(location, label)
            # After the table: a snapshot's line that is read is of rows that the table has.
            generations = log.generations().get(label, [])
            start = None if writer is None else _relied_on(log, label, writer, generations)
            if writer is None or start is None:
                return None
            if not named_rows(log.root, log.application_id, label, keys, stored_columns):
                return None
            lsn, n_erasures = start.base.lsn, writer.watermark(ERASURES)
            at = log.table_at(label, Lsn(lsn))
            if fold_behind(lsn) in {int(each.bounds.snapshot_lsn) for each in generations}:
                return None
            if written is None or not written.fits(start, n_erasures):
                attempt_files.remove(location, directory)
                directory = new_directory()
                try:
                    files = _write(at, start.base, keys, writer, directory, check)
                except FileNotFoundError:
                    if start.base.version in torn:
                        return None
                    torn.add(start.base.version)  # a vacuum may have been ahead: look again
                    continue
                written = _Written(start, files, n_erasures)
            at_lsn = fold_behind(lsn)
            n_rows = sum(file.n_rows for file in written.files)
            fold = LogFold(start.snapshot_lsn, at_lsn, n_rows, None if at_lsn == lsn else lsn)
            cut_id = locations.cut_id(log.application_id)
            marks = {cut_id: writer.watermark(cut_id), ERASURES: n_erasures}
            marks |= fold_marks(fold, writer.watermark, log.application_id)
            reach("keeping_states")
            try:
                writer.replace(written.files, [], marks)
            except SnapshotOutdated:
                continue
            reach("states_kept")
            return Lsn(lsn)
    finally:
        _discard(DeltaTableWriter.open(location, label), directory)
    raise StorageFault(
        f"Delta table {label} was changed by others during {ATTEMPTS} attempts to keep its states"
    )


def _relied_on(
    log: SlotLog, label: str, writer: DeltaTableWriter, generations: Sequence[TableGeneration]
) -> _Start | None:
    """The version that states of the table would go with; None where every state has another start, or the table's
    newest version alone, which the erasure replaces."""
    cut = writer.watermark(locations.cut_id(log.application_id))
    known_fold = fold_of(writer.watermark, log.application_id)
    lines = [line for line in read_lines(DeltaBases(log.root), log.application_id) if line.table == label]
    newest = max((line.lsn for line in lines), default=0)
    for stretch in stretches_of(generations, [], known_fold):
        others = [each.answers_from for each in stretch.starts if each.is_usable(cut)]
        first = min([newest, *others])
        for line in lines:
            if (
                line.snapshot_lsn != stretch.snapshot_lsn
                or not stretch.first <= line.lsn <= stretch.last
                or line.lsn < cut
            ):
                continue
            if line.lsn >= first:
                break
            base = base_of(DeltaBases(log.root), line)
            if base is not None:
                # A fold of another generation that is still needed stays.
                is_free = known_fold is None or known_fold.lsn < cut
                return _Start(base, stretch.snapshot_lsn) if is_free else None
    return None


def _write(
    at: TableAt,
    base: Base,
    keys: ErasedKeys,
    writer: DeltaTableWriter,
    directory: str,
    check: Callable[[], None],
) -> tuple[WrittenFile, ...]:
    gone = rows_of_keys(keys, writer.columns, writer.properties, writer.label)

    def kept(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.filter(pc.invert(gone.among(rows)))

    return write_rows(at, fold_behind(base.lsn), directory, writer.ranged, _pieces(at, base, check), kept)


def _pieces(at: TableAt, base: Base, check: Callable[[], None]) -> Iterator[pa.Table]:
    """The rows of the version, in the names of the log's table at that LSN and in their own types."""
    table = base.at.open()
    fields = [*fold_fields(at), TEXT_FIELD]
    for each in table.files():
        check()
        with base.at.location.open(each.path) as source, pq.ParquetFile(source) as file:
            there = {field.name: field for field in file.schema_arrow}
            schema = pa.schema([there.get(field.name, field) for field in fields])
            for rows in file.iter_batches():
                yield in_schema(pa.Table.from_batches([rows]), schema)


def _discard(writer: DeltaTableWriter | None, directory: str) -> None:
    """Remove what no commit names: one whose answer was lost may."""
    if writer is not None and not any(path.startswith(directory) for path in writer.paths()):
        with suppress(OSError):  # they go like those of a failed snapshot
            attempt_files.remove(writer.location, directory)
