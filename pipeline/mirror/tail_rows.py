"""The net rows of a short tail, read from the log's files by this process: the usual refresh needs no job of Spark.

One rule of the fold is stated here again: *the last word on a key counts*. It is all there is to a tail without a
TRUNCATE in which each row has all its values, and most tails are such. For any other ``net_of`` answers None, and Spark
folds it (``pipeline.state.fold``), with chains of keys and unchanged values. Tests hold the two against each other. So
it is None, too:

- for rows that the table's snapshot may contain, which is a base below its ``valid_from``;
- where a column has its values in several Delta columns;
- for keys that Arrow compares in another way than PostgreSQL, or that have a null;
- for more rows than this process is to hold (``local_swap.NET_ROWS``). They are counted while they are read.

Plain pyarrow, no Spark. Called by ``pipeline.mirror.refresh``. For logs in folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.mirror import local_swap
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.net_rows import CHANGE, TEXT, NetRows, in_schema, is_comparable
from xidstream.pipeline.rows import CHANGE_TYPES, SNAPSHOT, TRUNCATE
from xidstream.pipeline.state.log_table import LogFile
from xidstream.pipeline.state.shape import TableShape
from xidstream.pipeline.state.table_at import TableAt

_LSN: Final = "_commit_lsn"
_SEQ: Final = "_seq"
_UNCHANGED: Final = "_unchanged"


def net_of(
    log: TableAt, files: Sequence[LogFile], since: int, fields: Sequence[pa.Field], ranged: RangedKey
) -> NetRows | None:
    """The net of the log's changes behind ``since`` up to ``log.lsn``, which are in ``files``. ``fields``: the table's
    columns; None: for Spark. Raises OSError and what pyarrow raises."""
    shape, key = log.shape, log.shape.key or ()
    if since < log.generation.bounds.valid_from or not _is_plain(shape, fields):
        return None
    pieces: list[pa.Table] = []
    n_rows = n_bytes = 0
    for file in files:
        for rows in _changes(f"{log.log_table.location.uri}/{file.path}", shape, since, log.lsn):
            if not _is_simple(rows):
                return None
            pieces.append(rows)
            n_rows, n_bytes = n_rows + rows.num_rows, n_bytes + rows.nbytes
            if n_rows > local_swap.NET_ROWS or n_bytes > local_swap.NET_BYTES:
                return None
    schema = pa.schema(
        [
            *fields,
            pa.field(TEXT, pa.map_(pa.string(), pa.string())),
            pa.field(CHANGE, pa.string()),
            pa.field(_LSN, pa.int64()),
            pa.field(_SEQ, pa.int64()),
        ]
    )
    tail = pa.concat_tables([schema.empty_table(), *(in_schema(rows, schema) for rows in pieces)])
    del pieces  # so that the rows are here twice for a moment only
    if any(tail[name].null_count for name in key):
        return None
    tail = _in_commit_order(tail.combine_chunks())
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


def _changes(path: str, shape: TableShape, since: int, upto: int) -> Iterator[pa.Table]:
    """The rows of a log's file that are changes between the two LSNs, piece by piece, in the shape's columns and some
    of the contract's."""
    held = {name: column.held_in[0] for name, column in shape.columns.items()}
    names = [*held, TEXT, CHANGE, _LSN, _SEQ, _UNCHANGED]
    for rows in local_swap.read_pieces(path, [held.get(name, name) for name in names]):
        there = set(rows.column_names)
        chosen = {name: rows[held.get(name, name)] for name in names if held.get(name, name) in there}
        lsn = rows[_LSN]
        within = pc.and_(pc.greater(lsn, int(since)), pc.less_equal(lsn, int(upto)))
        within = pc.and_(within, pc.not_equal(rows[CHANGE], SNAPSHOT))
        found = pa.table(chosen)
        yield found if pc.all(within).as_py() else found.filter(within)


def _is_simple(rows: pa.Table) -> bool:
    """Whether the last word counts, and nothing else."""
    is_truncate = pc.any(pc.equal(rows[CHANGE], CHANGE_TYPES[TRUNCATE])).as_py()
    return not is_truncate and rows[_UNCHANGED].null_count == rows.num_rows
