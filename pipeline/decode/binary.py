"""bytea in hex (``bytea_output=hex``, which the reader's session sets) to binary, and floats by Arrow's cast.

Hex is decoded from the payload into the output buffer, with no text in between. Floats are the only type whose text is
gathered and given to ``pyarrow.compute.cast``: a correctly rounded parser is more than a page of code, and Arrow's
(fast_float) takes 36 ns a value, gathering included.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit, types

from xidstream.pipeline.decode.bad_values import BadValue
from xidstream.pipeline.decode.columns import Values, check_offsets, first_failing

_FLOAT = r"^-?(\d+(\.\d+)?(e[+-]?\d+)?|Infinity|NaN)$"
"""The text that ``float8out`` prints."""

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32 = types.int32[::1]


_NIBBLES = np.array(
    [int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 255 for byte in range(256)], np.uint8
)
"""The value of a hexadecimal digit, 255 of any other byte. Branches would be guessed wrong half of the time."""


@njit(types.int64(_U8R, _I32, _I32, types.int32[::1], types.uint8[::1]), cache=True, nogil=True)
def _unhex(payload, start, length, offsets, out):
    """Decode the values one after the other into out. Returns the first bad row, or -1."""
    o = np.int64(0)
    offsets[0] = 0
    for i in range(len(start)):
        size = np.int64(length[i])
        if size >= 0:
            p = np.int64(start[i])
            if size < 2 or size % 2 != 0 or payload[p] != 92 or payload[p + 1] != 120:  # \x
                return i
            for q in range(p + 2, p + size, 2):
                high = _NIBBLES[payload[q]]
                low = _NIBBLES[payload[q + 1]]
                if high | low > 15:
                    return i
                out[o] = (high << 4) | low
                o += 1
        offsets[i + 1] = o
    return -1


def bytea(values: Values) -> pa.Array:
    """binary. Raises BadValue."""
    n = len(values)
    # Every value loses its two bytes of prefix. A value without the prefix is found bad before it is written.
    size = values.n_bytes // 2
    check_offsets(size)
    offsets = np.empty(n + 1, np.int32)
    out = np.empty(size, np.uint8)
    bad = _unhex(values.payload, values.start, values.length, offsets, out)
    if bad >= 0:
        raise BadValue(bad)
    buffers = [values.validity(), pa.py_buffer(offsets), pa.py_buffer(out[: offsets[n]])]
    return pa.Array.from_buffers(pa.binary(), n, buffers, values.n_missing)


def floating(values: Values, arrow: pa.DataType) -> pa.Array:
    """float32 or float64, NaN and infinities included. Raises BadValue."""
    text = values.ascii_or_invalid()

    def casts(part: pa.Array) -> bool:
        try:
            pc.cast(part, arrow)
        except pa.ArrowInvalid:
            return False
        return True

    try:
        return pc.cast(text, arrow)
    except pa.ArrowInvalid:
        pass  # Arrow's message quotes the value
    # All at once where that is possible: an error of the cast takes half a millisecond.
    bad = np.flatnonzero(pc.invert(pc.match_substring_regex(text, _FLOAT)).fill_null(False).to_numpy(False))
    raise BadValue(bad if len(bad) else first_failing(text, casts))
