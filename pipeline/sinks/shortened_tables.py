"""What ``log_shortening`` asks of the tables whose log it cuts: the seam between its rule and the formats.

``ShortenedRoot`` has the tables, and what is beside the log and holds it: consumers' positions and base tables, where a
format has them. ``ShortenedTable`` is one table on one snapshot: which files it has, and the one commit that removes
some of them, adds others, and tells the cut. A commit of somebody else in between makes it fail.

Delta's are here. Iceberg's are in ``iceberg_shortening``, which imports pyiceberg.

Called by ``log_shortening`` and the sinks. No Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import pyarrow as pa

from xidstream.pipeline.changelog.consumers import ConsumerPosition, read_positions
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.log_root import DeltaRoot, LogRoot
from xidstream.pipeline.changelog.manifest import ManifestLine, base_of, read_lines
from xidstream.pipeline.changelog.slots import application_ids
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import LogTableWriter
from xidstream.pipeline.log_tables.parquet_files import WrittenFile


class ShortenedTable(ABC):
    """One table of the log. ``writer``: the table, as whoever checks its owner takes it."""

    def __init__(self, writer: LogTableWriter) -> None:
        self.writer = writer
        self.location: Location = writer.location

    def watermark(self, application_id: str) -> int:
        return self.writer.watermark(application_id)

    def paths(self) -> list[str]:
        return self.writer.paths()

    @property
    def ranged(self) -> Collection[str]:
        """The columns whose ranges the table has of each file."""
        return self.writer.ranged

    @abstractmethod
    def check_plain(self) -> None:
        """Raise Unsupported where the rows of the snapshot's files are not the table's."""

    @abstractmethod
    def files(self) -> pa.Table:
        """The files of the snapshot: ``path``, ``size_bytes``, and of each ranged column ``min.…`` and ``max.…``."""

    @abstractmethod
    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        removed: Sequence[str],
    ) -> None:
        """Remove these files and append ``files``, as ``LogTableWriter.commit`` appends. Raises SnapshotOutdated where
        somebody else has committed what matters since the snapshot."""


class ShortenedRoot(Protocol):
    """The tables of one log. ``log_root``: the same, for reading."""

    @property
    def log_root(self) -> LogRoot: ...

    def open(self, key: str, label: str) -> ShortenedTable | None:
        """The table as it is now; None where there is none."""
        ...

    def slots(self) -> list[str]:
        """The application ids of the slots that write there."""
        ...

    def positions(self, application_id: str) -> list[ConsumerPosition]:
        """Where all consumers of a slot's log have come to."""
        ...

    def base_lines(self, application_id: str) -> list[ManifestLine]:
        """The manifest's lines of all base tables that a mirror of the slot has made, ascending by LSN."""
        ...

    def has_base(self, line: ManifestLine) -> bool:
        """Whether the base table that the line names is there."""
        ...


class DeltaShortenedTable(ShortenedTable):
    def __init__(self, writer: DeltaTableWriter) -> None:
        super().__init__(writer)
        self._table = writer

    def check_plain(self) -> None:
        self._table.check_plain()

    def files(self) -> pa.Table:
        return self._table.files()

    def commit(
        self,
        files: Sequence[WrittenFile],
        versions: Mapping[str, int],
        lsn_column: str = "_commit_lsn",
        *,
        marks: Mapping[str, int] = MappingProxyType({}),
        removed: Sequence[str],
    ) -> None:
        self._table.commit(files, versions, lsn_column, marks=marks, removed=removed)


class DeltaShortenedRoot:
    """The Delta tables below ``root``."""

    def __init__(self, root: Location) -> None:
        self._root = root

    @property
    def log_root(self) -> LogRoot:
        return DeltaRoot(self._root)

    def open(self, key: str, label: str) -> ShortenedTable | None:
        writer = DeltaTableWriter.open(self._root.child(key), label)
        return None if writer is None else DeltaShortenedTable(writer)

    def slots(self) -> list[str]:
        return application_ids(self._root.child(locations.TRANSACTIONS))

    def positions(self, application_id: str) -> list[ConsumerPosition]:
        return read_positions(self._root, application_id)

    def base_lines(self, application_id: str) -> list[ManifestLine]:
        return read_lines(DeltaBases(self._root), application_id)

    def has_base(self, line: ManifestLine) -> bool:
        return base_of(DeltaBases(self._root), line) is not None
