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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xidstream.actors.api.listeners import check_listener
from xidstream.actors.api.streaming_query import StreamingQuery
from xidstream.actors.driver.users_session import adopt_spark, n_recent_updates, try_executors
from xidstream.actors.preflight import findings_of, port_findings, require, require_ports
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.runtime.secrets import refuse_travelling
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.actors.status.page import serve
from xidstream.actors.supervision.drivers import InProcessDriver
from xidstream.actors.supervision.placement import await_room
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account.query import QueryName
from xidstream.pipeline.errors import ConfigError, UsageError
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.findings import Finding, Findings
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.file_modes import choose
from xidstream.pipeline.settings.sink_kinds import DELTA
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.sinks.sink import Sink, make_root, make_sink
from xidstream.pipeline.sinks.sink_findings import SinkCheck, check_of_delta, check_of_function
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
        self._listeners: tuple[Any, ...] = ()

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
        spec = DELTA.spec(redacted(uri))
        settings = self._config.sink_settings
        return self._with(
            spec,
            lambda identity: DeltaSink(uri, identity, options, settings.retention, settings.layout),
            check_of_delta(uri, self._config.storage, options),
            spec,
        )

    def trigger(self, *, availableNow: bool = False) -> ChangeStream:  # noqa: N803 - Spark's name
        """``availableNow``: handle what is committed when the query starts, then end."""
        return self._copy(available_now=availableNow)

    def addListener(self, listener: Any) -> ChangeStream:  # noqa: N802 - Spark's name
        """Tell ``listener`` of the query, from its start to its end.

        It is a ``pyspark.sql.streaming.StreamingQueryListener``, or any object with its methods, and gets PySpark's
        events: ``onQueryStarted``; ``onQueryProgress`` after each batch, with what ``recentProgress`` has of it;
        ``onQueryIdle``, each 10 s without a batch while the query waits for data; ``onQueryTerminated``.

        It is called on a thread of its own, so it delays no batch. A listener that is too slow misses batches: their
        ``batchId`` shows it. What it raises is logged, by class and place, and ends nothing.
        """
        check_listener(listener)
        other = self._copy()
        other._listeners = (*self._listeners, listener)
        return other

    def check(self) -> list[Finding]:
        """Every precondition of ``start``, as `xidstream check` prints them. Nothing is started."""
        return Findings([*findings_of(self._config, self._check_sink), *port_findings(self._config)])

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Begin, on ``spark``: any session with a SparkContext; ``xidstream.spark_session`` makes one that fits.

        A session that ``spark_session`` made, or RayDP, reads rows in memory from Ray's object store. Any other gets
        them through the storage, which its executors must reach; they must have xidstream, too. A small job finds both
        out.

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
        if self._config.on_slot_lost != "stop":
            raise ConfigError(
                "on_slot_lost is a setting of `xidstream run`",
                remedy="leave it out, and put a lost slot right with `xidstream resync`",
            )
        adopt_spark(spark)
        refuse_travelling(self._config)
        choose(self._config.storage_mode)
        with waiting("checking server, storage and sink"):
            require(self._config, self._check_sink, tell=log.warning)
            require_ports(self._config)
        if self._config.sink:
            make_root(self._config.sink)
        with waiting("waiting for Ray and the session's executors"):
            try_executors(spark, self._config.storage)
            connect_ray(offers_metrics=bool(self._config.metrics_address))
            await_room(self._config, spark)
        n_recent = n_recent_updates(spark)
        driver = InProcessDriver(spark, self._config.storage, make, n_recent)
        supervisor = Supervisor(self._config, lambda: driver)
        name = QueryName.of(self._config.slot, redacted(self._config.storage), self._sink or "no sink")
        page = serve(self._config, [supervisor])
        return StreamingQuery(supervisor, name, driver.history, n_recent, page, self._listeners)

    def _sink_of_config(self, identity: SlotIdentity) -> Sink:
        return make_sink(self._config.sink, identity, self._config.sink_settings)

    def _with(
        self, sink: str, make: Callable[[SlotIdentity], Sink], check: SinkCheck, spec: str = ""
    ) -> ChangeStream:
        """``sink`` is its name for people. ``spec`` tells the buffers its kind, whatever the settings said."""
        other = self._copy(sink=spec)
        other._make, other._check_sink, other._sink = make, check, sink
        return other

    def _copy(self, **settings: Any) -> ChangeStream:
        other = ChangeStream(dataclasses.replace(self._config, **settings))
        other._make, other._check_sink, other._sink = self._make, self._check_sink, self._sink
        other._listeners = self._listeners
        return other
