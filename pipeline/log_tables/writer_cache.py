"""The open handles of the tables that were written last. Each holds a snapshot of its table's whole log.

A handle takes 10 KB or more, because it lists the table's files; of an Iceberg table 350 KB, because it has all that
the table's metadata say of its snapshots. To open one takes 1 ms on a local disk (Iceberg: 10), and some requests on
an object store. So a format says how many are kept. With ten thousand tables, most are not written again soon. To drop
a handle gives up no guarantee: whoever opens it again reads the watermark anew, as after a restart. The handles of the
sink's own tables stay, because each batch needs them.

It has the shape of the dictionary that it replaces. The sink's threads, which never share a table, may use it at once.
"""

from __future__ import annotations

import threading
from typing import Final

from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.log_table import LogTableWriter

_PINNED: Final = frozenset({locations.TRANSACTIONS, locations.MESSAGES})


class WriterCache:
    """The handles by the tables' keys. ``limit``: the most handles of source tables."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pinned: dict[str, LogTableWriter] = {}
        self._recent: dict[str, LogTableWriter] = {}

    def __len__(self) -> int:
        return len(self._pinned) + len(self._recent)

    def get(self, key: str) -> LogTableWriter | None:
        with self._lock:
            if key in _PINNED:
                return self._pinned.get(key)
            writer = self._recent.pop(key, None)
            if writer is not None:
                self._recent[key] = writer
            return writer

    def __setitem__(self, key: str, writer: LogTableWriter) -> None:
        with self._lock:
            if key in _PINNED:
                self._pinned[key] = writer
                return
            self._recent.pop(key, None)
            self._recent[key] = writer
            while len(self._recent) > self._limit:
                del self._recent[next(iter(self._recent))]

    def pop(self, key: str, default: None = None) -> LogTableWriter | None:
        with self._lock:
            kept = self._pinned if key in _PINNED else self._recent
            return kept.pop(key, default)

    def clear(self) -> None:
        with self._lock:
            self._pinned.clear()
            self._recent.clear()
