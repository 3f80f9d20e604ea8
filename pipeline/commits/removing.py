"""Removes files of the journal that no record names any more, beside everything else.

Whoever confirms does not wait for it: an object store takes some requests for each object, and a sink that has caught
up leaves thousands of them at once. A crash in between loses nothing: the next epoch removes what its record does not
name. Files are given here only after a record without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from xidstream.pipeline.commits.changes import Changes
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.exchange import JournalFile


class Removing:
    """``changed``: what the sequencer's loops wait for."""

    def __init__(self, storage: SlotStorage, changed: Changes) -> None:
        self._storage = storage
        self._changed = changed
        self._files: list[JournalFile] = []
        self._is_removing = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be removed."""
        return not self._files and not self._is_removing

    def add(self, files: Sequence[JournalFile]) -> None:
        """Takes effect when ``changed`` is notified next."""
        self._files += files

    async def remove_forever(self) -> None:
        while True:
            await self._changed.when(lambda: bool(self._files))
            files, self._files = self._files, []
            self._is_removing = True
            await asyncio.to_thread(self._storage.remove_journal, files)
            self._is_removing = False
            self._changed.notify()
