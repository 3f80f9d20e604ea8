"""The rows of a small table, folded by this process: its snapshot and all changes after it, read from the log's files.

Most tables of a schema are small, and a job of Spark takes a second however small they are. Here a table of 100 rows
takes some milliseconds. ``folded`` states the rule of ``pipeline.changelog.fold`` for what is read whole:

- A TRUNCATE removes all before it.
- The last word on a key counts, in commit order. The snapshot's rows come before all changes.
- A value that the server did not send again is that of the key's row before. An insert that lacks one has null there.
- Of a table without a key every row stands, as long as rows are inserted alone.

It answers None for the rest, which Spark folds: keys that change in a tail that lacks values, keys that Arrow compares
in another way than PostgreSQL, keys with a null, changed rows without a key, a column whose values several columns of
the log hold, files that call a column otherwise than the table does. Tests hold the two against each other on random
logs (tests/unit/changelog/test_small_fold.py).

An example, with the key ``id``. The snapshot has (1, 'a', big) and (2, 'b', big). After it come the update (1, 'x',
not sent), the delete of 2 and the insert (2, 'c', null). Sorted by key the rows are::

    id  word    name  body      stands  body is that of row
    1   insert  a     big       no      1
    1   update  x     not sent  yes     1
    2   insert  b     big       no      3
    2   delete                  no      -
    2   insert  c     null      yes     5

Rejected: DuckDB or Polars, another engine with its own idea of equality and types, for a sort and a running maximum.

Plain pyarrow and numpy, no Spark, no loop over rows. Called by ``pipeline.mirror.refresh``, on several threads, and by
``log_fold``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.changelog.arrow_rows import CHANGE, TAKE_AWAY, TEXT, is_comparable
from xidstream.pipeline.changelog.log_table import LogFile
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema.rows import CHANGE_TYPES, INSERT, SNAPSHOT, TRUNCATE, UPDATE_PREIMAGE

SMALL_BYTES: Final = 8 << 20
"""The bytes of a table's files in the log, in Parquet, up to which it is small. Several are folded at a time."""
SMALL_ROWS: Final = 500_000
_LSN: Final = "_commit_lsn"
_SEQ: Final = "_seq"
_XID: Final = "_xid"
_UNCHANGED: Final = "_unchanged"
_INSERT: Final = CHANGE_TYPES[INSERT]
_Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SmallTable:
    """``rows``: of the table. ``n_bytes``: of the log's files that they were read from."""

    rows: pa.Table
    n_bytes: int


def small_table(log: TableAt, fields: Sequence[pa.Field], order: Sequence[str]) -> SmallTable | None:
    """The table at ``log.lsn`` in ``fields``, and ``_text`` where a row has one, by the columns ``order``. None where
    it is large, the log was cut after its snapshot, or for Spark. Raises OSError, what pyarrow raises, and
    PreconditionMissing where rows of the snapshot are gone."""
    if log.contained_upto < log.cut:
        return None  # the log was shortened: only a base table has what went
    before, behind = log.snapshot_files(), log.tail_files(log.contained_upto)
    files = [*before, *behind]
    n_bytes, n_rows = sum(file.n_bytes for file in files), sum(file.n_rows for file in files)
    if n_bytes > SMALL_BYTES or n_rows > SMALL_ROWS:
        return None
    if any(len(column.held_in) != 1 for column in log.shape.columns.values()):
        return None
    if log.log_table.column_lookups(files) is not None:
        return None
    read = [_read(log, file, fields) for file in {file.path: file for file in files}.values()]
    rows = folded(pa.concat_tables([_schema(fields).empty_table(), *read]), fields, log.shape.key)
    if rows is None:
        return None
    return SmallTable(rows.sort_by([(name, "ascending") for name in order]) if order else rows, n_bytes)


def folded(rows: pa.Table, fields: Sequence[pa.Field], key: Sequence[str] | None) -> pa.Table | None:
    """``rows``: in any order, ``fields`` and the contract's ``_text``, ``_change_type``, ``_commit_lsn``, ``_seq``,
    ``_unchanged``; those of the snapshot have the change type ``snapshot``. None: for Spark."""
    rows = _in_order(rows)
    word = rows[CHANGE].combine_chunks()
    unchanged = rows[_UNCHANGED].combine_chunks()
    lacks_values = unchanged.null_count < len(unchanged)
    names = [*(field.name for field in fields), TEXT]
    if key is None:
        is_plain = pc.all(pc.is_in(word, value_set=pa.array([SNAPSHOT, _INSERT]))).as_py() in (True, None)
        return _without_empty_text(rows.select(names)) if is_plain and not lacks_values else None
    if not is_comparable(key, {field.name: field.type for field in fields}):
        return None
    if any(rows[name].null_count for name in key):
        return None
    if lacks_values and (_has(word, CHANGE_TYPES[UPDATE_PREIMAGE]) or rows[TEXT].null_count < len(rows)):
        return None
    by_key, begins = _by_key(rows, key)
    is_last = np.append(begins[1:], True) if len(begins) else begins
    is_gone = pc.take(pc.is_in(word, value_set=pa.array(TAKE_AWAY)), pa.array(by_key))
    stands = is_last & ~is_gone.to_numpy(zero_copy_only=False)
    last = by_key[stands]
    found = {name: rows[name].take(pa.array(last)) for name in names}
    if lacks_values:
        starts = np.maximum.accumulate(np.where(begins, np.arange(len(by_key)), 0))
        for field in fields:
            known = _is_known(unchanged, word, field.name)[by_key]
            if not known.all():
                indexes = _last_known(known, starts)[stands]
                there = pa.array(np.where(indexes < 0, 0, by_key[indexes]), mask=indexes < 0)
                found[field.name] = rows[field.name].take(there)
    return _without_empty_text(pa.table(found, schema=rows.select(names).schema))


