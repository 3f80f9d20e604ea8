"""What a sink is, and the one way from the setting ``sink`` to an object.

``make_sink`` runs in the process that drives Spark. It imports what the kind needs and no more, and touches
nothing outside: a bad setting fails at once, before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from xidstream.pipeline.credentials import redacted
from xidstream.pipeline.errors import ConfigError, StorageFault
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.file_modes import make_folders
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.spark.naming import REMOTE_SCHEMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from xidstream.pipeline.snapshot.bounds import SnapshotBounds
    from xidstream.pipeline.spark.batch_parts import TableName
    from xidstream.pipeline.spark.frames import SinkBatch
    from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch
    from xidstream.pipeline.spark.snapshot_log import SnapshotLog


class Sink(Protocol):
    """Takes batches in order, from one thread. ``write`` returns when the batch is durable in the sink: the
    caller confirms it after that, and a batch may come again after a crash, cut differently."""

    gets_snapshots_first: bool
    """Whether it gets the rows that tables had before through ``write_snapshot``, all before the first batch. Else they
    go to ``snapshot_log``, beside the batches."""

    def open(self, spark: SparkSession) -> None:
        """Once, before the first batch; may take seconds."""

    def watermark(self) -> Lsn:
        """The commit LSN up to which the sink surely holds everything; 0/0 for one that cannot tell."""

    def last_owner(self) -> int:
        """The number of the last ``Tenure`` that wrote to the sink; 0 for none, or one that cannot tell."""

    def claim(self, tenure: Tenure) -> None:
        """Once, before the first batch: from here on the sink is this tenure's, and no earlier one's.

        Raises Superseded where it is a later one's, SinkDiverged where it holds what this server never had."""

    def write(self, batch: SinkBatch) -> None:
        """Raises an XidstreamError; then nothing of the batch may be confirmed."""

    def snapshot_log(self) -> SnapshotLog:
        """Where tables' snapshots are committed. Raises Unsupported where the sink takes none."""

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        """The rows that one table had before; it may come again after a crash. Raises as ``write``."""

    def leave_out(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        """Of the batches to come, what these snapshots contain: by table, what ``write_snapshot`` had of it."""

    def close(self) -> None:
        """Once, after the last batch or a failure. Never raises for a session that is gone."""


def make_sink(spec: str, identity: SlotIdentity) -> Sink:
    """``delta:URI``, ``console`` or ``foreach:module:function``.

    Raises ConfigError for anything else, UsageError where the function cannot be found.
    """
    kind, argument = parse_sink_spec(spec)
    if kind == "delta":
        from xidstream.pipeline.spark.delta import DeltaSink

        return DeltaSink(argument, identity)
    if kind == "console":
        from xidstream.pipeline.spark.console import ConsoleSink

        return ConsoleSink()
    from xidstream.pipeline.spark.foreach import ForeachSink

    return ForeachSink.of(argument)


def check_sink_spec(spec: str) -> str:
    """The same checks without a sink, for the process that is given the setting. Raises as ``make_sink``.

    Returns the setting as any other process understands it: a relative path of Delta tables made absolute.
    """
    kind, argument = parse_sink_spec(spec)
    if kind == "delta":
        from xidstream.pipeline.spark.naming import Location

        return f"delta:{Location.parse(argument).uri}"
    if kind == "foreach":
        from xidstream.pipeline.spark.foreach import resolve

        resolve(argument)
    return spec


def may_take_segments(spec: str, storage_uri: str) -> bool:
    """Whether the sink may make segments of this storage its own files. Asks neither of the two.

    Where it may, a buffer makes segments of what is left of a large transaction at its COMMIT.
    """
    kind, _, argument = spec.partition(":")
    if kind != "delta":
        return False
    from xidstream.pipeline.spark.naming import Location
    from xidstream.pipeline.spark.segment_links import may_reach

    return may_reach(Location.parse(argument), storage_uri)


def local_root(spec: str) -> str | None:
    """The root of Delta tables on a file system; None for any other sink. Raises ConfigError."""
    kind, argument = parse_sink_spec(spec)
    if kind != "delta":
        return None
    from xidstream.pipeline.spark.naming import Location

    root = Location.parse(argument)
    return root.uri if root.is_local else None


def make_root(spec: str) -> None:
    """Make such a root where it is missing, with the mode that was chosen. Raises StorageFault."""
    root = local_root(spec)
    if root is not None:
        try:
            make_folders(root)
        except OSError as error:
            raise StorageFault(f"cannot make the Delta root {root}: {error.strerror}") from error


def parse_sink_spec(spec: str) -> tuple[str, str]:
    kind, colon, argument = spec.partition(":")
    if (kind in ("delta", "foreach") and argument) or (kind == "console" and not colon):
        return kind, argument
    if kind in ("delta", "foreach"):
        what = "a folder" if kind == "delta" else "a function"
        form = "delta:URI" if kind == "delta" else "foreach:module:function"
        raise ConfigError(f"sink {kind}: names no {what.partition(' ')[2]}", remedy=f"give {what}: {form}")
    if not colon or kind.lower() in ("file", *REMOTE_SCHEMES):
        remedy = f"did you mean delta:{redacted(spec)}?" if spec else "give delta:URI"
    else:
        remedy = "give delta:URI, console or foreach:module:function"
    raise ConfigError(
        f"unknown sink {redacted(spec)!r}: it is delta:URI, console or foreach:module:function", remedy=remedy
    )
