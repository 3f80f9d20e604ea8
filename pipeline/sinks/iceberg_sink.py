"""The Iceberg sink: ``LogSink`` over Iceberg tables, at a pace.

A commit of an Iceberg table writes three files and changes a row of the catalog: some 20 ms of CPU, and readers plan
over what it leaves. So small batches wait until ``commit_every_s`` have passed since the last one was written. What
commits meanwhile at the source makes the next batch larger, and the watermark moves with it: a reader is that much
after at most. A batch with a segment of a large transaction, or with many rows, is written at once: there it is the
rows that take the time.

A log is cut as a Delta log is (``log_shortening``), and what is left of it the run's account has from ``log_watch``. A
repair of a snapshot carries nothing over here yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from xidstream.pipeline.account.model import LogPart
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.iceberg.catalogs import IcebergPlace
from xidstream.pipeline.iceberg.iceberg_table import Newest
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.settings.log_retention import KEEP_ALL, LogRetention
from xidstream.pipeline.settings.sink_kinds import ICEBERG
from xidstream.pipeline.sinks.iceberg_shortening import IcebergShortenedRoot
from xidstream.pipeline.sinks.log_shortening import LogShortening
from xidstream.pipeline.sinks.log_sink import LogSink
from xidstream.pipeline.sinks.log_watch import LogWatch
from xidstream.pipeline.spark.frames import SinkBatch

LARGE_ROWS: Final = 50_000
"""What writing these takes is as long as some commits."""


class IcebergSink(LogSink):
    """``commit_every_s``: between the ends of two small batches. ``retention``: what is older is cut off the log beside
    the writes. ``clock`` and ``wait`` are a test's."""

    kind = ICEBERG

    def __init__(
        self,
        place: IcebergPlace,
        identity: SlotIdentity,
        commit_every_s: float = 1.0,
        retention: LogRetention = KEEP_ALL,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        newest: Newest = {}
        upkeep = IcebergUpkeep(shorten=self._shorten_logs)
        tables = IcebergTables(place, makes=True, upkeep=upkeep, newest=newest)
        super().__init__(tables, IcebergTables(place, makes=True, newest=newest), identity)
        self._root = IcebergShortenedRoot(place, tables)
        self._retention = retention
        self._shortening: LogShortening | None = None
        self._watch = LogWatch(self._root, self._application_id)
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._written_s: float | None = None

    def claim(self, tenure: Tenure) -> None:
        super().claim(tenure)
        assert self._ownership is not None
        self._shortening = LogShortening(
            self._root,
            self._application_id,
            self._ownership,
            self._retention,
            self.snapshot_log().is_being_taken,
            self._session,
            self._watch.shortened,
        )

    def _slots(self) -> list[str]:
        return self._root.slots()

    def log_part(self) -> LogPart | None:
        return None if self._retention.keeps_all else self._watch.part()

    def _shorten_logs(self) -> None:
        if self._shortening is not None:
            self._shortening.shorten()

    def write(self, batch: SinkBatch) -> None:
        if self._written_s is not None and not _is_large(batch):
            wait_s = self._written_s + self._commit_every_s - self._clock()
            if wait_s > 0:
                self._wait(wait_s)
        super().write(batch)
        self._written_s = self._clock()

    def close(self) -> None:
        self._closing.set()
        super().close()


def _is_large(batch: SinkBatch) -> bool:
    return batch.content.n_rows >= LARGE_ROWS or next(iter(batch.content.segment_parts()), None) is not None
