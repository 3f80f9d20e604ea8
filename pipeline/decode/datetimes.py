"""Dates and timestamps: PostgreSQL's ISO text (``datestyle=ISO``) to days or microseconds since 1970.

The years 1 to 9999 become native values; that is the range that Spark, Python and Parquet readers share. The
infinities, BC and later years stay text, and so does a timestamptz whose offset moves it out of that range. (The
session's time zone is UTC, so the offset is ``+00``; ``+HH[:MM[:SS]]`` is read all the same.)

``pyarrow.compute.cast`` takes as long (42 ns a value, here 44), but it does not read ``+00``, and it does not tell BC
from an error.

The calendar is proleptic Gregorian, as in ``date2j`` in ``src/backend/utils/adt/datetime.c``. The text is that of
``EncodeDateTime`` there.
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

_BAD = -(1 << 62)
_MISFIT = _BAD + 1
FIRST_DAY = -719_162  # 0001-01-01
LAST_DAY = 2_932_896  # 9999-12-31
DAY_US = 86_400_000_000


@njit
def _two(payload, p):
    """Two digits as a number, or a large negative one."""
    a = np.int64(payload[p]) - 48
    b = np.int64(payload[p + 1]) - 48
    if a < 0 or a > 9 or b < 0 or b > 9:
        return np.int64(-1000)
    return a * 10 + b


@njit
def _is_infinity(payload, p, end):
    if payload[p] == 45:
        p += 1
    return (
        end - p == 8
        and payload[p] == 105
        and payload[p + 1] == 110
        and payload[p + 2] == 102
        and payload[p + 3] == 105
        and payload[p + 4] == 110
        and payload[p + 5] == 105
        and payload[p + 6] == 116
        and payload[p + 7] == 121
    )


@njit
def _last_of_month(year, month):
    if month == 4 or month == 6 or month == 9 or month == 11:
        return 30
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 31


@njit
def _days(year, month, day):
    """Days since 1970, by the "days from civil" algorithm: years begin in March, in eras of 400 years."""
    y = year - 1 if month <= 2 else year
    era = y // 400
    of_era = y - era * 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@njit
def _one(payload, p, end, has_time, has_zone):
    """One value as days (or microseconds) since 1970, or _MISFIT, or _BAD."""
    if end - p < 8:
        return _BAD
    if _is_infinity(payload, p, end):
        return _MISFIT
    bc = end - p > 3 and payload[end - 3] == 32 and payload[end - 2] == 66 and payload[end - 1] == 67
    if bc:
        end -= 3
    first = p
    year = np.int64(0)
    while p < end and p - first < 7:
        digit = np.int64(payload[p]) - 48
        if digit < 0 or digit > 9:
            break
        year = year * 10 + digit
        p += 1
    if p - first < 4 or year == 0 or end - p < 6 or payload[p] != 45 or payload[p + 3] != 45:
        return _BAD
    month = _two(payload, p + 1)
    day = _two(payload, p + 4)
    p += 6
    if month < 1 or month > 12 or day < 1 or day > _last_of_month(1 - year if bc else year, month):
        return _BAD
    micros = np.int64(0)
    if has_time:
        if end - p < 9 or payload[p] != 32 or payload[p + 3] != 58 or payload[p + 6] != 58:
            return _BAD
        hours = _two(payload, p + 1)
        minutes = _two(payload, p + 4)
        seconds = _two(payload, p + 7)
        if hours < 0 or hours > 23 or minutes < 0 or minutes > 59 or seconds < 0 or seconds > 59:
            return _BAD
        p += 9
        micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
        if p < end and payload[p] == 46:
            p += 1
            unit = 100_000
            while p < end and unit > 0:
                digit = np.int64(payload[p]) - 48
                if digit < 0 or digit > 9:
                    break
                micros += digit * unit
                unit //= 10
                p += 1
            if unit == 100_000:
                return _BAD
        if has_zone:
            if end - p < 3 or (payload[p] != 43 and payload[p] != 45):
                return _BAD
            east = payload[p] == 43
            offset = _two(payload, p + 1) * 3600
            p += 3
            if end - p >= 3 and payload[p] == 58:
                offset += _two(payload, p + 1) * 60
                p += 3
                if end - p >= 3 and payload[p] == 58:
                    offset += _two(payload, p + 1)
                    p += 3
            if offset < 0:
                return _BAD
            micros += (-offset if east else offset) * 1_000_000
    if p != end:
        return _BAD
    if bc or year > 9999:
        return _MISFIT
    days = _days(year, month, day)
    if not has_time:
        return days
    result = days * DAY_US + micros
    if result < FIRST_DAY * DAY_US or result >= (LAST_DAY + 1) * DAY_US:
        return _MISFIT
    return result


@njit(
    types.int64(_U8R, _I32, _I32, types.boolean, types.boolean, types.int64[::1], types.int64[::1]),
    cache=True,
    nogil=True,
)
def _datetimes(payload, start, length, has_time, has_zone, out, counts):
    """Parse into out (0 for a missing value). Marks values that do not fit as TEXT, and counts them. Returns the first
    bad row, or -1."""
    misfits = 0
    for i in range(len(start)):
        out[i] = 0
        size = np.int64(length[i])
        if size < 0:
            continue
        p = np.int64(start[i])
        value = _one(payload, p, p + size, has_time, has_zone)
        if value > _MISFIT:
            out[i] = value
        elif value == _MISFIT:
            length[i] = TEXT - size
            misfits += 1
        else:
            return i
    counts[0] = misfits
    return -1


def _parse(values: Values, arrow: pa.DataType, *, has_time: bool, has_zone: bool) -> pa.Array:
    out = np.empty(len(values), np.int64)
    misfits = np.zeros(1, np.int64)
    bad = _datetimes(values.payload, values.start, values.length, has_time, has_zone, out, misfits)
    if bad >= 0:
        raise BadValue(bad)
    values.n_missing += int(misfits[0])
    return values.fixed_width(arrow, out if has_time else out.astype(np.int32))


def date(values: Values) -> pa.Array:
    """date32; marks values that it cannot hold as TEXT. Raises BadValue."""
    return _parse(values, pa.date32(), has_time=False, has_zone=False)


def timestamp(values: Values) -> pa.Array:
    """timestamp[us] without zone; marks values that it cannot hold as TEXT. Raises BadValue."""
    return _parse(values, pa.timestamp("us"), has_time=True, has_zone=False)


def timestamptz(values: Values) -> pa.Array:
    """timestamp[us, UTC]; marks values that it cannot hold as TEXT. Raises BadValue."""
    return _parse(values, pa.timestamp("us", tz="UTC"), has_time=True, has_zone=True)
