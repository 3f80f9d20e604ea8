"""The Python interface: a slot as a streaming query in a PySpark script with its own session.

It reads as Structured Streaming does::

    from xidstream import ChangeStream, spark_session

    spark = spark_session("app")
    query = (
        ChangeStream({"dsn": "dbname=shop", "slot": "orders", "publication": "orders", "storage": "/tmp/x"})
        .foreachBatch(handle)
        .trigger(availableNow=True)
        .start(spark)
    )
    query.awaitTermination()

``handle(batch)`` runs on a thread of this process; it gets whole transactions, in commit order, at least once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xidstream.actors.driver.users_session import adopt_spark, try_executors
from xidstream.actors.preflight import findings_of, require
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.runtime.secrets import refuse_travelling
from xidstream.actors.supervision.drivers import InProcessDriver
from xidstream.actors.supervision.page import StatusPage, serve
from xidstream.actors.supervision.placement import await_room
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.config import Config
from xidstream.pipeline.credentials import redacted
from xidstream.pipeline.errors import ConfigError, UsageError
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.snapshot.progress import SnapshotProgress
from xidstream.pipeline.spark.delta import DeltaSink
from xidstream.pipeline.spark.foreach import ForeachSink
from xidstream.pipeline.spark.sink import Sink, make_sink
from xidstream.pipeline.spark.sink_findings import SinkCheck, check_of_delta, check_of_function
from xidstream.pipeline.spark.spark_batch import SparkBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class ChangeStream:
    """A description of what to read and where to put it; nothing happens before ``start``.

    ``config`` is a Config, a mapping of its settings, or the path of a TOML file with them.
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | Path) -> None:
        """Raises ConfigError for a setting that is unknown or out of range, and for one that is missing and needed."""
        self._config = Config.load(config)
        self._config.require("dsn", "slot", "publication", "storage")
        self._make: Callable[[SlotIdentity], Sink] | None = None
        self._check_sink: SinkCheck | None = None
        self._sink = redacted(self._config.sink)

    def __repr__(self) -> str:
        trigger = ", availableNow" if self._config.available_now else ""
        return f"ChangeStream(slot {self._config.slot!r} to {self._sink or 'no sink'}{trigger})"

    def foreachBatch(self, function: Callable[[SparkBatch], None]) -> ChangeStream:  # noqa: N802 - Spark's name
        """Call ``function`` with each batch. An exception in it ends the query, with nothing confirmed."""
        if not callable(function):
            raise UsageError("foreachBatch needs a function of one argument, the batch")
        name = getattr(function, "__name__", type(function).__name__)
        return self._with(
            f"foreachBatch({name})", lambda identity: ForeachSink(function), check_of_function(function)
        )

    def toDelta(self, uri: str, storage_options: Mapping[str, str] | None = None) -> ChangeStream:  # noqa: N802
        """Append to one Delta table per source table below ``uri``: docs/delta.md.

        ``storage_options`` are deltalake's; the nodes' own credentials are better (docs/security.md).
        """
        options = dict(storage_options) if storage_options else None
        spec = f"delta:{redacted(uri)}"
        return self._with(
            spec,
            lambda identity: DeltaSink(uri, identity, storage_options=options),
            check_of_delta(uri, self._config.storage, options),
            spec,
        )

    def trigger(self, *, availableNow: bool = False) -> ChangeStream:  # noqa: N803 - Spark's name
        """``availableNow``: handle what is committed when the query starts, then end."""
        other = ChangeStream(dataclasses.replace(self._config, available_now=availableNow))
        other._make, other._check_sink, other._sink = self._make, self._check_sink, self._sink
        return other

    def check(self) -> list[Finding]:
        """Every precondition of ``start``, as `xidstream check` prints them. Nothing is started."""
        return findings_of(self._config, self._check_sink)

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Begin, on ``spark``: any session with a SparkContext; ``xidstream.spark_session`` makes one that fits.

        A RayDP session reads rows in memory from Ray's object store. Any other gets them through the storage, which its
        executors must reach; they must have xidstream, too. A small job finds both out.

        Raises what the preflight finds missing (``check``), before anything is started: PreconditionMissing, SlotLost,
        SinkDiverged and others. A slot that somebody else reads is waited for, 30 s. On a Ray of this process's own
        it waits until the session's executors are there, and raises PreconditionMissing within a minute where they
        leave too few CPUs for the pipeline.
        """
        make = self._make
        if make is None:
            if not self._config.sink:
                raise ConfigError(
                    "the stream has no sink",
                    remedy="call .foreachBatch(function) or .toDelta(uri) before start, or give the setting sink",
                )
            make = self._sink_of_config
        if self._config.mirror_every:
            raise ConfigError(
                "mirror_every is a setting of `xidstream run`",
                remedy="leave it out, and refresh base tables with xidstream.Mirror(uri).start(spark, every=…)",
            )
        adopt_spark(spark)
        refuse_travelling(self._config)
        require(self._config, self._check_sink, tell=log.warning)
        try_executors(spark, self._config.storage)
        connect_ray()
        await_room(self._config, spark)
        driver = InProcessDriver(spark, self._config.storage, make)
        supervisor = Supervisor(self._config, lambda: driver)
        return StreamingQuery(supervisor, self._config.slot, serve(self._config, [supervisor]))

    def _sink_of_config(self, identity: SlotIdentity) -> Sink:
        return make_sink(self._config.sink, identity)

    def _with(
        self, sink: str, make: Callable[[SlotIdentity], Sink], check: SinkCheck, spec: str = ""
    ) -> ChangeStream:
        """``sink`` is its name for people. ``spec`` tells the buffers its kind, whatever the settings said."""
        other = ChangeStream(dataclasses.replace(self._config, sink=spec))
        other._make, other._check_sink, other._sink = make, check, sink
        return other


class StreamingQuery:
    """A running query; the methods are Spark's."""

    def __init__(self, supervisor: Supervisor, slot: str = "", page: StatusPage | None = None) -> None:
        self._supervisor = supervisor
        self._page = page
        self._slot = slot
        self._exception: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="xidstream-query", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "active" if self.isActive else "failed" if self._exception is not None else "ended"
        progress = self._supervisor.status().driver
        return (
            f"StreamingQuery(slot {self._slot!r}, {state}, {progress.n_transactions:,} transactions and "
            f"{progress.n_rows:,} rows up to {progress.last_commit_lsn})"
        )

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether it still runs."""
        return self._thread.is_alive()

    @property
    def lastProgress(self) -> dict[str, Any]:  # noqa: N802
        """Numbers for people and monitoring. LSNs are text, as PostgreSQL prints them.

        ``epoch``; ``batches``, ``transactions``, ``rows`` that the sink has had since the start; ``lastCommitLsn`` and
        ``lagMs`` of the last batch; ``caughtUp``, whether all transactions that the server has sent are delivered and
        confirmed; ``confirmedLsn``, up to which the server was told that all is durable; ``preparedTransactions``;
        ``receivedBytes``; ``openTransactions`` and ``openRows`` that are streamed and not committed yet; ``paused``,
        whether reading waits for memory; ``waitingForSinkBytes`` and ``inFlightBytes``. ``snapshots``: ``tables`` in
        hand or waiting, each with ``table``, ``state``, ``ranges``, ``rangesRead``, ``rows``, ``bytes`` and
        ``bytesRead``; ``finished``, ``rows`` and ``bytesRead`` of this query; ``bytesPerS`` of the last minute and
        ``secondsLeft``; ``heldWalBytes`` that the server keeps for the slot meanwhile. What is not known at the moment
        is None.
        """
        status = self._supervisor.status()
        driver, sequencer, reader = status.driver, status.sequencer, status.reader
        return {
            "snapshots": None if status.snapshots is None else _snapshots_json(status.snapshots),
            "epoch": status.epoch,
            "batches": driver.n_batches,
            "transactions": driver.n_transactions,
            "rows": driver.n_rows,
            "lastCommitLsn": str(driver.last_commit_lsn),
            "lagMs": driver.lag_ms,
            "caughtUp": status.is_caught_up,
            "confirmedLsn": str(sequencer.confirmed_lsn) if sequencer else None,
            "preparedTransactions": sequencer.n_prepared if sequencer else None,
            "receivedBytes": reader.n_bytes if reader else None,
            "openTransactions": len(reader.open) if reader else None,
            "openRows": sum(rows for _, rows, _, _ in reader.open) if reader else None,
            "paused": reader.paused if reader else None,
            "waitingForSinkBytes": reader.backlog_bytes if reader else None,
            "inFlightBytes": reader.in_flight_bytes if reader else None,
        }

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802
        """Wait, at most ``timeout`` seconds; True when the query has ended. Raises what ended it."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._exception is not None:
            raise self._exception
        return True

    def stop(self) -> None:
        """End it cleanly: the batch in hand is finished and confirmed. Returns when it has ended."""
        self._supervisor.stop()
        self._thread.join()

    def exception(self) -> BaseException | None:
        """What ended the query; None while it runs, and after an end without failure."""
        return self._exception

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            self._exception = error
        finally:
            if self._page is not None:
                self._page.close()


def _snapshots_json(progress: SnapshotProgress) -> dict[str, Any]:
    return {
        "finished": progress.n_finished,
        "rows": progress.n_rows,
        "bytes": progress.n_bytes,
        "bytesRead": progress.n_bytes_read,
        "bytesPerS": progress.bytes_per_s,
        "secondsLeft": progress.seconds_left,
        "heldWalBytes": progress.held_wal_bytes,
        "tables": [
            {
                "table": table.table,
                "state": table.state,
                "ranges": table.n_ranges,
                "rangesRead": table.n_ranges_read,
                "rows": table.n_rows,
                "bytes": table.n_bytes,
                "bytesRead": table.n_bytes_read,
            }
            for table in progress.tables
        ],
    }
