"""From rows to one column: where its values are, and copying them out.

``step`` advances every row's cursor over one value and applies the rules of PostgreSQL's replica identity
(protocol facts 17 and 18), so that the codecs see nothing but places: ``start`` and ``length`` per row. It is
called once for each column in wire order and needs no bounds checks, because ``scan`` has passed the same
bytes.

``length`` also says why there is no value. One int32 array that every codec reads and may
mark was preferred over separate flag arrays, which each column would have to allocate and scan::

    >= 0           a value of that many bytes (0 is the empty string)
    NULL (-1)      SQL NULL, or absent from a key-only tuple
    UNCHANGED (-2) unchanged TOAST that no old tuple fills
    <= TEXT (-4)   a value of TEXT - length bytes that the native type cannot hold
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import NEW_AFTER_OLD, NO_TUPLE, NULL, OLD_FULL, OLD_KEY, TEXT, UNCHANGED
from xidstream.pipeline.errors import Unsupported

_BYTE = ir.IntType(8)
_U8R = types.Array(types.uint8, 1, "C", readonly=True)


@njit(
    types.int64(
        _U8R,
        types.int32[::1],
        types.uint8[::1],
        types.boolean,
        types.int32[::1],
        types.int32[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
)
def _step(payload, cursor, form, is_key, start, length, counts):
    """Fill start and length for the next column; counts = missing, unchanged. Returns the values' bytes."""
    missing = 0
    unchanged = 0
    total = np.int64(0)
    for i in range(len(cursor)):
        shape = form[i]
        size = np.int64(NULL)
        offset = np.int64(0)
        if shape != NO_TUPLE:
            p = np.int64(cursor[i])
            kind = payload[p]
            if kind == 116:  # t
                size = (
                    (np.int64(payload[p + 1]) << 24)
                    | (np.int64(payload[p + 2]) << 16)
                    | (np.int64(payload[p + 3]) << 8)
                    | np.int64(payload[p + 4])
                )
                offset = p + 5
                cursor[i] = offset + size
            else:
                cursor[i] = p + 1
                if kind == 117:  # u
                    size = UNCHANGED
            if shape == OLD_KEY and not is_key:
                size = NULL
            elif shape == NEW_AFTER_OLD and size == UNCHANGED and (is_key or form[i - 1] == OLD_FULL):
                size = length[i - 1]
                offset = start[i - 1]
        start[i] = offset
        length[i] = size
        if size >= 0:
            total += size
        else:
            missing += 1
            if size == UNCHANGED:
                unchanged += 1
    counts[0] = missing
    counts[1] = unchanged
    return total


