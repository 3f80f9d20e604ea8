"""Let a process's memory fall when what it held is gone.

glibc raises the size from which it maps memory separately as soon as a large piece is freed; from then on column
buffers of some megabytes come from the heap, which shrinks only from its end, so a buffer that has spilled everything
would still look full. Fixing that size keeps each large array a mapping of its own, returned when it is freed.
A buffer with a limit of 64 MiB that took 2,000,000 rows in one transaction grew by 170 MB without this, by 135 MB
with it (one run each; giving its last rows away in small parts then brought it to 71 MB).

On a C library without ``mallopt`` this does nothing.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 128 << 10
_ARENAS = 2


def return_freed_memory() -> None:
    """Once, when the process starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)
