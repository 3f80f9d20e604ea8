"""The open handles of the Delta tables that were written last. Each holds a snapshot of its table's whole log.

A handle takes 10 KB or more, because it lists the table's files. To open one takes 1 ms on a local disk, and some
requests on an object store. With ten thousand tables, most are not written again soon. To drop a handle gives up no
guarantee: whoever opens it again reads the watermark anew, as after a restart. The handles of the sink's own tables
stay, because each batch needs them.

It has the shape of the dictionary that it replaces. The sink's threads, which never share a table, may use it at once.
"""

from __future__ import annotations

import threading
from typing import Final

from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import locations

KEPT_WRITERS: Final = 1_000
_PINNED: Final = frozenset({locations.TRANSACTIONS, locations.MESSAGES})


class WriterCache:
    """The handles by directory. ``limit``: the most handles of source tables."""

    def __init__(self, limit: int = KEPT_WRITERS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pinned: dict[str, DeltaTableWriter] = {}
        self._recent: dict[str, DeltaTableWriter] = {}

    def __len__(self) -> int:
        return len(self._pinned) + len(self._recent)

    def get(self, directory: str) -> DeltaTableWriter | None:
        with self._lock:
            if directory in _PINNED:
                return self._pinned.get(directory)
            writer = self._recent.pop(directory, None)
            if writer is not None:
                self._recent[directory] = writer
            return writer

    def __setitem__(self, directory: str, writer: DeltaTableWriter) -> None:
        with self._lock:
            if directory in _PINNED:
                self._pinned[directory] = writer
                return
            self._recent.pop(directory, None)
            self._recent[directory] = writer
            while len(self._recent) > self._limit:
                del self._recent[next(iter(self._recent))]

    def pop(self, directory: str, default: None = None) -> DeltaTableWriter | None:
        with self._lock:
            kept = self._pinned if directory in _PINNED else self._recent
            return kept.pop(directory, default)

    def clear(self) -> None:
        with self._lock:
            self._pinned.clear()
            self._recent.clear()
