"""The demo's sink: the Delta sink, with a Spark count before each write, and the times of both.

The count stands for a user's own action. If Spark counts other rows than the batch has, the demo fails.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.spark.delta import DeltaSink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.snapshot_log import SnapshotLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Arrival:
    """When a batch reached the handler, when Spark had counted its rows, and when the Delta tables had them.

    Times are of ``time.monotonic``.
    """

    n_rows: int
    handler_s: float
    counted_s: float
    delta_s: float


@dataclass
class WatchedDelta:
    """Counts each batch's rows with Spark, hands the batch to the Delta sink, and notes when each was done."""

    delta: DeltaSink
    arrivals: list[Arrival] = field(default_factory=list)

    def open(self, spark: SparkSession) -> None:
        self.delta.open(spark)

    def watermark(self) -> Lsn:
        return self.delta.watermark()

    def last_owner(self) -> int:
        return self.delta.last_owner()

    def claim(self, tenure: Tenure) -> None:
        self.delta.claim(tenure)

    def snapshot_log(self) -> SnapshotLog:
        return self.delta.snapshot_log()

    def write(self, batch: SinkBatch) -> None:
        handler_s = time.monotonic()
        n_rows = sum(batch.dataframe(table).count() for table in batch.tables)
        if n_rows != batch.content.n_rows:
            raise EnvironmentFault(
                f"Spark counted {n_rows:,} rows of {batch.content.n_rows:,}: please report this"
            )
        counted_s = time.monotonic()
        self.delta.write(batch)
        self.arrivals.append(Arrival(n_rows, handler_s, counted_s, time.monotonic()))

    def close(self) -> None:
        self.delta.close()
