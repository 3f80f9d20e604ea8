"""What a process does with the memory of large arrays that it frees: return it, or keep it for the next ones.

glibc maps pieces of memory from a certain size on separately. As soon as a large piece is freed, it raises that size.
From then on column buffers of some megabytes come from the heap, which shrinks only from its end.

- A *buffer* returns it. Else one that has spilled everything would still look full. With a fixed size each large array
  stays a mapping of its own, which is returned when the array is freed. A buffer with a limit of 64 MiB took 2,000,000
  rows in one transaction. It grew by 170 MB without this and by 135 MB with it (one run each). Giving its last rows
  away in small parts then brought it to 71 MB.
- A *snapshot's reader* keeps it. It lives as long as there are ranges to read, and makes the same arrays for each block
  of rows. The system clears each page that it gives anew: a tenth of a reader's CPU.

On a C library without ``mallopt`` neither does anything.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_RETURNED_FROM_BYTES: Final = 128 << 10
_ARENAS: Final = 2
_KEPT_UP_TO_BYTES: Final = 32 << 20
"""The greatest size that glibc takes. Larger arrays are those of giant values, and are returned."""
_KEPT_BYTES: Final = 256 << 20
"""Above what a reader has in hand at a time: a block of rows, and a row group."""


def return_freed_memory() -> None:
    """Return a large array's memory when it is freed. Call this once, when the process starts."""
    _set({_M_MMAP_THRESHOLD: _RETURNED_FROM_BYTES, _M_ARENA_MAX: _ARENAS})


def keep_freed_memory() -> None:
    """Keep it. Call this once, when the process starts."""
    _set({_M_MMAP_THRESHOLD: _KEPT_UP_TO_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_ARENA_MAX: 1})


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
