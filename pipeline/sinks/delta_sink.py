"""The Delta sink: ``LogSink`` over Delta tables, whose states Spark can read, and so carry over into a repair."""

from __future__ import annotations

from functools import partial

from xidstream.pipeline.changelog.carrying import carry
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.snapshot_log import Carry
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION, DeltaRetention
from xidstream.pipeline.settings.sink_kinds import DELTA
from xidstream.pipeline.sinks.log_sink import LogSink


class DeltaSink(LogSink):
    """``root_uri``: a path, ``file:``, ``s3:``, ``gs:`` or ``abfs:``; ``storage_options`` are deltalake's.
    ``retention`` is told to the tables, and what is older goes beside the writes (``delta.upkeep``)."""

    kind = DELTA

    def __init__(
        self,
        root_uri: str,
        identity: SlotIdentity,
        storage_options: dict[str, str] | None = None,
        retention: DeltaRetention = DEFAULT_RETENTION,
    ) -> None:
        self._root = Location.parse(root_uri, storage_options)
        super().__init__(DeltaTables(self._root, retention), DeltaTables(self._root), identity)

    def _carries(self) -> Carry | None:
        return None if self._session is None else partial(carry, self._session, self._root)
