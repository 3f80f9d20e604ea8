"""Numerics as ``numeric_send`` gives them, to decimals, or to the text of ``numeric_out``.

A value is four numbers of 16 bits and then its digits, which are of base 10,000 and 16 bits each: how many digits there
are; the weight of the first one (it stands for digit * 10,000 ** weight); the sign, or that this is NaN or an infinity;
and the scale, how many decimal digits are shown behind the point. Zeros at either end are left out.

Sources: ``numeric_send``, ``get_str_from_var`` and the comment on NumericVar in ``src/backend/utils/adt/numeric.c``.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import TEXT
from xidstream.pipeline.decode.columns import Values, check_offsets
from xidstream.pipeline.schema import Codec, ColumnType

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32 = types.int32[::1]
_TEXT_BYTES: Final = 16 << 20
_TEXT_FACTOR: Final = 8
"""Texts of one block that take more than both are not written here: more bytes, and so many times what was sent."""


@njit
def _two_bytes(payload, p):
    return (np.int64(payload[p]) << 8) | np.int64(payload[p + 1])


@njit
def _digits_of(number):
    """Decimal digits of a number below 10,000."""
    if number >= 100:
        return 4 if number >= 1000 else 3
    return 2 if number >= 10 else 1


@njit
def _power_of_ten(n):
    power = np.int64(1)
    for _ in range(n):
        power *= 10
    return power


@njit
def _scaled(payload, p, n_digits, weight, scale):
    """The digits after ``p`` as a number of units of 10 ** -scale: low and high half, and whether that is exact."""
    last = -(scale // 4)  # the weight of the last digit that counts whole
    rest = scale % 4
    l0 = l1 = l2 = l3 = np.int64(0)
    is_exact = True
    # From the first digit on, or from where the number begins with zeros, to the last place that the scale has.
    for place in range(weight, last - (2 if rest else 1), -1):
        j = weight - place
        digit = _two_bytes(payload, p + 2 * j) if j < n_digits else np.int64(0)
        factor = np.int64(10_000)
        if place < last:
            factor = _power_of_ten(rest)
            cut = 10_000 // factor
            is_exact = is_exact and digit % cut == 0
            digit //= cut
        l0 = l0 * factor + digit
        l1 = l1 * factor + (l0 >> 32)
        l2 = l2 * factor + (l1 >> 32)
        l3 = l3 * factor + (l2 >> 32)
        l0, l1, l2 = l0 & 0xFFFFFFFF, l1 & 0xFFFFFFFF, l2 & 0xFFFFFFFF
    n_counted = weight - last + (2 if rest else 1)
    for j in range(max(n_counted, 0), n_digits):
        is_exact = is_exact and _two_bytes(payload, p + 2 * j) == 0
    return (l1 << 32) | l0, (l3 << 32) | l2, is_exact


@njit(
    types.int64(_U8R, _I32, _I32, types.int64, types.int64, types.int64[::1], types.int64[::1]),
    cache=True,
    nogil=True,
)
def _numerics(payload, start, length, precision, scale, out, counts):
    """Read into out: int64[2 n], little endian two's complement halves. Values that do not fit are marked TEXT.

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
        if size < 8:
            return i
        n_digits = _two_bytes(payload, p)
        weight = np.int64(np.int16(_two_bytes(payload, p + 2)))
        sign = _two_bytes(payload, p + 4)
        if size != 8 + 2 * n_digits:
            return i
        p += 8
        for j in range(n_digits):
            if _two_bytes(payload, p + 2 * j) > 9_999:
                return i
        fits = sign == 0 or sign == 0x4000
        if not fits and sign != 0xC000 and sign != 0xD000 and sign != 0xF000:  # NaN and the infinities
            return i
        if fits and n_digits > 0:
            whole = 4 * weight + _digits_of(_two_bytes(payload, p)) if weight >= 0 else 0
            fits = whole <= precision - scale
            if fits:
                low, high, fits = _scaled(payload, p, n_digits, weight, scale)
                if sign != 0:
                    low = -low
                    high = ~high + (1 if low == 0 else 0)
                out[2 * i] = low
                out[2 * i + 1] = high
        if not fits:
            length[i] = TEXT - size
            misfits += 1
    counts[0] = misfits
    return -1


_SPECIALS: Final = np.frombuffer(b"NaNInfinity-Infinity", np.uint8)


@njit
def _special(sign):
    """Where the text of a numeric that is no number stands in _SPECIALS, and after it; nowhere for another sign."""
    if sign == 0xC000:
        return 0, 3
    if sign == 0xD000:
        return 3, 11
    if sign == 0xF000:
        return 11, 20
    return 0, 0


