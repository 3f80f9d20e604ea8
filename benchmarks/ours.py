"""Runs the project itself: one Spark session for all cases, and a stream for each measurement.

The clock of a drain starts when the reader starts to read. The clock of ``pg_recvlogical`` starts when it connects.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import Usage, Watch
from benchmarks.source import PUBLICATION, Source
from xidstream.actors.api.streaming_query import StreamingQuery
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.driver.session import start_spark, stop_spark
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.supervision.drivers import InProcessDriver
from xidstream.actors.supervision.epoch import Epoch
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.sinks.sink import Sink, make_root, make_sink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.spark_batch import SparkBatch

_TIMEOUT_S = 600


@contextmanager
def spark_session() -> Iterator[Any]:
    connect_ray()
    session = start_spark(Config(), "xidstream-benchmarks")
    try:
        session.range(1000).selectExpr("sum(id)").collect()
        yield session
    finally:
        stop_spark()


def touch_every_row(batch: SparkBatch) -> None:
    """Run a Spark action on every row and every column that keeps nothing."""
    for table in batch.tables:
        batch.dataframe(table).write.format("noop").mode("overwrite").save()


def count(batch: SparkBatch) -> None:
    for table in batch.tables:
        batch.dataframe(table).count()


def nothing(batch: SparkBatch) -> None:
    """Do nothing with the batch in the handler."""


@dataclass
class Arrival:
    """One batch in the handler. Times are monotonic seconds."""

    at_s: float
    done_s: float
    first_commit_lsn: int
    last_commit_lsn: int
    n_rows: int
    spilled_bytes: int


@dataclass
class Stream:
    """A running stream; ``arrivals`` grows. ``delta``: where its Delta tables are, if it writes any.
    ``reading_since_s``: when the reader of the present epoch started to read."""

    delta: Path = Path()
    query: Any = None
    supervisor: Any = None
    reading_since_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        with self.changed:
            while not condition():
                self.changed.wait(0.2)
                if not self.query.isActive:
                    raise RuntimeError(f"the stream ended: {self.query.exception()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(str(self.query.lastProgress))

    @property
    def n_rows(self) -> int:
        return sum(a.n_rows for a in self.arrivals)

    @property
    def received_rows(self) -> int:
        """The rows of open transactions that are decoded."""
        return int(self.query.lastProgress["openRows"] or 0)


class _Noting:
    """A sink that notes when a batch came, and when the sink after it had written the batch."""

    def __init__(self, sink: Sink, running: Stream) -> None:
        self._sink = sink
        self._running = running

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def write(self, batch: SinkBatch) -> None:
        at_s = time.monotonic()
        self._sink.write(batch)
        handed = batch.content
        arrival = Arrival(
            at_s,
            time.monotonic(),
            handed.first_commit_lsn,
            handed.last_commit_lsn,
            handed.n_rows,
            sum(p.segment.n_bytes for unit in handed.units for p in unit.segments),
        )
        with self._running.changed:
            self._running.arrivals.append(arrival)
            self._running.changed.notify_all()


@contextmanager
def stream(
    spark: Any,
    source: Source,
    slot: str,
    action: Callable[[SparkBatch], None] = nothing,
    *,
    lake: str = "",
    **settings: Any,
) -> Iterator[Stream]:
    """A stream that runs until the block ends. With ``lake`` (``delta`` or ``iceberg``) it writes tables of that kind
    in place of calling ``action``."""
    with tempfile.TemporaryDirectory(prefix="xs-bench-", ignore_cleanup_errors=True) as folder:
        spec = {"": "", "delta": f"delta:{folder}/delta", "iceberg": f"iceberg:{folder}/lake/shop"}[lake]
        config = Config.of(
            {
                "dsn": source.dsn,
                "slot": slot,
                "publication": PUBLICATION,
                "storage": f"{folder}/segments",
                "sink": spec,
                **settings,
            }
        )
        running = Stream(Path(folder) / "delta")

        def make(identity: SlotIdentity) -> Sink:
            sink = make_sink(spec, identity, config.sink_settings) if spec else ForeachSink(action)
            return _Noting(sink, running)

        if spec:
            make_root(spec)

        begin = Epoch.run

        def noted(epoch: Epoch, target: Lsn | None) -> None:
            begin(epoch, target)
            running.reading_since_s = time.monotonic()

        driver = InProcessDriver(spark, config.storage, make)
        Epoch.run = noted  # type: ignore[method-assign]
        running.supervisor = Supervisor(config, lambda: driver)
        running.query = StreamingQuery(running.supervisor)
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            while running.query.lastProgress["receivedBytes"] is None:
                if not running.query.isActive or time.monotonic() > deadline:
                    raise RuntimeError(f"the stream did not start: {running.query.exception()}")
                time.sleep(0.02)
            yield running
        finally:
            running.query.stop()
            Epoch.run = begin  # type: ignore[method-assign]


@dataclass(frozen=True)
class Drained:
    """Seconds from the start of reading to the last batch in the handler, and to the end of the action on it."""

    handler_s: float
    done_s: float
    spilled_bytes: int
    usage: Usage


def drain(
    spark: Any, source: Source, slot: str, n_rows: int, action: Callable[[SparkBatch], None], **settings: Any
) -> Drained:
    """Read all ``n_rows`` rows of the slot, however they are cut into transactions and batches."""
    with stream(spark, source, slot, action, **settings) as running:
        watch = Watch()  # it starts here, because another case measures the start of the parts
        running.wait(lambda: running.n_rows >= n_rows)
        start_s = running.reading_since_s
        last = running.arrivals[-1]
        usage = watch.end()
    if running.n_rows != n_rows:
        raise RuntimeError(f"{running.n_rows} rows arrived, {n_rows} were written")
    return Drained(
        last.at_s - start_s, last.done_s - start_s, sum(a.spilled_bytes for a in running.arrivals), usage
    )


def warm_up(spark: Any, server: EmbeddedPostgres) -> None:
    """Run a first drain. It loads what is loaded only once: kernels, the JVMs' classes, Spark's Python workers."""
    source = Source(server, "warm")
    (slot,) = source.slots(1)
    source.insert(50_000)
    drain(spark, source, slot, 50_000, touch_every_row)
    source.close()
