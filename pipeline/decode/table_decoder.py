"""The rows of one relation version, found by ``scan``, as a record batch of the internal layout.

The column loop: step the cursor, decode by the column's codec, collect the exceptions. All columns share two
scratch arrays of 4 bytes a row, so the peak is the block, the finished columns, and one column's work.

A value that cannot be decoded becomes null, and a note says which transaction's row it is (``pipeline.poison``). Bad
rows are looked for only after a codec has refused the column, and piece by piece. A codec reports only the first bad
row. If all rows are bad, it would take hours to decode the whole column again for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode import arrays, binary, datetimes, numbers
from xidstream.pipeline.decode.bad_values import BadValue, BlockStory
from xidstream.pipeline.decode.columns import ColumnCursor, Values
from xidstream.pipeline.decode.sparse import Sparse
from xidstream.pipeline.errors import ColumnNameClash, PoisonedChange
from xidstream.pipeline.poison import BadRows
from xidstream.pipeline.schema import Codec, ColumnType, RelationVersion
from xidstream.pipeline.schema.rows import internal_schema

_SEARCHED_ROWS = 1024
"""In one piece, when bad rows are looked for."""


@dataclass(frozen=True)
class DecodedTable:
    """Rows of one relation version in ``rows.internal_schema(relation)``, in ordinal order."""

    relation: RelationVersion
    batch: pa.RecordBatch


@dataclass(frozen=True)
class RowIndex:
    """What ``scan`` says of rows: arrays of one length, in stream order (see there)."""

    change: npt.NDArray[np.int8]
    form: npt.NDArray[np.uint8]
    relation: npt.NDArray[np.int32]
    owner: npt.NDArray[np.uint32]
    ordinal: npt.NDArray[np.int64]
    cursor: npt.NDArray[np.int32]
    message: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, n: int) -> RowIndex:
        return cls(
            np.empty(n, np.int8),
            np.empty(n, np.uint8),
            np.empty(n, np.int32),
            np.empty(n, np.uint32),
            np.empty(n, np.int64),
            np.empty(n, np.int32),
            np.empty(n, np.int32),
        )

    def __len__(self) -> int:
        return len(self.change)

    def pick(self, rows: slice | npt.NDArray[np.int64]) -> RowIndex:
        """Some of the rows: views for a slice, copies for indexes."""
        return RowIndex(
            self.change[rows],
            self.form[rows],
            self.relation[rows],
            self.owner[rows],
            self.ordinal[rows],
            self.cursor[rows],
            self.message[rows],
        )


def decode_values(column: ColumnType, values: Values) -> pa.Array:
    """One column (or all elements of one) by its codec. May mark ``values``. Raises BadValue."""
    codec = column.codec
    if codec is Codec.TEXT:
        return values.strings()
    if codec is Codec.INTEGER:
        return numbers.integer(values, column.arrow)
    if codec is Codec.BOOL:
        return numbers.boolean(values)
    if codec is Codec.FLOAT:
        return binary.floating(values, column.arrow)
    if codec is Codec.DECIMAL:
        return numbers.decimal(values, column.arrow)
    if codec is Codec.TIMESTAMPTZ:
        return datetimes.timestamptz(values)
    if codec is Codec.TIMESTAMP:
        return datetimes.timestamp(values)
    if codec is Codec.DATE:
        return datetimes.date(values)
    if codec is Codec.BYTEA:
        return binary.bytea(values)
    element = column.element
    assert element is not None, codec  # of Codec.ARRAY, the last one
    return arrays.array(values, column.arrow, lambda elements: decode_values(element, elements))


def decode_table(
    payload: npt.NDArray[np.uint8],
    relation: RelationVersion,
    rows: RowIndex,
    story: BlockStory,
    notes: list[BadRows],
) -> DecodedTable | None:
    """Decode ``rows`` (all of ``relation``); None where the relation's own columns cannot be told apart.

    Takes ownership of the arrays of ``rows``. Rows that cannot be delivered are added to ``notes``; a value that
    cannot be decoded is null in what is returned.
    """
    if relation.clash is not None:
        what = f"table {relation.name}: {relation.clash}"
        notes.append(_note(relation, what, ColumnNameClash, rows, story, np.arange(len(rows))))
        return None
    cursor = ColumnCursor(payload, rows.cursor, rows.form)

    def note(what: str, bad_rows: npt.NDArray[np.int64]) -> None:
        notes.append(_note(relation, what, PoisonedChange, rows, story, bad_rows))

    columns, sparse = _decode_columns(relation, len(rows), cursor, note)
    internal = [
        pa.array(rows.change),
        pa.array(rows.owner),
        pa.array(rows.ordinal),
        sparse.unchanged(),
        sparse.text(),
    ]
    return DecodedTable(
        relation, pa.RecordBatch.from_arrays([*internal, *columns], schema=internal_schema(relation))
    )


def _decode_columns(
    relation: RelationVersion,
    n_rows: int,
    cursor: ColumnCursor,
    refuse: Callable[[str, npt.NDArray[np.int64]], None],
) -> tuple[list[pa.Array], Sparse]:
    """The table's columns and their exceptions.

    ``refuse`` gets what is wrong with a column, and the rows (ascending) that it is wrong with. They are null then.
    """
    sparse = Sparse(n_rows)
    columns = []
    for column in relation.columns:
        values, unchanged = cursor.next_column(column.is_key)
        decoded = None
        while decoded is None:
            try:
                decoded = decode_column(column.type, values)
            except BadValue as bad:
                bad_rows = _all_bad_rows(column.type, values, bad)
                refuse(f"{relation.name} column {column.name} has a value that is {bad.reason}", bad_rows)
                values = values.without(bad_rows)
        array, as_text, texts = decoded
        columns.append(array)
        if unchanged is not None:
            sparse.add_unchanged(column.name, unchanged)
        if texts is not None:
            sparse.add_text(column.name, as_text, texts)
    return columns, sparse


_ALWAYS_NATIVE = frozenset({Codec.TEXT, Codec.INTEGER, Codec.BOOL, Codec.FLOAT, Codec.BYTEA})
_NO_ROWS = np.empty(0, np.int64)


def decode_column(
    column: ColumnType, values: Values
) -> tuple[pa.Array, npt.NDArray[np.int64], pa.Array | None]:
    """The column, the rows that stay text, and their texts (None: there are none). Raises BadValue."""
    array = decode_values(column, values)
    if column.codec in _ALWAYS_NATIVE:
        return array, _NO_ROWS, None
    as_text = values.kept_as_text()
    if not len(as_text):
        return array, _NO_ROWS, None
    try:
        return array, as_text, values.only(as_text).strings()
    except BadValue as bad:
        raise BadValue(as_text[bad.rows], bad.reason) from None


def _all_bad_rows(column: ColumnType, values: Values, first: BadValue) -> npt.NDArray[np.int64]:
    """The rows of the column that its codec refuses, ascending; ``first`` is what it refused so far."""
    found = [first.rows]
    start = int(first.rows[-1]) + 1
    while start < len(values):
        end = min(start + _SEARCHED_ROWS, len(values))
        try:
            decode_column(column, values.only(slice(start, end)))
        except BadValue as bad:
            found.append(bad.rows + start)
            end = int(found[-1][-1]) + 1
        start = end
    return np.concatenate(found)


def _note(
    relation: RelationVersion,
    what: str,
    error: type[PoisonedChange] | type[ColumnNameClash],
    rows: RowIndex,
    story: BlockStory,
    bad: npt.NDArray[np.int64],
) -> BadRows:
    """Note the first row of each owner among the rows at ``bad`` (ascending)."""
    owners, first, n_rows = np.unique(rows.owner[bad], return_index=True, return_counts=True)
    lsns = story.lsns(rows.message[bad[first]])
    is_table = error is ColumnNameClash
    return BadRows(relation.relid, relation.name, what, error, owners, lsns, n_rows, is_table)