# -- inside --------------------------------------------------------------------------------------------


def _schema(fields: Sequence[pa.Field]) -> pa.Schema:
    return pa.schema(
        [
            *fields,
            pa.field(TEXT, pa.map_(pa.string(), pa.string())),
            pa.field(CHANGE, pa.string()),
            pa.field(_LSN, pa.int64()),
            pa.field(_SEQ, pa.int64()),
            pa.field(_XID, pa.int64()),
            pa.field(_UNCHANGED, pa.list_(pa.string())),
        ]
    )


def _read(log: TableAt, file: LogFile, fields: Sequence[pa.Field]) -> pa.Table:
    """The snapshot's rows in the file, and the changes that count. The names are the shape's."""
    shape: TableShape = log.shape
    held = {name: column.held_in[0] for name, column in shape.columns.items()}
    schema = _schema(fields)
    sources = {name: held.get(name, name) for name in schema.names}
    table = log.log_table.location
    with table.open(file.path, file.n_bytes or None) as source:
        parquet = pq.ParquetFile(source, pre_buffer=not table.is_local)
        there = set(parquet.schema_arrow.names)
        read = parquet.read([each for each in sources.values() if each in there])
    rows = pa.table({name: read[each] for name, each in sources.items() if each in there})
    # First what counts: others may be of an earlier column, whose values another type cannot hold.
    return in_schema(rows.filter(_counts(log, rows)), schema)


def _counts(log: TableAt, rows: pa.Table) -> pa.ChunkedArray:
    """Whether a row is one of the generation's own, or a change up to the LSN that the snapshot does not contain."""
    bounds = log.generation.bounds
    lsn, is_of_snapshot = rows[_LSN], pc.equal(rows[CHANGE], SNAPSHOT)
    own = pc.and_(is_of_snapshot, pc.equal(lsn, log.snapshot_lsn))
    change = pc.and_(pc.invert(is_of_snapshot), pc.less_equal(lsn, int(log.lsn)))
    change = pc.and_(change, pc.greater(lsn, log.contained_upto))
    if log.unseen_lsns:
        change = pc.and_(
            change, pc.invert(pc.is_in(lsn, value_set=pa.array([int(each) for each in log.unseen_lsns])))
        )
    near = rows.select([_LSN, _XID]).filter(pc.and_(change, pc.less_equal(lsn, int(bounds.valid_from))))
    # A commit LSN is one transaction's.
    commits = dict(zip(near[_LSN].to_pylist(), near[_XID].to_pylist(), strict=True))
    contained = [each for each, xid in commits.items() if bounds.contains(Xid(xid), Lsn(each))]
    if contained:
        change = pc.and_(change, pc.invert(pc.is_in(lsn, value_set=pa.array(contained, pa.int64()))))
    return pc.or_(own, change)


def _in_order(rows: pa.Table) -> pa.Table:
    """The snapshot's rows, and then the changes in commit order, from after the last TRUNCATE on."""
    is_change = pc.not_equal(rows[CHANGE], SNAPSHOT).to_numpy()
    order = np.lexsort((rows[_SEQ].to_numpy(), rows[_LSN].to_numpy(), is_change))
    is_truncate = pc.equal(rows[CHANGE], CHANGE_TYPES[TRUNCATE]).to_numpy()[order]
    behind = np.flatnonzero(is_truncate)[-1] + 1 if is_truncate.any() else 0
    return rows.take(pa.array(order[behind:])).combine_chunks()


def _has(word: pa.Array, kind: str) -> bool:
    return bool(pc.any(pc.equal(word, kind)).as_py())


def _by_key(rows: pa.Table, key: Sequence[str]) -> tuple[_Indexes, npt.NDArray[np.bool_]]:
    """The places of the rows by key, in commit order within one; and whether a key begins there."""
    numbered = rows.select(list(key)).append_column("#", pa.array(np.arange(rows.num_rows)))
    # The last column of the order makes the sort stable, whatever Arrow's is.
    order = pc.sort_indices(numbered, sort_keys=[*((name, "ascending") for name in key), ("#", "ascending")])
    is_same = np.ones(max(0, len(order) - 1), bool)
    for name in key:
        values = rows[name].take(order).combine_chunks()
        is_same &= pc.equal(values[:-1], values[1:]).to_numpy(zero_copy_only=False)
    begins = np.concatenate([np.ones(min(1, len(order)), bool), ~is_same])
    return order.to_numpy().astype(np.int64), begins


def _is_known(unchanged: pa.Array, word: pa.Array, name: str) -> npt.NDArray[np.bool_]:
    """By row: whether it has the column's value. An insert has it, null if it was not sent."""
    lacking = pc.filter(pc.list_parent_indices(unchanged), pc.equal(pc.list_flatten(unchanged), name))
    known = np.ones(len(word), bool)
    known[lacking.to_numpy()] = False
    known |= pc.equal(word, _INSERT).to_numpy(zero_copy_only=False)
    return known


def _last_known(known: npt.NDArray[np.bool_], starts: _Indexes) -> _Indexes:
    """By place in the order of keys: the last place of the same key, up to itself, that has the value; -1 for none."""
    last = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    return np.where(last < starts, -1, last)


def _without_empty_text(rows: pa.Table) -> pa.Table:
    texts: Any = rows[TEXT]
    return rows.drop_columns([TEXT]) if texts.null_count == len(texts) else rows
