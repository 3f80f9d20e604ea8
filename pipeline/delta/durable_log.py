"""The commits of a local Delta table's log, on the disk: what is confirmed after a commit may not be in a cache alone.

deltalake writes a commit and does not flush it. So whoever has committed flushes it, with its checkpoint and all that
others have committed before it, ahead of saying that the commit is made. A run that died between the two has left at
most its last commit in the cache, because each run waits for a commit before the next one. Who opens the table flushes
from the newest commit back to the last one that moved a version of an application transaction.

A table in an object store needs none of this: what it has taken is stored. Called by ``delta_table`` alone.
"""

from __future__ import annotations

import os

from xidstream.pipeline.log_tables.locations import Location


class DurableLog:
    """The log of the table at ``location``, all of it up to ``version`` on the disk when this is made."""

    def __init__(self, location: Location, version: int) -> None:
        self._location = location
        self._durable_version = version
        if location.is_local:
            self._flush_back_from(version)

    def flush_up_to(self, version: int) -> None:
        """Flush the commits that came since the last call."""
        if self._location.is_local:
            made = range(self._durable_version + 1, version + 1)
            self._location.sync(name for each in made for name in self._files_of(each))
            self._durable_version = version

    def flush_checkpoint(self, version: int) -> int:
        """Flush the checkpoint of ``version``, which was just made. Returns how many bytes it has; 0 in a store."""
        if not self._location.is_local:
            return 0
        self._location.sync(self._files_of(version))
        return os.path.getsize(os.path.join(self._location.uri, _checkpoint_of(version)))

    def _flush_back_from(self, newest: int) -> None:
        for version in range(newest, -1, -1):
            names = self._files_of(version)
            self._location.sync(names)
            if not names or _moves_a_watermark(os.path.join(self._location.uri, names[0])):
                break

    def _files_of(self, version: int) -> list[str]:
        """The commit and, where it has one, its checkpoint; none where a checkpoint has replaced the commit."""
        checkpoint = _checkpoint_of(version)
        names = [f"_delta_log/{version:020d}.json"]
        if self._has(checkpoint):
            names += [checkpoint, "_delta_log/_last_checkpoint"]
        return [n for n in names if self._has(n)]

    def _has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._location.uri, name))


def _checkpoint_of(version: int) -> str:
    return f"_delta_log/{version:020d}.checkpoint.parquet"


def _moves_a_watermark(commit: str) -> bool:
    with open(commit, "rb") as file:
        return any(line.startswith(b'{"txn"') for line in file)