@intrinsic
def _copy(typing_context, target, source, n_bytes):
    """memcpy. From 16 bytes on it is faster than a loop, which LLVM does not turn into one: the arrays may overlap."""

    def generate(context, builder, signature, arguments):
        to, of = (builder.inttoptr(each, _BYTE.as_pointer()) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@njit(
    types.uint8(_U8R, types.int32[::1], types.int32[::1], types.int32[::1], types.uint8[::1]),
    cache=True,
    nogil=True,
)
def _gather(payload, start, length, offsets, out):
    """Copy the values one after the other; returns the OR of all their bytes (below 128: all ASCII)."""
    o = np.int64(0)
    offsets[0] = 0
    for i in range(len(start)):
        size = np.int64(length[i])
        if size > 0:
            p = np.int64(start[i])
            if size < 16:
                for j in range(size):
                    out[o + j] = payload[p + j]
            else:
                _copy(out.ctypes.data + o, payload.ctypes.data + p, size)
            o += size
        offsets[i + 1] = o
    seen = np.uint8(0)
    for j in range(o):
        seen |= out[j]
    return seen


@njit(types.int64(_U8R, types.int32[::1], types.int32[::1], types.int64[::1]), cache=True, nogil=True)
def _not_utf8(payload, start, length, found):
    """Write the rows whose value is not valid UTF-8 into ``found: int64[n]``; returns their number.

    The ranges of the second byte are those of RFC 3629, section 4.
    """
    n_found = 0
    for i in range(len(start)):
        p = np.int64(start[i])
        end = p + max(np.int64(length[i]), 0)
        valid = True
        while p < end and valid:
            byte = payload[p]
            p += 1
            if byte < 128:
                continue
            low = 128
            high = 191
            if 194 <= byte <= 223:
                more = 1
            elif 224 <= byte <= 239:
                more = 2
                if byte == 224:
                    low = 160
                elif byte == 237:
                    high = 159
            elif 240 <= byte <= 244:
                more = 3
                if byte == 240:
                    low = 144
                elif byte == 244:
                    high = 143
            else:
                valid = False
                more = 0
            if p + more > end:
                valid = False
                more = 0
            for _ in range(more):
                if payload[p] < low or payload[p] > high:
                    valid = False
                low = 128
                high = 191
                p += 1
        if not valid:
            found[n_found] = i
            n_found += 1
    return n_found


@dataclass
class Values:
    """The text values of one column: ``payload[start[i] : start[i] + length[i]]`` for each row.

    ``payload: uint8[]`` is borrowed and may be read-only; ``start: int32[n]`` and ``length: int32[n]`` (see
    the module) are scratch that codecs may mark; ``n_bytes`` is the sum of the lengths that are >= 0.
    """

    payload: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    n_bytes: int
    n_missing: int

    def __len__(self) -> int:
        return len(self.start)

    def validity(self) -> pa.Buffer | None:
        """The Arrow bitmap of rows that have a value; None when all have. Reads ``n_missing``."""
        if self.n_missing == 0:
            return None
        return pa.py_buffer(np.packbits(self.length >= 0, bitorder="little"))

    def fixed_width(self, arrow: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
        """Wrap ``values`` (owned, of the type's own layout) as an Arrow array without a copy."""
        buffers = [self.validity(), pa.py_buffer(values)]
        return pa.Array.from_buffers(arrow, len(self), buffers, self.n_missing)

    def strings(self) -> pa.Array:
        """A string array of copied values. Raises BadValue with all that are not UTF-8."""
        array, seen = self._gathered(pa.string())
        if seen >= 128 and not _is_utf8(array):
            found = np.empty(len(self), np.int64)
            n_found = _not_utf8(self.payload, self.start, self.length, found)
            raise BadValue(found[:n_found], "not valid UTF-8")
        return array

    def labels(self) -> pa.Array:
        """A string array of copied values; each byte that is not valid UTF-8 becomes ``\\xNN``."""
        try:
            return self.strings()
        except BadValue:
            # Of a SQL_ASCII database, so seldom that it may be done value by value.
            values = self.binaries().to_pylist()
            return pa.array(
                [v if v is None else v.decode("utf-8", "backslashreplace") for v in values], pa.string()
            )

    def ascii_or_invalid(self) -> pa.Array:
        """A string array for a cast that itself refuses what is not ASCII; values are not checked."""
        return self._gathered(pa.string())[0]

    def binaries(self) -> pa.Array:
        """A binary array of copied values."""
        return self._gathered(pa.binary())[0]

    def _gathered(self, arrow: pa.DataType) -> tuple[pa.Array, int]:
        check_offsets(self.n_bytes)
        offsets = np.empty(len(self) + 1, np.int32)
        out = np.empty(self.n_bytes, np.uint8)
        seen = _gather(self.payload, self.start, self.length, offsets, out)
        buffers = [self.validity(), pa.py_buffer(offsets), pa.py_buffer(out)]
        return pa.Array.from_buffers(arrow, len(self), buffers, self.n_missing), int(seen)

    def without(self, rows: npt.NDArray[np.int64]) -> Values:
        """All rows, these as if they had no value; marks of ``TEXT`` are taken off."""
        values = self.only(slice(None))
        values.length[rows] = NULL
        return values.only(slice(None))

    def only(self, rows: npt.NDArray[np.int64] | slice) -> Values:
        """The values of some rows; marks of ``TEXT`` are taken off, so these are the texts themselves."""
        length = self.length[rows]
        length = np.where(length <= TEXT, TEXT - length, length).astype(np.int32)
        present = length[length >= 0]
        return Values(
            self.payload,
            self.start[rows],
            length,
            int(present.sum(dtype=np.int64)),
            len(length) - len(present),
        )

    def kept_as_text(self) -> npt.NDArray[np.int64]:
        """Indexes of the rows whose value a codec has marked ``TEXT``."""
        return np.flatnonzero(self.length <= TEXT)


def check_offsets(n_bytes: int) -> None:
    """Raise Unsupported where a column of one block would need offsets of more than 31 bits."""
    if n_bytes >= 1 << 31:
        raise Unsupported(
            f"one block holds {n_bytes} bytes of one column, above Arrow's 2 GiB for a string array"
        )


def _is_utf8(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def first_failing(array: pa.Array, passes: Any) -> int:
    """The index of the first value for which ``passes(slice)`` is false, in about 2 * log2(index) calls.

    Only ever run on the way to an exception.
    """
    low, high = 0, 1
    while high < len(array) and passes(array.slice(low, high - low)):
        low, high = high, 2 * high
    high = min(high, len(array))
    while high - low > 1:
        middle = (low + high) // 2
        if passes(array.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


class ColumnCursor:
    """The rows of one relation, read column by column in wire order.

    ``position: int32[n]`` is owned and advanced; ``form: uint8[n]`` as ``scan`` wrote it. ``next_column``
    gives the same two scratch arrays each time: the ``Values`` of a column end with the next call.
    """

    def __init__(
        self,
        payload: npt.NDArray[np.uint8],
        position: npt.NDArray[np.int32],
        form: npt.NDArray[np.uint8],
    ) -> None:
        self._payload = payload
        self._position = position
        self._form = form
        self._start = np.empty(len(position), np.int32)
        self._length = np.empty(len(position), np.int32)
        self._counts = np.empty(2, np.int64)

    def next_column(self, is_key: bool) -> tuple[Values, npt.NDArray[np.int64] | None]:
        """The next column's values and the indexes of its unchanged rows (None: none)."""
        n_bytes = _step(
            self._payload, self._position, self._form, is_key, self._start, self._length, self._counts
        )
        unchanged = np.flatnonzero(self._length == UNCHANGED) if self._counts[1] else None
        return Values(self._payload, self._start, self._length, n_bytes, int(self._counts[0])), unchanged
