"""Writes the rows of a fold (``log_fold``) to files of the log's table, which no commit names yet.

A small table is folded by this process (``small_fold``): 8 MiB of Parquet are some hundred megabytes in Arrow at most.
A larger one, and what ``small_fold`` leaves to Spark, is folded by executors, where there is a session, as the rows are
that a repair carries over (``carrying``). Where there is none, ``write_fold`` returns None, and the log stays as it is.

The rows have the table's columns that hold the table's values at that LSN, each the newest where several do. ``_seq``
counts them. They have no ``_xid``, as a snapshot's have none, and no ``_commit_timestamp``: no moment is theirs.

Called by ``pipeline.sinks.log_shortening``.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
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
_PIECE_ROWS: Final = 16_384


def new_directory() -> str:
    return f"{FILES}{uuid.uuid4().hex}-fold"


def write_fold(
    at: TableAt, directory: str, ranged: Collection[str], get_session: GetSession | None = None
) -> tuple[WrittenFile, ...] | None:
    """The table's rows at ``at.lsn``, which is that of the fold, in new files below ``directory``. ``ranged``: the
    columns that the table has ranges of. ``get_session``: None where there is no Spark.

    None where this process cannot fold the table, and there is no Spark. Raises PreconditionMissing where the state is
    not known, StorageFault, OSError, what pyarrow and Spark raise."""
    by_name = {column.name: column for column in at.log_table.columns}
    held = {name: by_name[column.held_in[0]] for name, column in at.shape.columns.items()}
    names = [*(column.name for column in held.values()), *(field.name for field in CONTRACT_FIELDS)]
    conform = Conform.of(at.log_table.columns, names)
    small = small_table(at, [pa.field(name, column.field.type) for name, column in held.items()], ())
    if small is None:
        return None if get_session is None else write_state(get_session, at, conform, directory)
    rows, n_rows = small.rows, small.rows.num_rows
    contract = {
        "_change_type": pa.repeat(SNAPSHOT, n_rows),
        "_commit_lsn": pa.repeat(pa.scalar(int(at.lsn), pa.int64()), n_rows),
        "_seq": pa.array(np.arange(n_rows)),
    }
    if TEXT in rows.column_names:
        contract[TEXT] = rows[TEXT]
    columns = [rows[name] for name in held]
    columns += [contract.get(field.name, pa.nulls(n_rows, field.type)) for field in CONTRACT_FIELDS]
    files = ParquetFiles(at.log_table.location, directory, conform.schema, "_commit_lsn", ranged)
    # Positions count, for a source may have a column that is called as one of Delta's.
    whole = pa.table(columns, names=[f"c{i}" for i in range(len(columns))])
    for piece in whole.to_batches(max_chunksize=_PIECE_ROWS):
        files.write(conform(piece))
    return tuple(files.close())
