"""The demo's sink: the Delta sink, with a Spark count before each write, and the times of both.

The count stands for a user's own action. If Spark counts other rows than the batch has, the demo fails.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.spark.frames import SinkBatch


@dataclass
class Arrival:
    """When a batch reached the handler, when Spark had counted its rows, and when the Delta tables had them.

    Times are of ``time.monotonic``.
    """

    n_rows: int
    handler_s: float
    counted_s: float
    delta_s: float


class WatchedDelta(DeltaSink):
    """Counts each batch's rows with Spark, writes the batch to Delta tables, and notes when each was done."""

    def __init__(self, root_uri: str, identity: SlotIdentity) -> None:
        super().__init__(root_uri, identity)
        self.arrivals: list[Arrival] = []

    def write(self, batch: SinkBatch) -> None:
        handler_s = time.monotonic()
        n_rows = sum(batch.dataframe(table).count() for table in batch.tables)
        if n_rows != batch.content.n_rows:
            raise EnvironmentFault(
                f"Spark counted {n_rows:,} rows of {batch.content.n_rows:,}: please report this"
            )
        counted_s = time.monotonic()
        super().write(batch)
        self.arrivals.append(Arrival(n_rows, handler_s, counted_s, time.monotonic()))
