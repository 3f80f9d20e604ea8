"""Arrays that were gathered in before, to be gathered in again.

A page of memory that is touched for the first time costs two microseconds here, as much as 4 kB of rows cost the reader
otherwise. A block's bytes are copied when they are handed over, so its array may serve again. Large arrays get huge
pages, and hardly matter; but many open transactions have small ones: with 32 of them the reader took 87,000 page
faults for 2,000,000 rows.

Invariants: an array is with one owner, or here; what is kept stays under ``limit_bytes``, the oldest goes first; one
that is far larger than what is asked for is not given out, because it may be touched to its end, and would then
take more memory than its rows.

``take`` and ``give`` may be called by two threads, one each.

Rejected: one array for all, cut into pieces, which is an allocator of our own; huge pages for small arrays, of which
a hundred open transactions would take a hundred times 2 MiB.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

_SMALLEST_BYTES: Final = 128 << 10
"""Below this the C library's heap serves as well."""
_LARGEST_RATIO: Final = 2


class Spares:
    """``limit_bytes``: 0 keeps nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._given: deque[npt.NDArray[np.uint8]] = deque()
        self._kept: list[npt.NDArray[np.uint8]] = []  # the oldest first

    def give(self, payload: npt.NDArray[np.uint8]) -> None:
        """The array that ``payload`` is a part of, whose owner will never look at it again."""
        array = payload if payload.base is None else payload.base
        if isinstance(array, np.ndarray) and _SMALLEST_BYTES <= len(array) <= self._limit_bytes:
            self._given.append(array)

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """``uint8[n]`` with n >= ``n_bytes`` and any content: the smallest that fits, or a new one."""
        while self._given:
            self._kept.append(self._given.popleft())
        surplus_bytes = sum(map(len, self._kept)) - self._limit_bytes
        while surplus_bytes > 0:
            surplus_bytes -= len(self._kept.pop(0))
        fitting = [i for i, a in enumerate(self._kept) if n_bytes <= len(a) <= _LARGEST_RATIO * n_bytes]
        if not fitting:
            return np.empty(n_bytes, np.uint8)
        return self._kept.pop(min(fitting, key=lambda i: len(self._kept[i])))
