"""Which files of the journal the next file takes in, so that their number stays small, however long it goes on.

A capture writes a file a second, and a run whose sink is away one every five: 600,000 in a week. Each is a request or
two for whoever takes the journal over, and for whoever deletes it. So a new file *absorbs* files that come directly
before it: it is written with their units in front of its own. It is durable, then the record names it in their place,
then they are deleted. A crash in between leaves one or the other, and the record says which counts.

The rule: as long as there are no more than ``FREE_FILES`` small files, nothing is absorbed. Else the new one takes in
the last file, as long as that is no larger than all that it has already, and then the one before. So files are larger,
the older they are: there are some ``FREE_FILES`` small ones, and beside these one for each doubling of the bytes, up to
``WHOLE_BYTES``. What is that large is never written again. A byte is written about a dozen times at a few commits a
second, where that is some kilobytes a second, and once where files are large from the beginning.

Rejected: files that are merged by a task of their own. It would need numbers between those of other files, and one more
moment at which the sink may come in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xidstream.pipeline.exchange import JournalFile

FREE_FILES: Final = 32
"""A take-over asks a store for so many at once. A sink that is a little behind takes these before they are absorbed."""
WHOLE_BYTES: Final = 8 << 20
WHOLE_MEMORY_BYTES: Final = 16 << 20
"""The size of a file that is written at once: one is in memory as a whole when it is loaded."""
WHOLE_UNITS: Final = 4096
"""Units with segments are not joined: a file of so many names as many large transactions."""
_MOST_BYTES: Final = 16 << 20
_MOST_MEMORY_BYTES: Final = 32 << 20
_MOST_UNITS: Final = 8192
_LEAST_BYTES: Final = 64 << 10
"""A smaller file costs a store the same, and is absorbed whatever else there is."""


def is_small(file: JournalFile) -> bool:
    return (
        file.file_bytes < WHOLE_BYTES
        and file.memory_bytes < WHOLE_MEMORY_BYTES
        and file.n_units < WHOLE_UNITS
    )


def absorbed(files: Sequence[JournalFile], n_small: int, new_bytes: int) -> tuple[JournalFile, ...]:
    """The last of ``files`` that a new file takes in, which has ``new_bytes`` in memory. ``n_small``: of the whole
    journal."""
    if n_small <= FREE_FILES:
        return ()
    n_bytes, memory_bytes, n_units, n = max(new_bytes // 2, _LEAST_BYTES), new_bytes, 0, 0
    for file in reversed(files):
        if not is_small(file) or file.file_bytes > n_bytes:
            break
        n_bytes, memory_bytes, n_units = (
            n_bytes + file.file_bytes,
            memory_bytes + file.memory_bytes,
            n_units + file.n_units,
        )
        if n_bytes > _MOST_BYTES or memory_bytes > _MOST_MEMORY_BYTES or n_units > _MOST_UNITS:
            break
        n += 1
    return tuple(files[len(files) - n :])
