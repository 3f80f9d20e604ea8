"""Keeps arrays that messages were gathered in, so that they are used again.

A page of memory that is touched for the first time costs two microseconds here. That is as much as 4 kB of rows cost
the reader otherwise. A block's bytes are copied when the block is sent, so its array can be used again. Large arrays
get huge pages and hardly matter. But many open transactions have small arrays: with 32 transactions the reader took
87,000 page faults for 2,000,000 rows.

Invariants: an array has one owner, or it is kept here. An array that is used again may have been touched to its end,
however few rows are in it now. So it counts until it is freed for good: arrays that are kept here and arrays that were
given out again stay under ``limit_bytes`` together, and the oldest one that is kept goes first. Beyond the limit
callers get new arrays, which only take the memory that is touched.

Any thread may call ``allocate`` and ``release``.

Rejected: one array for all, cut into pieces, because that is an allocator of our own; huge pages for small arrays,
because a hundred open transactions would take a hundred times 2 MiB.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SMALLEST_BYTES: Final = 128 << 10
"""Below this size the C library's heap is as good."""
_LARGEST_RATIO: Final = 2

Payload = npt.NDArray[np.uint8]


class Spares:
    """``limit_bytes``: 0 keeps nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._kept: list[Payload] = []  # the oldest first
        self._out: dict[int, weakref.ref[Payload]] = {}
        # Reentrant: an array may be freed while this thread holds the lock, and that calls ``_forget``.
        self._lock = threading.RLock()

    def release(self, payload: Payload) -> None:
        """Keep the array that ``payload`` is a part of. Its owner must never look at it again."""
        array: Any = payload if payload.base is None else payload.base
        if not isinstance(array, np.ndarray) or not _SMALLEST_BYTES <= len(array) <= self._limit_bytes:
            return
        with self._lock:
            if self._out.pop(id(array), None) is None:
                self._held_bytes += len(array)
            self._kept.append(array)
            while self._held_bytes > self._limit_bytes and self._kept:
                self._held_bytes -= len(self._kept.pop(0))

    def allocate(self, n_bytes: int) -> Payload:
        """``uint8[n]`` with n >= ``n_bytes`` and any content: the smallest kept array that fits, or a new one."""
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
        """An array that was given out was freed, and will not come back."""
        with self._lock:
            if self._out.get(key) is gone:
                del self._out[key]
                self._held_bytes -= n_bytes
