"""What the types' send functions give: numbers, times and texts in binary, as a snapshot's COPY has them.

Numbers are big-endian. A date counts days and a timestamp microseconds, both from 2000-01-01. ``sent_numerics`` has the
numerics. The rules of what a native type holds are those of the text codecs (``numbers``, ``datetimes``): infinities,
BC and years after 9999 are not held. Such a value is marked ``TEXT``, as there, but what it is as text is not here:
``copy_binary`` has the column read again as text.

``DECODERS`` has the types with a form of their own here. Their oids are the same on every server. A domain, an enum or
an array has none, and comes as text.

Sources: ``int4send``, ``timestamptz_send``, ``uuid_send`` and so on, in ``src/backend/utils/adt``.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.codes import TEXT
from xidstream.pipeline.decode.columns import Values, check_offsets
from xidstream.pipeline.decode.datetimes import DAY_US, FIRST_DAY, LAST_DAY
from xidstream.pipeline.decode.sent_numerics import numeric
from xidstream.pipeline.schema import ColumnType

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32 = types.int32[::1]
_EPOCH_DAY: Final = 10_957
"""2000-01-01, in days since 1970."""
_UUID_BYTES: Final = 16
_UUID_CHARACTERS: Final = 36
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


def _integers_of(n_bytes, kind):
    """A kernel for values of so many bytes; ``kind`` is the type of what it writes."""

    @njit(types.int64(_U8R, _I32, _I32, kind[::1]), cache=True, nogil=True)
    def integers(payload, start, length, out):
        """Read into out (0 for a missing value). Returns the first bad row, or -1."""
        for i in range(len(start)):
            out[i] = 0
            if length[i] >= 0:
                if length[i] != n_bytes:
                    return i
                p = np.int64(start[i])
                value = np.uint64(0)
                for k in range(n_bytes):
                    value = (value << np.uint64(8)) | np.uint64(payload[p + k])
                out[i] = kind(value)
        return -1

    return integers


_INTEGERS: Final[dict[str, Callable[..., int]]] = {
    "uint8": _integers_of(1, types.uint8),
    "int16": _integers_of(2, types.int16),
    "int32": _integers_of(4, types.int32),
    "uint32": _integers_of(4, types.uint32),
    "int64": _integers_of(8, types.int64),
}


@njit(types.int64(_U8R, _I32, _I32, types.int32[::1], types.uint8[::1]), cache=True, nogil=True)
def _uuids(payload, start, length, offsets, out):
    """Write the 36 characters of each value one after the other. Returns the first bad row, or -1."""
    o = np.int64(0)
    offsets[0] = 0
    for i in range(len(start)):
        if length[i] >= 0:
            if length[i] != _UUID_BYTES:
                return i
            p = np.int64(start[i])
            for k in range(_UUID_BYTES):
                if k == 4 or k == 6 or k == 8 or k == 10:
                    out[o] = 45
                    o += 1
                byte = payload[p + k]
                out[o] = _HEX[byte >> 4]
                out[o + 1] = _HEX[byte & 15]
                o += 2
        offsets[i + 1] = o
    return -1


def _read(values: Values, kind: str) -> npt.NDArray[Any]:
    out = np.empty(len(values), kind)
    bad = _INTEGERS[kind](values.payload, values.start, values.length, out)
    if bad >= 0:
        raise BadValue(bad)
    return out


def _integer(values: Values, column: ColumnType) -> pa.Array:
    return values.fixed_width(column.arrow, _read(values, str(column.arrow)))


def _oid(values: Values, column: ColumnType) -> pa.Array:
    return values.fixed_width(column.arrow, _read(values, "uint32").astype(np.int64))


def _boolean(values: Values, column: ColumnType) -> pa.Array:
    read = _read(values, "uint8")
    bad = np.flatnonzero(read > 1)
    if len(bad):
        raise BadValue(bad)
    return values.fixed_width(column.arrow, np.packbits(read, bitorder="little"))


def _floating(values: Values, column: ColumnType) -> pa.Array:
    is_double = column.arrow == pa.float64()
    read = _read(values, "int64" if is_double else "int32").view("float64" if is_double else "float32")
    read[np.isnan(read)] = np.nan  # there are many, and text has one
    return values.fixed_width(column.arrow, read)


def _within(values: Values, read: npt.NDArray[Any], first: int, last: int) -> None:
    """Mark what is not between the two as TEXT."""
    outside = np.flatnonzero((read < first) | (read > last))
    values.length[outside] = TEXT - values.length[outside]
    values.n_missing += len(outside)


def _date(values: Values, column: ColumnType) -> pa.Array:
    read = _read(values, "int32")
    _within(values, read, FIRST_DAY - _EPOCH_DAY, LAST_DAY - _EPOCH_DAY)
    return values.fixed_width(column.arrow, read + np.int32(_EPOCH_DAY))


def _timestamp(values: Values, column: ColumnType) -> pa.Array:
    read = _read(values, "int64")
    _within(values, read, (FIRST_DAY - _EPOCH_DAY) * DAY_US, (LAST_DAY - _EPOCH_DAY + 1) * DAY_US - 1)
    return values.fixed_width(column.arrow, read + np.int64(_EPOCH_DAY * DAY_US))


def _uuid(values: Values, _: ColumnType) -> pa.Array:
    n = len(values)
    size = (n - values.n_missing) * _UUID_CHARACTERS
    check_offsets(size)
    offsets, out = np.empty(n + 1, np.int32), np.empty(size, np.uint8)
    bad = _uuids(values.payload, values.start, values.length, offsets, out)
    if bad >= 0:
        raise BadValue(bad)
    buffers = [values.validity(), pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.string(), n, buffers, values.n_missing)


def _text(values: Values, _: ColumnType) -> pa.Array:
    return values.strings()


def _jsonb(values: Values, _: ColumnType) -> pa.Array:
    """A byte says the version, 1. The text follows."""
    is_there = values.length >= 0
    version = values.payload[np.where(values.length > 0, values.start, 0)]
    bad = np.flatnonzero(is_there & ((values.length == 0) | (version != 1)))
    if len(bad):
        raise BadValue(bad)
    n_there = len(values) - values.n_missing
    text = Values(
        values.payload,
        values.start + 1,
        values.length - is_there.astype(np.int32),
        values.n_bytes - n_there,
        values.n_missing,
    )
    return text.strings()


def _bytea(values: Values, _: ColumnType) -> pa.Array:
    return values.binaries()


DECODERS: Final[dict[int, Callable[[Values, ColumnType], pa.Array]]] = {
    16: _boolean,
    17: _bytea,
    19: _text,  # name
    20: _integer,
    21: _integer,
    23: _integer,
    25: _text,
    26: _oid,
    114: _text,  # json
    700: _floating,
    701: _floating,
    1042: _text,  # bpchar, with its padding
    1043: _text,  # varchar
    1082: _date,
    1114: _timestamp,
    1184: _timestamp,
    1700: numeric,
    2950: _uuid,
    3802: _jsonb,
}
"""By the column's type oid. Each gets the sent values and may mark them; it raises BadValue."""
