"""The Iceberg sink: ``LogSink`` over Iceberg tables, at a pace.

A commit of an Iceberg table writes three files and changes a row of the catalog: some 20 ms of CPU, and readers plan
over what it leaves. So a small batch is asked for when ``commit_every_s`` have passed since the last one was written
(``pace``). What commits meanwhile at the source is in it, and the watermark moves with it: a reader is that much after
at most. A batch with a segment of a large transaction, or with many rows, is taken at once: there it is the rows that
take the time. So is one whose transactions have waited for longer than the pace and a commit can explain, by twice as
much: the run is behind, and a pause would be added to what it has to make up for.

Rejected: to wait with the batch in hand. What commits meanwhile has a pause of its own before it then, so readers are
two seconds after, and the end of each drain takes two more.

A log is cut as a Delta log is (``log_shortening``), and what is left of it the run's account has from ``log_watch``. A
repair of a snapshot carries nothing over here yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from xidstream.pipeline.account.model import LogPart
from xidstream.pipeline.changelog.iceberg_bases import refuse_base_tables
from xidstream.pipeline.exchange import AT_ONCE, Pace, SlotIdentity, Tenure
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
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
from xidstream.pipeline.spark.session import GetSession
from xidstream.pipeline.spark_errors import fault_of

LARGE_ROWS: Final = 50_000
"""What writing these takes is as long as some commits."""


class IcebergSink(LogSink):
    """``commit_every_s``: from the end of a batch to a small one. ``retention``: what is older is cut off the log
    beside the writes. ``clock`` is a test's."""

    kind = ICEBERG

    def __init__(
        self,
        address: IcebergAddress,
        identity: SlotIdentity,
        commit_every_s: float = 1.0,
        retention: LogRetention = KEEP_ALL,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        newest: Newest = {}
        upkeep = IcebergUpkeep(shorten=self._shorten_logs)
        tables = IcebergTables(address, makes=True, upkeep=upkeep, newest=newest)
        super().__init__(tables, IcebergTables(address, makes=True, newest=newest), identity)
        self._log_tables = tables
        self._root = IcebergShortenedRoot(address, tables)
        self._retention = retention
        self._shortening: LogShortening | None = None
        """Cuts the change logs; made by ``open``."""
        self._watch = LogWatch(self._root, self._application_id)
        self._commit_every_s = commit_every_s
        self._clock = clock
        self._written_s: float | None = None
        """When the last batch was written, by ``clock``."""
        self._took_s = 0.0
        """How long the last batch took to write."""

    def open(self, session: GetSession) -> None:
        """Raises ConfigError where the namespace has the base tables of another log."""
        try:
            refuse_base_tables(self._log_tables)
        except Exception as error:
            raise fault_of(error, f"opening the sink's root {self._log_tables.root}") from error
        super().open(session)

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

    def pace(self) -> Pace:
        if self._written_s is None or not self._commit_every_s:
            return AT_ONCE
        hold_s = self._written_s + self._commit_every_s - self._clock()
        return Pace(max(0.0, hold_s), LARGE_ROWS, 2 * (self._commit_every_s + self._took_s))

    def write(self, batch: SinkBatch) -> None:
        began_s = self._clock()
        super().write(batch)
        self._written_s = self._clock()
        self._took_s = self._written_s - began_s

    def close(self) -> None:
        super().close()
        self._root.close()
