"""Removes from a table's log what no version that is still needed is read from.

A version is read from the newest checkpoint at or below it, and the commits after that one. So ahead of the newest
checkpoint at or below the oldest needed version nothing is needed. deltalake writes a checkpoint with each hundredth
commit: a log has the commits since the oldest needed version, and a hundred more at most.

The oldest go first, so what a crash leaves is a log that begins later. A checkpoint must be older than ``grace_s``, by
the file system's clock: another machine may see a folder as it was a minute ago, and read from the one before.

Rejected: deltalake's ``cleanup_metadata``, which goes by the wall clock and knows nothing of versions that are named.

Called by ``pipeline.mirror.vacuum``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.kept_files import LOG
from xidstream.pipeline.mirror.table_folder import log_files, remove_file

_FILE: Final = re.compile(r"\.?(\d{20})\.(json|crc|checkpoint\.(.+\.)?parquet)(\.crc)?")
"""A commit, a checkpoint in one part or several, and the checksums that Spark and Hadoop write of them."""
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


def shorten_log(
    location: Location, oldest: int, now_s: float, grace_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """``oldest``: the oldest version that is still needed. ``now_s``: by the clock of the file system or the store.
    ``check`` raises where this is to be given up, and is called ahead of each file. Raises OSError."""
    files = log_files(location)
    usable = (n for n, status in files.items() if _is_usable(n, oldest, status.modified_s, now_s - grace_s))
    begin = max(usable, default=None)
    if begin is None:
        return
    for name in sorted(files, key=lambda name: name.lstrip(".")):
        match = _FILE.fullmatch(name)
        if match is not None and int(match[1]) < int(begin[:20]):
            check()
            with suppress(FileNotFoundError):  # another mirror's vacuum came first
                remove_file(location, f"{LOG}/{name}")


def _is_usable(name: str, oldest: int, modified_s: float, before_s: float) -> bool:
    """Whether it is a checkpoint in one part, old enough, from which ``oldest`` can be read."""
    match = _CHECKPOINT.fullmatch(name)
    return match is not None and int(match[1]) <= oldest and modified_s <= before_s
