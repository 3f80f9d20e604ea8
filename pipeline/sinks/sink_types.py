"""The work of each kind of sink with the setting after its colon. ``pipeline.settings.sink_kinds`` names the classes.

Nothing heavy is imported before a method needs it: the command line and the reader ask these, too.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.sink_settings import SinkSettings
from xidstream.pipeline.sinks.sink import RecordedGenerations, Sink, SinkType

if TYPE_CHECKING:
    from xidstream.pipeline.iceberg.catalogs import IcebergAddress
    from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
    from xidstream.pipeline.sinks.sink_findings import SinkCheck


class DeltaType(SinkType):
    """``argument`` is the URI of the tables' root."""

    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        from xidstream.pipeline.sinks.delta_sink import DeltaSink

        return DeltaSink(self.argument, identity, retention=settings.retention, layout=settings.layout)

    def checked(self) -> str:
        return Location.parse(self.argument).uri

    def may_take_segments(self, storage_uri: str) -> bool:
        from xidstream.pipeline.log_tables.segment_links import may_reach

        return may_reach(Location.parse(self.argument), storage_uri)

    def local_root(self) -> str | None:
        root = Location.parse(self.argument)
        return root.uri if root.is_local else None

    def check(self, storage_uri: str) -> SinkCheck:
        from xidstream.pipeline.sinks.sink_findings import check_of_delta

        return check_of_delta(self.argument, storage_uri)

    def holds(self, application_id: str) -> tuple[int, Lsn]:
        from xidstream.pipeline.sinks.sink_findings import held_by_delta

        return held_by_delta(self.argument, application_id)

    def recorded_generations(self) -> RecordedGenerations:
        from xidstream.pipeline.delta.delta_tables import DeltaTables
        from xidstream.pipeline.log_tables.generation_lines import generation_states

        return generation_states(DeltaTables(Location.parse(self.argument)))


class IcebergType(SinkType):
    """``argument`` is a catalog and a namespace (``iceberg.catalogs``)."""

    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        from xidstream.pipeline.sinks.iceberg_sink import IcebergSink

        address = self._address()
        address.root()  # a place that the sink cannot write to is told at once
        return IcebergSink(address, identity, settings.commit_every_s, settings.retention.changes)

    def checked(self) -> str:
        return self._address().argument

    def may_take_segments(self, storage_uri: str) -> bool:
        from xidstream.pipeline.log_tables.segment_links import may_reach

        try:
            root = self._address().root()
        except ConfigError:
            return True  # only the Spark driver's machine need know the catalog, and this may be another
        return root is not None and may_reach(root, storage_uri)

    def local_root(self) -> str | None:
        root = self._address().root()
        return root.uri if root is not None and root.is_local else None

    def check(self, storage_uri: str) -> SinkCheck:
        from xidstream.pipeline.sinks.sink_findings import check_of_iceberg

        return check_of_iceberg(self.argument, storage_uri)

    def holds(self, application_id: str) -> tuple[int, Lsn]:
        from xidstream.pipeline.sinks.sink_findings import held_by

        with closing(self._tables()) as tables:
            return held_by(tables, application_id)

    def recorded_generations(self) -> RecordedGenerations:
        from xidstream.pipeline.log_tables.generation_lines import generation_states

        with closing(self._tables()) as tables:
            return generation_states(tables)

    def _address(self) -> IcebergAddress:
        from xidstream.pipeline.iceberg.catalogs import IcebergAddress

        return IcebergAddress.parse(self.argument)

    def _tables(self) -> IcebergTables:
        from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables

        return IcebergTables(self._address())


class ConsoleType(SinkType):
    """It has no argument."""

    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        from xidstream.pipeline.sinks.console import ConsoleSink

        return ConsoleSink()

    def check(self, storage_uri: str) -> SinkCheck:
        return lambda server: [Finding.ok("sink", "sink console prints the rows")]


class ForeachType(SinkType):
    """``argument`` is ``module:function``."""

    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        from xidstream.pipeline.sinks.foreach import ForeachSink

        return ForeachSink.of(self.argument)

    def checked(self) -> str:
        from xidstream.pipeline.sinks.foreach import resolve

        resolve(self.argument)
        return self.argument

    def check(self, storage_uri: str) -> SinkCheck:
        from xidstream.pipeline.sinks.sink_findings import check_of_named_function

        return check_of_named_function(self.argument)
