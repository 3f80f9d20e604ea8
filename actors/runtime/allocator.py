"""Makes a process return memory to the system when it frees large arrays.

glibc maps pieces of memory from a certain size on separately. As soon as a large piece is freed, it raises that size.
From then on column buffers of some megabytes come from the heap. The heap shrinks only from its end, so a buffer that
has spilled everything would still look full. With a fixed size each large array stays a mapping of its own, which is
returned when the array is freed. A buffer with a limit of 64 MiB took 2,000,000 rows in one transaction. It grew by
170 MB without this and by 135 MB with it (one run each). Giving its last rows away in small parts then brought it to
71 MB.

On a C library without ``mallopt`` this does nothing.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 128 << 10
_ARENAS = 2


def return_freed_memory() -> None:
    """Fix the size. Call this once, when the process starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)
