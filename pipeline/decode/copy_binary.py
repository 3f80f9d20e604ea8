"""Rows of COPY's binary format to columns: the values that the same rows have in the stream.

Most types are read from what their send function gives (``sent_values``), which is less work for the server and for
this process than text. All others come as the text of their output function, in a column of text (``text_columns`` says
which; ``postgres.range_copy`` asks for them so), and are decoded as those of the stream are.

A native type cannot hold some values of PostgreSQL's, and they are delivered as text (``sparse``). What a binary value
is as text only the server knows. So such a block is not decoded: ``ValuesDoNotFit`` names the columns, and whoever
reads has the range again with these as text. Rejected: to print such values here, which would be a second copy of the
server's output functions for the rarest of values.

``split`` finds the values in one pass, and copies none. It writes place and length of every value, 8 bytes each, by
column. Each row is a number of columns in 16 bits, and for each a length in 32 bits, -1 for null, with its bytes
(``CopyOneRowTo`` in ``src/backend/commands/copyto.c``). All else is malformed. As in ``scan``, a code and a place say
what is wrong, and no later kernel reads a place that ``split`` has not passed.

Rejected: COPY's text format, where each byte of a value is looked at for escapes, by the server and here. With it,
1,000,000 rows of pgbench_accounts took 0.28 s of the server's CPU time and 0.32 of a reader's; this takes 0.26 and
0.27 (``docs/performance.md``).

Called by ``initial_copy.range_reading``.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import COLUMN_COUNT, MALFORMED
from xidstream.pipeline.decode.columns import Values
from xidstream.pipeline.decode.sent_values import DECODERS
from xidstream.pipeline.decode.sparse import Sparse
from xidstream.pipeline.decode.table_decoder import decode_column
from xidstream.pipeline.errors import (
    ColumnNameClash,
    MalformedMessage,
    PoisonedChange,
    ProtocolViolation,
    UsageError,
)
from xidstream.pipeline.schema import RelationVersion


class ValuesDoNotFit(Exception):
    """Columns of a block have values that their native types cannot hold; ``columns`` are their indexes."""

    def __init__(self, columns: frozenset[int]) -> None:
        super().__init__(columns)
        self.columns = columns


def text_columns(relation: RelationVersion) -> frozenset[int]:
    """The indexes of the columns that have no binary form here, and are to be sent as text."""
    return frozenset(i for i, column in enumerate(relation.columns) if column.type_oid not in DECODERS)


@njit
def _four_bytes(payload, p):
    return np.int32(
        (np.uint32(payload[p]) << np.uint32(24))
        | (np.uint32(payload[p + 1]) << np.uint32(16))
        | (np.uint32(payload[p + 2]) << np.uint32(8))
        | np.uint32(payload[p + 3])
    )


@njit(
    types.int64(
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int32, 1, "C", readonly=True),
        types.int64,
        types.int32[:, ::1],
        types.int32[:, ::1],
        types.int64[:, ::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
)
def split(payload, lengths, n_columns, start, length, sums, error):
    """Fill ``start`` and ``length`` (``int32[n_columns, >= n_rows]``) and ``sums: int64[n_columns, 2]``: the bytes of a
    column's values, and how many are null. Returns 0, or a code with the row in ``error[0]``."""
    sums[:] = 0
    p = np.int64(0)
    for row in range(len(lengths)):
        error[0] = row
        end = p + np.int64(lengths[row])
        if end < p + 2 or end > len(payload):
            return MALFORMED
        if (np.int64(payload[p]) << 8) | np.int64(payload[p + 1]) != n_columns:
            return COLUMN_COUNT
        p += 2
        for column in range(n_columns):
            if p + 4 > end:
                return MALFORMED
            size = np.int64(_four_bytes(payload, p))
            p += 4
            start[column, row] = p
            length[column, row] = size
            if size >= 0:
                p += size
                sums[column, 0] += size
                if p > end:
                    return MALFORMED
            elif size == -1:
                start[column, row] = 0
                sums[column, 1] += 1
            else:
                return MALFORMED
        if p != end:
            return MALFORMED
    if p != len(payload):
        return MALFORMED
    return 0


@dataclass(frozen=True)
class CopiedColumns:
    """``columns``: the table's own, in wire order. ``text: map<string, string>[n_rows]``: as in the stream."""

    columns: list[pa.Array]
    text: pa.Array


def decode_copied(
    payload: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int32],
    relation: RelationVersion,
    as_text: frozenset[int],
    where: str,
) -> CopiedColumns:
    """Decode a block of rows. ``payload: uint8[n]`` is borrowed; ``lengths: int32[n_rows]`` are the rows'.

    ``as_text``: the columns that came as text, ``text_columns`` at least. ``where`` says in errors what was read. What
    is returned owns its memory.

    Raises NotHeld, ColumnNameClash, PoisonedChange (a value that cannot be decoded; it names table and column), and
    ProtocolViolation or MalformedMessage for what COPY does not write.
    """
    if relation.clash is not None:
        raise ColumnNameClash(f"table {relation.name}: {relation.clash}", remedy=_REMEDY_CLASH)
    if len(payload) >= 1 << 31:
        raise UsageError(f"a block of {len(payload)} bytes: its places must fit in 31 bits")
    n_rows, n_columns = len(lengths), len(relation.columns)
    # A stride of a power of two would put the places of one row into the same lines of the cache.
    stride = n_rows | 63
    start, length = np.empty((2, n_columns, stride), np.int32)
    sums = np.empty((n_columns, 2), np.int64)
    error = np.zeros(1, np.int64)
    code = split(payload, lengths, n_columns, start, length, sums, error)
    if code == COLUMN_COUNT:
        raise ProtocolViolation(f"{where}: a row does not have the {n_columns} columns of {relation.name}")
    if code < 0:
        raise MalformedMessage(f"{where}: row {int(error[0])} of a block is not in COPY's binary format")
    columns: list[pa.Array] = []
    sparse = Sparse(n_rows)
    not_fitting = set()
    for i, column in enumerate(relation.columns):
        n_bytes, n_missing = (int(each) for each in sums[i])
        values = Values(payload, start[i, :n_rows], length[i, :n_rows], n_bytes, n_missing)
        try:
            if i in as_text:
                array, rows, texts = decode_column(column.type, values)
                if texts is not None:
                    sparse.add_text(column.name, rows, texts)
            else:
                array = DECODERS[column.type_oid](values, column.type)
                if values.n_missing != n_missing:
                    not_fitting.add(i)
        except BadValue as bad:
            what = f"{where}: {relation.name} column {column.name} has a value that is {bad.reason}"
            raise PoisonedChange(what, remedy=_REMEDY_VALUE) from None
        columns.append(array)
    if not_fitting:
        raise ValuesDoNotFit(frozenset(not_fitting))
    return CopiedColumns(columns, sparse.text())


_REMEDY_CLASH = "rename the column, or leave it out of the publication with a column list"
_REMEDY_VALUE = (
    "correct the row, or leave the column out of the publication, and take the table's snapshot again"
)
