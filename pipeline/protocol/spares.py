"""Arrays that were gathered in before, to be gathered in again.

A page of memory that is touched for the first time costs two microseconds here, as much as 4 kB of rows cost the reader
otherwise. A block's bytes are copied when they are handed over, so its array may serve again. Large arrays get huge
pages, and hardly matter; but many open transactions have small ones: with 32 of them the reader took 87,000 page
faults for 2,000,000 rows.

Invariants: an array is with one owner, or here. What serves again may be touched to its end, however few rows are in
it now, so it counts until it is gone for good: what is kept here and what was given out from here stay under
``limit_bytes`` together, and the oldest that is kept goes first. Beyond that arrays are new ones, which take what is
touched of them and no more.

``take`` and ``give`` may be called by any thread.

Rejected: one array for all, cut into pieces, which is an allocator of our own; huge pages for small arrays, of which
a hundred open transactions would take a hundred times 2 MiB.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SMALLEST_BYTES: Final = 128 << 10
"""Below this the C library's heap serves as well."""
_LARGEST_RATIO: Final = 2

Payload = npt.NDArray[np.uint8]


class Spares:
    """``limit_bytes``: 0 keeps nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._kept: list[Payload] = []  # the oldest first
        self._out: dict[int, weakref.ref[Payload]] = {}
        # An array may be freed, and ``_forget`` be called, in the middle of what is done under the lock.
        self._lock = threading.RLock()

    def give(self, payload: Payload) -> None:
        """The array that ``payload`` is a part of, whose owner will never look at it again."""
        array: Any = payload if payload.base is None else payload.base
        if not isinstance(array, np.ndarray) or not _SMALLEST_BYTES <= len(array) <= self._limit_bytes:
            return
        with self._lock:
            if self._out.pop(id(array), None) is None:
                self._held_bytes += len(array)
            self._kept.append(array)
            while self._held_bytes > self._limit_bytes and self._kept:
                self._held_bytes -= len(self._kept.pop(0))

    def take(self, n_bytes: int) -> Payload:
        """``uint8[n]`` with n >= ``n_bytes`` and any content: the smallest that fits, or a new one."""
        with self._lock:
            fitting = [i for i, a in enumerate(self._kept) if n_bytes <= len(a) <= _LARGEST_RATIO * n_bytes]
            if fitting:
                array = self._kept.pop(min(fitting, key=lambda i: len(self._kept[i])))
                self._out[id(array)] = weakref.ref(
                    array, functools.partial(self._forget, id(array), len(array))
                )
                return array
        return np.empty(n_bytes, np.uint8)

    def _forget(self, key: int, n_bytes: int, gone: weakref.ref[Payload]) -> None:
        """One that was given out was dropped, and will not come back."""
        with self._lock:
            if self._out.get(key) is gone:
                del self._out[key]
                self._held_bytes -= n_bytes
