"""The rows of one relation version, found by ``scan``, as a record batch of the internal layout.

The column loop: step the cursor, decode by the column's codec, collect the exceptions. All columns share two
scratch arrays of 4 bytes a row, so the peak is the block, the finished columns, and one column's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode import arrays, binary, datetimes, numbers
from xidstream.pipeline.decode.bad_values import BadValue, BlockStory, poisoned
from xidstream.pipeline.decode.columns import Cursor, Values
from xidstream.pipeline.decode.sparse import Sparse
from xidstream.pipeline.relations import Codec, ColumnType, RelationVersion
from xidstream.pipeline.rows import internal_schema


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
    xids: npt.NDArray[np.int64] | int,
) -> DecodedTable:
    """Decode ``rows`` (all of ``relation``). ``xids`` is for errors: one, or one for each owner.

    Takes ownership of the arrays of ``rows``. Raises PoisonedChange.
    """
    n = len(rows)
    cursor = Cursor(payload, rows.cursor, rows.form)
    sparse = Sparse(n)
    columns = []
    for c, column in enumerate(relation.columns):
        values, unchanged = cursor.next_column(column.is_key)
        try:
            columns.append(decode_values(column.type, values))
            if unchanged is not None:
                sparse.add_unchanged(column.name, unchanged)
            if column.type.codec not in _ALWAYS_NATIVE:
                as_text = values.kept_as_text()
                if len(as_text):
                    sparse.add_text(column.name, as_text, _strings_of(values, as_text))
        except BadValue as bad:
            xid = xids if isinstance(xids, int) else int(xids[rows.owner[bad.row]])
            fault = poisoned(bad, story.lsn(int(rows.message[bad.row])), xid, relation, c)
            raise fault from None
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


_ALWAYS_NATIVE = frozenset({Codec.TEXT, Codec.INTEGER, Codec.BOOL, Codec.FLOAT, Codec.BYTEA})


def _strings_of(values: Values, rows: npt.NDArray[np.int64]) -> pa.Array:
    try:
        return values.only(rows).strings()
    except BadValue as bad:
        raise BadValue(int(rows[bad.row]), bad.reason) from None
