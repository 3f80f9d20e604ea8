"""One-dimensional arrays: PostgreSQL's text ``{1,NULL,"a \\"b\\""}`` to Arrow lists, in three steps.

1. ``_measure`` checks each array's syntax and counts its elements and their unescaped bytes. It marks arrays of more
   dimensions or with explicit lower bounds as TEXT, because a list cannot hold them.
2. ``_split`` writes the unescaped elements one after the other, and where each of them is. ``columns._step`` gives
   the same for a column.
3. The element type's own codec decodes the elements as if they were a column. (The caller passes it as
   ``decode_elements``, so that this module does not know the codecs.) If an element is marked TEXT, its whole array
   becomes text, and steps 2 and 3 are done again without such arrays. These are rare, and the alternative, removing
   elements from finished Arrow arrays, would need a codec of its own.

The syntax is that of ``array_out`` in ``src/backend/utils/adt/arrayfuncs.c``. The delimiter of every native element
type is a comma. An element is quoted if it is empty, is the word NULL, or holds a brace, comma, quote, backslash or
space.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import TEXT
from xidstream.pipeline.decode.columns import Values, check_offsets

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32 = types.int32[::1]

_BAD = -1
_MISFIT = -2


@njit
def _is_null(payload, p, end):
    """Whether an unquoted element is the word NULL (PostgreSQL reads it in any case)."""
    return (
        end - p == 4
        and payload[p] | 32 == 110
        and payload[p + 1] | 32 == 117
        and payload[p + 2] | 32 == 108
        and payload[p + 3] | 32 == 108
    )


@njit
def _elements(payload, p, end, write, out, o, starts, lengths, e):
    """Walk one array. With ``write``, put its elements into out from o on, and their positions and lengths from e on.

    Returns (count or a code, the position in out after the elements).
    """
    if end - p < 2:
        return _BAD, o
    if payload[p] == 91:  # [ of lower bounds
        return _MISFIT, o
    if payload[p] != 123:  # {
        return _BAD, o
    p += 1
    if payload[p] == 125:  # {}
        return (0 if p + 1 == end else _BAD), o
    count = 0
    first = o
    while True:
        begin = o
        null = False
        if p >= end:
            return _BAD, first
        if payload[p] == 123:
            return _MISFIT, first
        if payload[p] == 34:  # a quoted element
            p += 1
            while True:
                if p >= end:
                    return _BAD, first
                byte = payload[p]
                p += 1
                if byte == 34:
                    break
                if byte == 92:
                    if p >= end:
                        return _BAD, first
                    byte = payload[p]
                    p += 1
                if write:
                    out[o] = byte
                o += 1
        else:
            begin_at = p
            while p < end and payload[p] != 44 and payload[p] != 125:
                if payload[p] == 34 or payload[p] == 123 or payload[p] == 92:
                    return _BAD, first
                p += 1
            if p == begin_at:
                return _BAD, first
            null = _is_null(payload, begin_at, p)
            if not null:
                if write:
                    for q in range(begin_at, p):
                        out[o + q - begin_at] = payload[q]
                o += p - begin_at
        if write:
            starts[e + count] = begin
            lengths[e + count] = -1 if null else o - begin
        count += 1
        if p >= end:
            return _BAD, first
        if payload[p] == 125:
            return (count if p + 1 == end else _BAD), o
        if payload[p] != 44:
            return _BAD, first
        p += 1


@njit(types.int64(_U8R, _I32, _I32, types.int64[::1]), cache=True, nogil=True)
def _measure(payload, start, length, counts):
    """Fill counts with the number of elements, their bytes, and the arrays newly marked TEXT. Returns the first bad
    row, or -1."""
    none8 = np.empty(0, np.uint8)
    none32 = np.empty(0, np.int32)
    elements = np.int64(0)
    total = np.int64(0)
    misfits = np.int64(0)
    for i in range(len(start)):
        size = np.int64(length[i])
        if size < 0:
            continue
        p = np.int64(start[i])
        count, total = _elements(payload, p, p + size, False, none8, total, none32, none32, 0)
        if count == _MISFIT:
            length[i] = TEXT - size
            misfits += 1
        elif count < 0:
            return i
        else:
            elements += count
    counts[0] = elements
    counts[1] = total
    counts[2] = misfits
    return -1


@njit(types.void(_U8R, _I32, _I32, types.uint8[::1], _I32, _I32, _I32), cache=True, nogil=True)
def _split(payload, start, length, out, offsets, starts, lengths):
    """Write the elements of all arrays that have a value; ``offsets: int32[n + 1]`` counts elements."""
    o = np.int64(0)
    e = np.int64(0)
    offsets[0] = 0
    for i in range(len(start)):
        size = np.int64(length[i])
        if size >= 0:
            p = np.int64(start[i])
            count, o = _elements(payload, p, p + size, True, out, o, starts, lengths, e)
            e += count
        offsets[i + 1] = e


def array(values: Values, arrow: pa.ListType, decode_elements: Callable[[Values], pa.Array]) -> pa.Array:
    """list<element>; marks arrays that a list of that element cannot hold as TEXT.

    ``decode_elements`` decodes a Values of the elements, and marks misfits in it. Raises BadValue (with the array's
    row).
    """
    counts = np.empty(3, np.int64)
    while True:
        bad = _measure(values.payload, values.start, values.length, counts)
        if bad >= 0:
            raise BadValue(bad)
        values.n_missing += int(counts[2])
        offsets, elements = _elements_of(values, int(counts[0]), int(counts[1]))
        try:
            items = decode_elements(elements)
        except BadValue as error:
            raise BadValue(np.unique(_rows_of(offsets, error.rows)), error.reason) from None
        misfits = elements.kept_as_text()
        if len(misfits) == 0:
            break
        rows = np.unique(_rows_of(offsets, misfits))
        values.length[rows] = TEXT - values.length[rows]
        values.n_missing += len(rows)
    buffers = [values.validity(), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(arrow, len(values), buffers, values.n_missing, children=[items])


def _elements_of(values: Values, n_elements: int, n_bytes: int) -> tuple[npt.NDArray[np.int32], Values]:
    check_offsets(max(n_elements, n_bytes))
    out = np.empty(n_bytes, np.uint8)
    offsets = np.empty(len(values) + 1, np.int32)
    starts = np.empty(n_elements, np.int32)
    lengths = np.empty(n_elements, np.int32)
    _split(values.payload, values.start, values.length, out, offsets, starts, lengths)
    n_null = n_elements - int(np.count_nonzero(lengths >= 0))
    return offsets, Values(out, starts, lengths, n_bytes, n_null)


def _rows_of(offsets: npt.NDArray[np.int32], elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.searchsorted(offsets, elements, side="right") - 1
