"""The Delta tables below one root, as a sink of tables, and all that goes with it, asks for them.

``upkeep`` is told of the commits of those that a run writes. Who only looks at a root gives no retention: such tables
are described by nobody, and nothing is removed.

Snapshots are committed beside the batches, on other threads and with handles of their own. The tables' upkeep is the
batches'. ``_snapshots`` alone no batch writes to, so whoever commits snapshots tells that upkeep of it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from xidstream.pipeline import events
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import DELTA, TableColumn
from xidstream.pipeline.log_tables.layout import layout_problem
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.table_metadata import OF_OWN_TABLES, TableMetadata, metadata_of_source
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.delta_retention import DeltaRetention
from xidstream.pipeline.settings.log_layout import LogLayout

_LOGGER: Final = logging.getLogger(__name__)


class DeltaTables:
    """``retention``: what the run tells its tables; None for who only looks, or adds snapshots. ``shorten``: cuts the
    change logs by it, when their upkeep has its turn. ``beside``: the batches' tables, for who adds snapshots.
    ``layout``: which columns merged files are ordered by; None leaves to the tables what they have."""

    rules = DELTA
    kept_handles = 1_000

    def __init__(
        self,
        location: Location,
        retention: DeltaRetention | None = None,
        shorten: Callable[[], None] = lambda: None,
        beside: DeltaTables | None = None,
        layout: LogLayout | None = None,
    ) -> None:
        self._layout = layout
        self._logged: set[tuple[str, str]] = set()
        self.location = location
        self.root = redacted(location.uri)
        self._retention = retention
        self._upkeep = None if retention is None else Upkeep(retention, shorten=shorten)
        self._own = {
            name: dataclasses.replace(about, retention=retention) for name, about in OF_OWN_TABLES.items()
        }
        self._of_snapshots = self._upkeep
        if beside is not None:
            self._of_snapshots = beside._upkeep
            self._own[locations.SNAPSHOTS] = beside._own[locations.SNAPSHOTS]

    def title(self, label: str) -> str:
        return f"Delta table {label}"

    def key_of(self, schema: str, table: str) -> str:
        return locations.encode_table(schema, table)

    def about(self, relation: RelationVersion) -> TableMetadata:
        column = None if self._layout is None else self._layout.of(relation.name)
        if column:
            self._check_layout(relation, column)
        return metadata_of_source(relation, self._retention, column)

    def _check_layout(self, relation: RelationVersion, column: str) -> None:
        """Warn, once, where new rows cannot be ordered by it. They stay in the order of their commits."""
        problem = layout_problem(relation, column)
        if problem is None or (relation.name, problem) in self._logged:
            return
        self._logged.add((relation.name, problem))
        text = (
            f"log_layout: table {relation.name} {problem}; new rows stay in the order of their commits, and nothing "
            "else changes"
        )
        _LOGGER.warning(events.Event("layout_not_possible", text, table=relation.name))

    def about_own(self, key: str) -> TableMetadata:
        return self._own[key]

    def open(self, key: str, label: str) -> DeltaTableWriter | None:
        writer = DeltaTableWriter.open(self.location.child(key), label)
        return None if writer is None else self._kept(key, writer)

    def open_or_create(
        self,
        key: str,
        label: str,
        columns: Sequence[TableColumn],
        about: TableMetadata,
        brought: Sequence[VersionSince] = (),
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> DeltaTableWriter:
        location = self.location.child(key)
        writer = DeltaTableWriter.open_or_create(location, label, columns, about, brought, marks=marks)
        return self._kept(key, writer)

    def together(self) -> None:
        """Delta commits each table by itself."""
        return None

    def close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.close()

    def _kept(self, key: str, writer: DeltaTableWriter) -> DeltaTableWriter:
        writer.upkeep = self._of_snapshots if key == locations.SNAPSHOTS else self._upkeep
        return writer
