"""Base tables without Spark: real Delta tables, and mirrors whose refresh is one file for each table."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from xidstream.pipeline.changelog.base_stores import BoundedFile
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current, statistics
from xidstream.pipeline.changelog.manifest import ManifestLine, ManifestWriter, read_lines
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks, NewFile, about_base
from xidstream.pipeline.mirror.key_ranges import FileFacts, RangedKey

SLOT = "7/shop/orders"
TABLE = "public.a"
FIELDS = [pa.field("id", pa.int64()), pa.field("v", pa.int64())]
KEY = RangedKey.of(("id",), {field.name: field.type for field in FIELDS})
N_FILES = 2
"""Of a table: a refresh adds one, and removes the oldest of more."""


def delta_statistics(key: RangedKey, facts: FileFacts) -> str:
    """What the Delta log says of a file."""
    return statistics(BoundedFile("any", 1, facts.n_rows, key.bounds(facts)))


class Attempt:
    """A refresh of one table up to its commit: its file is written, in the version that it found. ``values``: of all
    rows, by key."""

    def __init__(
        self, root: Location, owner: int, lsn: int, table: str, values: dict[int, int] | None = None
    ) -> None:
        self.lsn = lsn
        self._is_all = values is not None
        marks = MirrorMarks(SLOT, owner)
        about = about_base(table, ("id",), KEY)
        self.base = BaseTable.open_or_create(DeltaBases(root), table, table, FIELDS, about, marks)
        path = f"refresh-{owner}-{lsn}/part.parquet"
        self.path = self.base.absolute(path)
        values = {1: lsn, 2: lsn} if values is None else values
        rows = pa.table({"id": list(values), "v": list(values.values())}, schema=pa.schema(FIELDS))
        with self.base.location.create(path) as file:
            pq.write_table(rows, file)
        self._new = NewFile.written(self.base.location, path, KEY)

    def commit(self) -> int:
        """The version."""
        there = sorted(self.base.files(KEY), key=lambda file: int(re.findall(r"\d+", file.path)[1]))
        gone = there if self._is_all else there[: max(0, len(there) + 1 - N_FILES)]
        self.base.replace([self._new], KEY, gone, self.lsn, 99)
        return self.base.version


class PlainMirror:
    """The one that began last, from here on; or the one that took ``number`` before."""

    def __init__(self, root: Location, tables: Iterable[str] = (TABLE,), number: int | None = None) -> None:
        self.root = root
        self.tables = tuple(tables)
        self.manifest = ManifestWriter(DeltaBases(root), SLOT)
        if number is None:
            self.manifest.claim()
        else:
            self.manifest.owner = number

    def begin(self, lsn: int, table: str = TABLE, values: dict[int, int] | None = None) -> Attempt:
        return Attempt(self.root, self.manifest.owner, lsn, table, values)

    def refresh(
        self, lsn: int, at: datetime.datetime | None = None, values: dict[int, int] | None = None
    ) -> None:
        """``values``: of all rows of each table, by key."""
        now = at or datetime.datetime.now(datetime.timezone.utc)
        versions = {table: self.begin(lsn, table, values).commit() for table in self.tables}
        lines = [ManifestLine(SLOT, lsn, now, table, table, 1, 99, v) for table, v in versions.items()]
        self.manifest.append(lines)


def table_of(root: Location, table: str = TABLE, version: int | None = None) -> DeltaTable:
    location = current(root).child(table)
    return DeltaTable(location.uri, version=version, storage_options=location.storage_options)


def files_below(root: Location, table: str = TABLE) -> set[str]:
    """What is on disk."""
    found = os.walk(current(root).child(table).uri)
    return {
        os.path.join(folder, name)
        for folder, _, names in found
        for name in names
        if "_delta_log" not in folder
    }


def lost_files(root: Location) -> set[str]:
    """What a version that the manifest names, or a present one, has and the disk has not."""
    versions: set[tuple[str, int | None]] = {
        (line.directory, line.version) for line in read_lines(DeltaBases(root), SLOT)
    }
    versions |= {(directory, None) for directory, _ in versions}
    needed = {file for table, version in versions for file in table_of(root, table, version).file_uris()}
    return {file for file in needed if not os.path.exists(file)}
