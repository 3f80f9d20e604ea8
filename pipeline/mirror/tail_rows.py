"""The net rows of a short tail, read from the log's files by this process: the usual refresh needs no job of Spark.

One rule of the fold is stated here again: *the last word on a key counts*. It is all there is to a tail without a
TRUNCATE in which each row has all its values, and most tails are such. For any other ``net_of`` answers None, and Spark
folds it (``pipeline.changelog.fold``), with chains of keys and unchanged values. Tests hold the two against each other.
So it is None, too:

- for rows that the table's snapshot may contain, which is a base below its ``valid_from``;
- where a column has its values in several columns of the log, or files call it otherwise than the table does;
- for keys that Arrow compares in another way than PostgreSQL, or that have a null;
- for more rows than this process is to hold (``local_swap.NET_ROWS``). They are counted while they are read.

Row groups are read side by side, each on a thread, because this is half of what a refresh with many changes takes.

Plain pyarrow, no Spark. Called by ``pipeline.mirror.refresh``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.changelog.arrow_rows import CHANGE, TEXT, is_comparable
from xidstream.pipeline.changelog.log_table import LogFile
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.mirror import local_swap
from xidstream.pipeline.mirror.file_chunks import (
    THREADS,
    Files,
    SmallFilesWhole,
    footer_of,
    read_chunks,
    with_dictionaries,
)
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.schema.rows import CHANGE_TYPES, SNAPSHOT, TRUNCATE

_LSN: Final = "_commit_lsn"
_SEQ: Final = "_seq"
_UNCHANGED: Final = "_unchanged"


def net_of(
    log: TableAt,
    files: Sequence[LogFile],
    since: int,
    fields: Sequence[pa.Field],
    ranged: RangedKey,
    texts: Sequence[str] = (),
) -> NetRows | None:
    """The net of the log's changes after ``since`` up to ``log.lsn``, which are in ``files``. ``fields``: the table's
    columns; ``texts``, some of these, are held as indexes into a dictionary. None: for Spark. Raises OSError and what
    pyarrow raises."""
    shape, key = log.shape, log.shape.key or ()
    if since < log.generation.bounds.valid_from or not _is_plain(shape, fields):
        return None
    if log.log_table.column_lookups(files) is not None:
        return None
    stored = SmallFilesWhole(log.log_table.location, {file.path: file.n_bytes for file in files})
    reading = _Reading(stored, shape, since, log.lsn, texts)
    chunks = reading.chunks([file.path for file in files])
    if chunks is None:
        return None
    schema = pa.schema(
        [
            *with_dictionaries(pa.schema(list(fields)), texts),
            pa.field(TEXT, pa.map_(pa.string(), pa.string())),
            pa.field(CHANGE, pa.string()),
            pa.field(_LSN, pa.int64()),
            pa.field(_SEQ, pa.int64()),
        ]
    )
    tail = pa.concat_tables([schema.empty_table(), *(in_schema(rows, schema) for rows in chunks)])
    del chunks, stored, reading  # so that the rows are here twice for a moment only
    if any(tail[name].null_count for name in key):
        return None
    tail = _in_commit_order(tail.unify_dictionaries().combine_chunks())
    return NetRows(tail.drop_columns([_LSN, _SEQ]), key, ranged)


def _in_commit_order(tail: pa.Table) -> pa.Table:
    lsn, seq = (tail[name].to_numpy() for name in (_LSN, _SEQ))
    if np.all((lsn[1:] > lsn[:-1]) | ((lsn[1:] == lsn[:-1]) & (seq[1:] > seq[:-1]))):
        return tail
    return tail.take(pa.array(np.lexsort((seq, lsn))))


def _is_plain(shape: TableShape, fields: Sequence[pa.Field]) -> bool:
    types = {field.name: field.type for field in fields}
    is_held_once = all(len(column.held_in) == 1 for column in shape.columns.values())
    return is_held_once and is_comparable(shape.key or (), types)


@dataclass
class _Reading:
    """A reading of the log's files: row groups side by side, each on a thread. ``n_rows`` and ``n_bytes``: read so
    far."""

    table: Files
    shape: TableShape
    since: int
    upto: int
    texts: Sequence[str]
    n_rows: int = 0
    n_bytes: int = 0
    is_for_spark: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def chunks(self, paths: Sequence[str]) -> list[pa.Table] | None:
        """The changes, in the order of the files; None: for Spark."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="xidstream-mirror-read") as threads:
            n_groups = threads.map(lambda path: footer_of(self.table, path).num_row_groups, paths)
            parts = [(path, i) for path, n in zip(paths, n_groups, strict=True) for i in range(n)]
            found = list(threads.map(self._read, parts))
        return None if self.is_for_spark else [rows for some in found for rows in some]

    def _read(self, part: tuple[str, int]) -> list[pa.Table]:
        found: list[pa.Table] = []
        if self.is_for_spark:
            return found
        for rows in self._changes(*part):
            with self.lock:
                self.n_rows, self.n_bytes = self.n_rows + rows.num_rows, self.n_bytes + rows.nbytes
                is_too_much = self.n_rows > local_swap.NET_ROWS or self.n_bytes > local_swap.NET_BYTES
                self.is_for_spark = self.is_for_spark or is_too_much or not _is_simple(rows)
            if self.is_for_spark:
                return []
            found.append(rows)
        return found

    def _changes(self, path: str, row_group: int) -> Iterator[pa.Table]:
        """The rows that are changes between the two LSNs, chunk by chunk, in the shape's columns and some of the
        contract's."""
        held = {name: column.held_in[0] for name, column in self.shape.columns.items()}
        names = [*held, TEXT, CHANGE, _LSN, _SEQ, _UNCHANGED]
        indexes = [CHANGE, *(held[name] for name in self.texts)]
        columns = [held.get(name, name) for name in names]
        for rows in read_chunks(self.table, path, columns, indexes, row_group):
            there = set(rows.column_names)
            chosen = {name: rows[held.get(name, name)] for name in names if held.get(name, name) in there}
            lsn = rows[_LSN]
            within = pc.and_(pc.greater(lsn, int(self.since)), pc.less_equal(lsn, int(self.upto)))
            within = pc.and_(within, pc.not_equal(rows[CHANGE].cast(pa.string()), SNAPSHOT))
            found = pa.table(chosen)
            yield found if pc.all(within).as_py() else found.filter(within)


def _is_simple(rows: pa.Table) -> bool:
    """Whether the last word counts, and nothing else."""
    is_truncate = pc.any(pc.equal(rows[CHANGE].cast(pa.string()), CHANGE_TYPES[TRUNCATE])).as_py()
    return not is_truncate and rows[_UNCHANGED].null_count == rows.num_rows
