"""The Delta sink: ``LogSink`` over Delta tables, whose states can be read.

So a repair can carry them over, and a log can be cut where a later state says what it says (``log_shortening``). What
is left of it, and who holds it back, the run's account has from ``log_watch``.
"""

from __future__ import annotations

from functools import partial

from xidstream.pipeline.account.model import LogPart
from xidstream.pipeline.changelog.carrying import carry
from xidstream.pipeline.changelog.slots import application_ids
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.snapshot_log import Carry
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION, DeltaRetention
from xidstream.pipeline.settings.log_layout import NO_LAYOUT, LogLayout
from xidstream.pipeline.settings.sink_kinds import DELTA
from xidstream.pipeline.sinks.log_shortening import LogShortening
from xidstream.pipeline.sinks.log_sink import LogSink
from xidstream.pipeline.sinks.log_watch import LogWatch
from xidstream.pipeline.sinks.shortened_tables import DeltaShortenedRoot


class DeltaSink(LogSink):
    """``root_uri``: a path, ``file:``, ``s3:``, ``gs:`` or ``abfs:``; ``storage_options`` are deltalake's.
    ``retention`` is told to the tables, and what is older goes beside the writes (``delta.upkeep``). So is ``layout``,
    and merges order rows by it (``log_tables.layout``)."""

    kind = DELTA

    def __init__(
        self,
        root_uri: str,
        identity: SlotIdentity,
        storage_options: dict[str, str] | None = None,
        retention: DeltaRetention = DEFAULT_RETENTION,
        layout: LogLayout = NO_LAYOUT,
    ) -> None:
        self._root = Location.parse(root_uri, storage_options)
        self._retention = retention
        self._shortening: LogShortening | None = None
        tables = DeltaTables(self._root, retention, self._shorten_logs, layout=layout)
        super().__init__(tables, DeltaTables(self._root, beside=tables), identity)
        self._watch = LogWatch(DeltaShortenedRoot(self._root), self._application_id)

    def claim(self, tenure: Tenure) -> None:
        super().claim(tenure)
        assert self._ownership is not None
        self._shortening = LogShortening(
            DeltaShortenedRoot(self._root),
            self._application_id,
            self._ownership,
            self._retention.changes,
            self.snapshot_log().is_being_taken,
            self._session,
            self._watch.shortened,
        )

    def _slots(self) -> list[str]:
        return application_ids(self._root.child(locations.TRANSACTIONS))

    def log_part(self) -> LogPart | None:
        return None if self._retention.changes.keeps_all else self._watch.part()

    def _shorten_logs(self) -> None:
        if self._shortening is not None:
            self._shortening.shorten()

    def _carries(self) -> Carry | None:
        return None if self._session is None else partial(carry, self._session, self._root)
