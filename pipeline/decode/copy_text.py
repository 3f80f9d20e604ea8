"""Rows of COPY's text format to columns: the values that the same rows have in the stream.

COPY's text is what the types' output functions give, as in pgoutput, with tabs between the values, ``\\N`` for null and
escapes. ``split`` finds the values in one pass and takes the escapes out **in place**, because what stays is never
longer. So the codecs read the block that libpq's rows were copied into, and a value of a gigabyte is not copied once
more. From there on the columns are decoded as those of the stream are (``decode_columns``).

``split`` writes place and length of every value, 8 bytes each, by column. ``scan`` keeps a cursor for each row instead,
for rows that are mostly null. Here each value takes a byte of the block at least, and a block is small. Rejected: to
write pgoutput's tuples first, which would copy each value and read it once more.

It takes exactly what COPY TO writes (``CopyAttributeOutText`` in ``src/backend/commands/copyto.c``): the escapes
``\\b \\f \\n \\r \\t \\v \\\\`` and no others. All else is malformed. As in ``scan``, a code and a place say what is
wrong, and no later kernel reads a place that ``split`` has not passed.

Called by ``stages.range_reading``.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from xidstream.pipeline.decode.codes import COLUMN_COUNT, MALFORMED
from xidstream.pipeline.decode.columns import Values
from xidstream.pipeline.decode.table_decoder import decode_columns
from xidstream.pipeline.errors import (
    ColumnNameClash,
    MalformedMessage,
    PoisonedChange,
    ProtocolViolation,
    UsageError,
)
from xidstream.pipeline.relations import RelationVersion

_WORD = ir.IntType(64)


@intrinsic
def _word_at(typing_context, address):
    """The eight bytes at an address, which need not be aligned."""

    def generate(context, builder, signature, arguments):
        loaded = builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(types.intp), generate


@intrinsic
def _zeros_below(typing_context, word):
    """How many bits of a word that is not 0 are 0 below its lowest 1."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_TABS = np.uint64(0x0909090909090909)
_NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)
_BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)


@njit
def _next_special(payload, p):
    """The first tab, newline or backslash at or behind p, which there must be. Eight bytes at a time: the lowest byte
    that ``(x - ones) & ~x & highs`` marks is the first that is 0 in x."""
    n = len(payload)
    while p + 8 <= n:
        word = _word_at(payload.ctypes.data + p)
        tabs, newlines, backslashes = word ^ _TABS, word ^ _NEWLINES, word ^ _BACKSLASHES
        marks = (
            ((tabs - _ONES) & ~tabs)
            | ((newlines - _ONES) & ~newlines)
            | ((backslashes - _ONES) & ~backslashes)
        ) & _HIGHS
        if marks != 0:
            return p + np.int64(_zeros_below(marks) >> np.uint64(3))
        p += 8
    while payload[p] != 9 and payload[p] != 10 and payload[p] != 92:
        p += 1
    return p


@njit
def _unescaped(byte):
    """The byte that a backslash and this byte stand for; 0, which no value has, where COPY does not write that."""
    if byte == 92:
        return np.uint8(92)
    if byte == 110:  # n
        return np.uint8(10)
    if byte == 116:  # t
        return np.uint8(9)
    if byte == 114:  # r
        return np.uint8(13)
    if byte == 98:  # b
        return np.uint8(8)
    if byte == 102:  # f
        return np.uint8(12)
    if byte == 118:  # v
        return np.uint8(11)
    return np.uint8(0)


@njit(
    types.int64(
        types.uint8[::1],
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
    begin = np.int64(0)
    for row in range(len(lengths)):
        error[0] = row
        end = begin + np.int64(lengths[row])
        if end <= begin or end > len(payload) or payload[end - 1] != 10:
            return MALFORMED
        stop = end - 1
        p = begin
        column = 0
        while column < n_columns:
            first = p
            size = np.int64(0)
            p = _next_special(payload, p)  # the row's own newline at the latest
            if p == stop or payload[p] == 9:
                size = p - first
            elif payload[p] == 10:
                return MALFORMED
            elif (
                p == first
                and p + 1 < stop
                and payload[p + 1] == 78
                and (p + 2 == stop or payload[p + 2] == 9)
            ):
                p += 2
                size = np.int64(-1)
            else:
                to = p
                while p < stop and payload[p] != 9:
                    byte = payload[p]
                    if byte == 10:
                        return MALFORMED
                    p += 1
                    if byte == 92:
                        if p == stop:
                            return MALFORMED
                        byte = _unescaped(payload[p])
                        if byte == 0:
                            return MALFORMED
                        p += 1
                    payload[to] = byte
                    to += 1
                size = to - first
            start[column, row] = first
            length[column, row] = size
            if size >= 0:
                sums[column, 0] += size
            else:
                sums[column, 1] += 1
            column += 1
            if p == stop:
                break
            p += 1  # the tab: one more value follows
            if column == n_columns:
                return COLUMN_COUNT
        if column != n_columns or (n_columns == 0 and p != stop):
            return COLUMN_COUNT
        begin = end
    if begin != len(payload):
        return MALFORMED
    return 0


@dataclass(frozen=True)
class CopiedColumns:
    """``columns``: the table's own, in wire order. ``text: map<string, string>[n_rows]``: as in the stream."""

    columns: list[pa.Array]
    text: pa.Array


def decode_copied(
    payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32], relation: RelationVersion, where: str
) -> CopiedColumns:
    """Decode a block of rows. ``payload: uint8[n]`` is writable, and is changed; ``lengths: int32[n_rows]`` are the
    rows' with their newlines. What is returned owns its memory. ``where`` says in errors what was read.

    Raises ColumnNameClash, PoisonedChange (a value that cannot be decoded; it names table and column), and
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
        raise MalformedMessage(f"{where}: row {int(error[0])} of a block is not in COPY's text format")
    column = iter(range(n_columns))

    def next_column(_: bool) -> tuple[Values, None]:
        i = next(column)
        n_bytes, n_missing = (int(each) for each in sums[i])
        return Values(payload, start[i, :n_rows], length[i, :n_rows], n_bytes, n_missing), None

    def refuse(what: str, _: npt.NDArray[np.int64]) -> None:
        raise PoisonedChange(f"{where}: {what}", remedy=_REMEDY_VALUE)

    columns, sparse = decode_columns(relation, n_rows, next_column, refuse)
    return CopiedColumns(columns, sparse.text())


_REMEDY_CLASH = "rename the column, or leave it out of the publication with a column list"
_REMEDY_VALUE = (
    "mend the row, or leave the column out of the publication, and take the table's snapshot again"
)
