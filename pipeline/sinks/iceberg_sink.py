"""The Iceberg sink: ``LogSink`` over Iceberg tables, at a pace.

A commit of an Iceberg table writes three files and changes a row of the catalog: some 20 ms of CPU, and readers plan
over what it leaves. So small batches wait until ``commit_every_s`` have passed since the last one was written. What
commits meanwhile at the source makes the next batch larger, and the watermark moves with it: a reader is that much
behind at most. A batch with a segment of a large transaction, or with many rows, is written at once: there it is the
rows that take the time.

A repair of a snapshot carries nothing over here yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from xidstream.pipeline.changelog.iceberg_root import IcebergRoot
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.iceberg.catalogs import IcebergPlace
from xidstream.pipeline.iceberg.iceberg_table import Newest
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.settings.sink_kinds import ICEBERG
from xidstream.pipeline.sinks.log_sink import LogSink
from xidstream.pipeline.spark.frames import SinkBatch

LARGE_ROWS: Final = 50_000
"""What writing these takes is as long as some commits."""


class IcebergSink(LogSink):
    """``commit_every_s``: between the ends of two small batches. ``clock`` and ``wait`` are a test's."""

    kind = ICEBERG

    def __init__(
        self,
        place: IcebergPlace,
        identity: SlotIdentity,
        commit_every_s: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        newest: Newest = {}
        tables = IcebergTables(place, makes=True, upkeep=IcebergUpkeep(), newest=newest)
        super().__init__(tables, IcebergTables(place, makes=True, newest=newest), identity)
        self._place = place
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._closing = threading.Event()
        self._wait = wait or self._closing.wait
        self._written_s: float | None = None

    def _slots(self) -> list[str]:
        found = IcebergRoot(self._place).open(locations.TRANSACTIONS)
        return [] if found is None else found.slots()

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
