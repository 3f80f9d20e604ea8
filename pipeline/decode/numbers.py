"""Booleans, integers and decimals: text parsed in place, without gathering it first.

The kernels accept what PostgreSQL's output functions print (``int8out``, ``numeric_out``, ``boolout``): an optional
minus and digits, and for numerics one point. A valid numeric that its precision cannot hold (NaN, the infinities, more
digits than the modifier admits) stays text. Anything else is a BadValue.

``pyarrow.compute.cast`` was measured and rejected. It needs the gathered strings first (int4 takes 29 ns a value and
not 18, numeric(12,2) 42 and not 18), and it accepts forms that the server never sends.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import TEXT
from xidstream.pipeline.decode.columns import Values

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32 = types.int32[::1]


@njit(types.int64(_U8R, _I32, _I32, types.uint8[::1]), cache=True, nogil=True)
def _booleans(payload, start, length, out):
    """Write t as 1 and f as 0 (0 for a missing value). Returns the first bad row, or -1."""
    for i in range(len(start)):
        out[i] = 0
        if length[i] >= 0:
            byte = payload[start[i]] if length[i] == 1 else np.uint8(0)
            if byte == 116:
                out[i] = 1
            elif byte != 102:
                return i
    return -1


@njit(types.int64(_U8R, _I32, _I32, types.uint64, types.int64[::1]), cache=True, nogil=True)
def _integers(payload, start, length, limit, out):
    """Parse into out (0 for a missing value); limit is the type's greatest value. Returns the first bad row, or -1."""
    for i in range(len(start)):
        size = np.int64(length[i])
        if size < 0:
            out[i] = 0
            continue
        p = np.int64(start[i])
        end = p + size
        negative = False
        if size > 0 and payload[p] == 45:
            negative = True
            p += 1
        if p == end or end - p > 19:  # 19 digits fit in 64 bits unsigned
            return i
        value = np.uint64(0)
        while p < end:
            digit = np.uint8(payload[p] - np.uint8(48))
            if digit > 9:
                return i
            value = value * np.uint64(10) + np.uint64(digit)
            p += 1
        if value > (limit + np.uint64(1) if negative else limit):
            return i
        out[i] = -np.int64(value) if negative else np.int64(value)
    return -1


_LIMB = 0xFFFFFFFF


@njit
def _is_special(payload, p, left):
    """Whether NaN or Infinity begins at p and takes the ``left`` bytes that the value has."""
    if left == 3:
        return payload[p] == 78 and payload[p + 1] == 97 and payload[p + 2] == 78
    return (
        left == 8
        and payload[p] == 73
        and payload[p + 1] == 110
        and payload[p + 2] == 102
        and payload[p + 3] == 105
        and payload[p + 4] == 110
        and payload[p + 5] == 105
        and payload[p + 6] == 116
        and payload[p + 7] == 121
    )


@njit
def _append(low, l0, l1, l2, l3, digits, digit):
    """The limbs of a long number with one more digit, its ``digits``-th significant one.

    The first 18 digits are in ``low``. From then on the number is in four limbs of 32 bits, each in an int64. Digits
    past the 39th are only counted, because no decimal128 holds them.
    """
    if digits == 19:
        l0, l1 = low & _LIMB, low >> 32
    if digits <= 39:
        l0 = l0 * 10 + digit
        l1 = l1 * 10 + (l0 >> 32)
        l2 = l2 * 10 + (l1 >> 32)
        l3 = l3 * 10 + (l2 >> 32)
    return l0 & _LIMB, l1 & _LIMB, l2 & _LIMB, l3


@njit(
    types.int64(_U8R, _I32, _I32, types.int64, types.int64, types.int64[::1], types.int64[::1]),
    cache=True,
    nogil=True,
)
def _decimals(payload, start, length, precision, scale, out, counts):
    """Parse into out: int64[2 n], little endian two's complement halves. Values that do not fit are marked TEXT.

    counts[0] receives the number of those. Returns the first bad row, or -1.
    """
    misfits = 0
    for i in range(len(start)):
        out[2 * i] = 0
        out[2 * i + 1] = 0
        size = np.int64(length[i])
        if size < 0:
            continue
        p = np.int64(start[i])
        end = p + size
        negative = size > 0 and payload[p] == 45
        if negative:
            p += 1
        if _is_special(payload, p, end - p):
            length[i] = TEXT - size
            misfits += 1
            continue
        low = l0 = l1 = l2 = l3 = np.int64(0)
        digits = 0  # significant ones
        any_digit = False
        fraction = np.int64(-1)  # digits after the point; -1 before it
        while p < end:
            byte = payload[p]
            p += 1
            if byte == 46:
                if fraction >= 0:
                    return i
                fraction = 0
                continue
            digit = np.int64(byte) - 48
            if digit < 0 or digit > 9:
                return i
            any_digit = True
            if fraction >= 0:
                fraction += 1
            if digits > 0 or digit > 0:
                digits += 1
                if digits <= 18:
                    low = low * 10 + digit
                else:
                    l0, l1, l2, l3 = _append(low, l0, l1, l2, l3, digits, digit)
        if not any_digit:
            return i
        missing = scale - max(fraction, 0)
        if missing < 0 or (digits > 0 and digits + missing > precision):
            length[i] = TEXT - size
            misfits += 1
            continue
        if digits > 0:
            for _ in range(missing):
                digits += 1
                if digits <= 18:
                    low = low * 10
                else:
                    l0, l1, l2, l3 = _append(low, l0, l1, l2, l3, digits, 0)
        high = np.int64(0)
        if digits > 18:
            low = (l1 << 32) | l0
            high = (l3 << 32) | l2
        if negative:
            low = -low
            high = ~high + (1 if low == 0 else 0)
        out[2 * i] = low
        out[2 * i + 1] = high
    counts[0] = misfits
    return -1


def boolean(values: Values) -> pa.Array:
    """bool. Raises BadValue."""
    out = np.empty(len(values), np.uint8)
    bad = _booleans(values.payload, values.start, values.length, out)
    if bad >= 0:
        raise BadValue(bad)
    return values.fixed_width(pa.bool_(), np.packbits(out, bitorder="little"))


def integer(values: Values, arrow: pa.DataType) -> pa.Array:
    """int16, int32 or int64. Raises BadValue, also beyond the type's range."""
    dtype = np.dtype(arrow.to_pandas_dtype())
    out = np.empty(len(values), np.int64)
    bad = _integers(values.payload, values.start, values.length, np.uint64(np.iinfo(dtype).max), out)
    if bad >= 0:
        raise BadValue(bad)
    return values.fixed_width(arrow, out.astype(dtype, copy=False))


def decimal(values: Values, arrow: pa.Decimal128Type) -> pa.Array:
    """decimal128(p, s); marks NaN, infinities and values that p and s cannot hold as TEXT. Raises BadValue."""
    out = np.empty(2 * len(values), np.int64)
    misfits = np.zeros(1, np.int64)
    bad = _decimals(values.payload, values.start, values.length, arrow.precision, arrow.scale, out, misfits)
    if bad >= 0:
        raise BadValue(bad)
    values.n_missing += int(misfits[0])
    return values.fixed_width(arrow, out)
