"""Writes the rows of a fold (``log_fold``) to files of the log's table, which no commit names yet.

A small table is folded by this process (``small_fold``): 8 MiB of Parquet are some hundred megabytes in Arrow at most.
A larger one, and what ``small_fold`` leaves to Spark, is folded by executors, where there is a session, as the rows are
that a repair carries over (``carrying``). Where there is none, ``write_fold`` returns None, and the log stays as it is.

The rows have the table's columns that hold the table's values at that LSN, each the newest where several do. ``_seq``
counts them. They have no ``_xid``, as a snapshot's have none, and no ``_commit_timestamp``: no moment is theirs.

``write_rows`` takes the rows of a state as they come, and needs no more memory than a chunk of them does: an erasure
writes a base table's so (``pipeline.erasure.kept_states``).

Called by ``pipeline.sinks.log_shortening`` and ``pipeline.erasure``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Final

import numpy as np
import pyarrow as pa

from xidstream.pipeline.changelog.arrow_rows import TEXT
from xidstream.pipeline.changelog.carrying import write_state
from xidstream.pipeline.changelog.small_fold import small_table
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, SNAPSHOT
from xidstream.pipeline.spark.session import GetSession

FILES: Final = "snapshot-"
"""How their paths begin: as a snapshot's, which are not merged with others."""
_CHUNK_ROWS: Final = 16_384


def new_directory() -> str:
    return f"{FILES}{uuid.uuid4().hex}-fold"


def write_fold(
    at: TableAt, directory: str, ranged: Collection[str], get_session: GetSession | None = None
) -> tuple[WrittenFile, ...] | None:
    """The table's rows at ``at.lsn``, which is that of the fold, in new files below ``directory``. ``ranged``: the
    columns that the table has ranges of. ``get_session``: None where there is no Spark.

    None where this process cannot fold the table, and there is no Spark. Raises PreconditionMissing where the state is
    not known, StorageFault, OSError, what pyarrow and Spark raise."""
    small = small_table(at, fold_fields(at), ())
    if small is None:
        conform = _conform(at)
        return None if get_session is None else write_state(get_session, at, conform, directory)
    return write_rows(at, int(at.lsn), directory, ranged, [small.rows])


def fold_fields(at: TableAt) -> list[pa.Field]:
    """The table's columns at that LSN, with the types that the log's table has for them."""
    types = {column.name: column.type for column in at.log_table.columns}
    return [pa.field(name, types[column.held_in[0]]) for name, column in at.shape.columns.items()]


def write_rows(
    at: TableAt,
    lsn: int,
    directory: str,
    ranged: Collection[str],
    tables: Iterable[pa.Table],
    kept: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda rows: rows,
) -> tuple[WrittenFile, ...]:
    """The rows of ``tables``, which have the columns of ``fold_fields``, and ``_text`` where a row has one, as those of
    a fold at ``lsn``. ``kept``: gets them in the Delta columns, and returns those that are to be written. Raises
    OSError, SinkFailed and what pyarrow raises."""
    conform = _conform(at)
    files = ParquetFiles(at.log_table.location, directory, conform.schema, "_commit_lsn", ranged)
    n_before = 0
    for rows in tables:
        n_rows = rows.num_rows
        contract = {
            "_change_type": pa.repeat(SNAPSHOT, n_rows),
            "_commit_lsn": pa.repeat(pa.scalar(lsn, pa.int64()), n_rows),
            "_seq": pa.array(np.arange(n_before, n_before + n_rows)),
        }
        if TEXT in rows.column_names:
            contract[TEXT] = rows[TEXT]
        columns = [rows[name] for name in at.shape.columns]
        columns += [contract.get(field.name, pa.nulls(n_rows, field.type)) for field in CONTRACT_FIELDS]
        # Positions count, for a source may have a column that is called as one of Delta's.
        whole = pa.table(columns, names=[f"c{i}" for i in range(len(columns))])
        for chunk in whole.to_batches(max_chunksize=_CHUNK_ROWS):
            files.write(kept(conform(chunk)))
        n_before += n_rows
    return tuple(files.close())


def _conform(at: TableAt) -> Conform:
    held = [column.held_in[0] for column in at.shape.columns.values()]
    return Conform.of(at.log_table.columns, [*held, *(field.name for field in CONTRACT_FIELDS)])