@njit
def _write_digits(number, skip, until, out, o):
    """Write some of a number's four decimal digits; returns the place behind them."""
    divisor = 1000
    for k in range(4):
        if skip <= k < until:
            out[o] = np.uint8(48 + number // divisor % 10)
            o += 1
        divisor //= 10
    return o


@njit
def _write_numeric(payload, p, n_digits, weight, scale, out, o):
    """Write a number without its sign, as ``get_str_from_var`` does; returns the place after it."""
    first = _two_bytes(payload, p) if n_digits > 0 else np.int64(0)
    if weight < 0 or first == 0:
        out[o] = 48
        o += 1
    else:
        o = _write_digits(first, 4 - _digits_of(first), 4, out, o)
        for j in range(1, weight + 1):
            digit = _two_bytes(payload, p + 2 * j) if j < n_digits else np.int64(0)
            o = _write_digits(digit, 0, 4, out, o)
    if scale > 0:
        out[o] = 46
        o += 1
        j = weight + 1  # of the first four decimal digits after the point
        for _ in range(0, scale, 4):
            digit = _two_bytes(payload, p + 2 * j) if 0 <= j < n_digits else np.int64(0)
            o = _write_digits(digit, 0, min(4, scale), out, o)
            scale -= 4
            j += 1
    return o


@njit(types.int64(_U8R, _I32, _I32, types.int64[::1]), cache=True, nogil=True)
def _measure_numerics(payload, start, length, sizes):
    """Fill ``sizes: int64[1]`` with how many bytes the texts take at most. Returns the first bad row, or -1."""
    total = np.int64(0)
    for i in range(len(start)):
        size = np.int64(length[i])
        if size < 0:
            continue
        p = np.int64(start[i])
        if size < 8 or size != 8 + 2 * _two_bytes(payload, p):
            return i
        for q in range(p + 8, p + size, 2):
            if _two_bytes(payload, q) > 9_999:
                return i
        sign = _two_bytes(payload, p + 4)
        begin, end = _special(sign)
        if end > 0:
            total += end - begin
        elif sign != 0 and sign != 0x4000:
            return i
        else:
            weight = np.int64(np.int16(_two_bytes(payload, p + 2)))
            total += 3 + 4 * (max(weight, 0) + 1) + _two_bytes(payload, p + 6)
    sizes[0] = total
    return -1


@njit(types.int64(_U8R, _I32, _I32, types.int32[::1], types.uint8[::1]), cache=True, nogil=True)
def _write_numerics(payload, start, length, offsets, out):
    """Write the texts of values that were measured, one after the other. Returns their bytes."""
    o = np.int64(0)
    offsets[0] = 0
    for i in range(len(start)):
        if length[i] >= 0:
            p = np.int64(start[i])
            sign = _two_bytes(payload, p + 4)
            begin, end = _special(sign)
            for k in range(begin, end):
                out[o] = _SPECIALS[k]
                o += 1
            if end == 0:
                if sign != 0:
                    out[o] = 45
                    o += 1
                weight = np.int64(np.int16(_two_bytes(payload, p + 2)))
                n_digits, scale = _two_bytes(payload, p), _two_bytes(payload, p + 6)
                o = _write_numeric(payload, p + 8, n_digits, weight, scale, out, o)
        offsets[i + 1] = o
    return o


def numeric(values: Values, column: ColumnType) -> pa.Array:
    """decimal128(p, s), or for a column without a precision the text of ``numeric_out``. Raises BadValue.

    NaN, infinities, and values that p and s cannot hold are marked TEXT; in a column of text they are text. All of such
    a column are marked where their texts are out of all proportion to what was sent.
    """
    if column.codec is not Codec.DECIMAL:
        return _numeric_text(values)
    out = np.empty(2 * len(values), np.int64)
    misfits = np.zeros(1, np.int64)
    arrow = column.arrow
    bad = _numerics(values.payload, values.start, values.length, arrow.precision, arrow.scale, out, misfits)
    if bad >= 0:
        raise BadValue(bad)
    values.n_missing += int(misfits[0])
    return values.fixed_width(arrow, out)


def _numeric_text(values: Values) -> pa.Array:
    n = len(values)
    sizes = np.zeros(1, np.int64)
    bad = _measure_numerics(values.payload, values.start, values.length, sizes)
    if bad >= 0:
        raise BadValue(bad)
    if sizes[0] > max(_TEXT_BYTES, _TEXT_FACTOR * values.n_bytes):
        # 1e40000 is sent in 10 bytes. As text the server's own bytes bound a block.
        there = np.flatnonzero(values.length >= 0)
        values.length[there] = TEXT - values.length[there]
        values.n_missing += len(there)
        return pa.nulls(n, pa.string())
    check_offsets(int(sizes[0]))
    offsets, out = np.empty(n + 1, np.int32), np.empty(int(sizes[0]), np.uint8)
    n_bytes = _write_numerics(values.payload, values.start, values.length, offsets, out)
    buffers = [values.validity(), pa.py_buffer(offsets), pa.py_buffer(out[:n_bytes])]
    return pa.Array.from_buffers(pa.string(), n, buffers, values.n_missing)
