"""The manifest of the base tables: at which LSN which version of which of them counts.

A *base table* is a plain Delta table below ``URI/current/`` that holds what a table of the source held at one LSN. A
refresh (``pipeline.mirror``) brings all tables of a slot to the same LSN, one Delta commit after the other, and so a
reader of two tables could meet them between two of these commits. The manifest says what belongs together. It is a
Delta table, too, ``URI/current/_manifest``, and each refresh appends its lines to it in one commit, one line for each
table. A reader takes the lines of the greatest ``lsn`` of a slot, and reads each table they name with its version. Only
what the manifest names counts: a base table may be ahead of it, where a refresh was cut short.

| column | |
| --- | --- |
| ``slot`` | system identifier/database/slot, which is the application id of the log's commits |
| ``lsn`` | all transactions with a commit LSN up to this one are in the tables, and no others |
| ``refreshed_at`` | when the refresh was committed |
| ``table`` | ``schema.table`` |
| ``directory`` | of the base table, below ``URI/current`` |
| ``generation``, ``place`` | the snapshot that the base table comes from (``_snapshots``) |
| ``version`` | Delta's version of the base table |

The commits carry application transactions: ``mirror/SLOT`` is the LSN, ``mirror/SLOT/owner`` is the number of the
mirror that refreshes. A mirror takes the next higher number when it begins (``claim``), and this number stands in each
of its commits. So one that was overtaken completes nothing more.

Rejected: a JSON file in place of a Delta table, which no engine reads as it reads the tables; one Delta transaction
over all tables, which Delta has not.

Called by ``pipeline.state`` for reading (``base_at``), and by ``pipeline.mirror``. deltalake only, no Spark.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from xidstream.pipeline.errors import StorageFault, Superseded
from xidstream.pipeline.spark.delta_table import MAX_VERSION, NOTHING, DeltaTableWriter, SnapshotOutdated
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.spark.parquet_files import ParquetFiles
from xidstream.pipeline.spark.placement import Target
from xidstream.pipeline.spark.table_metadata import STATISTICS, TableMetadata

CURRENT: Final = "current"
MANIFEST: Final = "_manifest"
ATTEMPTS: Final = 8
"""To commit beside other mirrors' commits."""

MANIFEST_SCHEMA: Final = pa.schema(
    [
        pa.field("slot", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("refreshed_at", pa.timestamp("us", tz="UTC")),
        pa.field("table", pa.string()),
        pa.field("directory", pa.string()),
        pa.field("generation", pa.int64()),
        pa.field("place", pa.int64()),
        pa.field("version", pa.int64()),
    ]
)

KEEPS_ITS_LOG: Final = {"delta.enableExpiredLogCleanup": "false"}
"""Delta removes the log of old versions by its own clock. What the manifest names must stay readable."""

_ABOUT: Final = TableMetadata(
    "One line for each base table and refresh: the lines of a slot's greatest lsn name versions of one moment.",
    {STATISTICS: "lsn", **KEEPS_ITS_LOG},
    {},
)


@dataclass(frozen=True)
class ManifestLine:
    """One base table of one refresh. ``slot`` is the log's application id."""

    slot: str
    lsn: int
    refreshed_at: datetime.datetime
    table: str
    directory: str
    generation: int
    place: int
    version: int


@dataclass(frozen=True)
class Base:
    """A base table at the LSN to which it was brought. ``files`` are absolute paths, or URIs."""

    files: tuple[str, ...]
    lsn: int
    version: int
    location: Location


def current(root: Location) -> Location:
    return root.child(CURRENT)


def base_at(
    root: Location, application_id: str, table: str, generation: int, lsn: int, place: int | None = None
) -> Base | None:
    """The newest base of this generation of ``schema.table`` at or below ``lsn``; None where there is none.

    ``place`` is the generation's, and checked where it is given: a table that two servers had under one name can have
    equal numbers.
    """
    writer = DeltaTableWriter.open(current(root).child(MANIFEST), MANIFEST)
    if writer is None:
        return None
    lsns = sorted({found for _, found in _lsn_of_files(writer) if found <= lsn}, reverse=True)
    # Nearly always it is in the first one.
    for some in (lsns[:1], lsns[1:]):
        fitting = [
            line
            for line in (_lines_of(writer, application_id, some[-1], some[0]) if some else ())
            if (line.table, line.generation) == (table, generation) and place in (None, line.place)
        ]
        if fitting:
            return base_of(root, max(fitting, key=lambda line: line.lsn))
    return None


def base_of(root: Location, line: ManifestLine) -> Base:
    location = current(root).child(line.directory)
    table = DeltaTable(location.uri, version=line.version, storage_options=location.storage_options)
    return Base(tuple(table.file_uris()), line.lsn, line.version, location)


def read_lines(root: Location, application_id: str | None = None) -> list[ManifestLine]:
    """All lines, of one slot or of all; none where there is no manifest. Ascending by LSN, then by table."""
    writer = DeltaTableWriter.open(current(root).child(MANIFEST), MANIFEST)
    return [] if writer is None else _lines_of(writer, application_id)


def newest(lines: Iterable[ManifestLine]) -> list[ManifestLine]:
    """Those of the greatest LSN, which belong together. ``lines`` are of one slot."""
    lines = list(lines)
    last = max((line.lsn for line in lines), default=NOTHING)
    return [line for line in lines if line.lsn == last]


def _lines_of(
    writer: DeltaTableWriter, application_id: str | None, first: int = 0, last: int = MAX_VERSION
) -> list[ManifestLine]:
    rows = writer.read(MANIFEST_SCHEMA.names, "lsn", first, last).to_pylist()
    lines = [ManifestLine(**row) for row in rows if application_id in (None, row["slot"])]
    return sorted(lines, key=lambda line: (line.lsn, line.table))


def _files_before(writer: DeltaTableWriter, before: datetime.datetime) -> list[str]:
    """The files whose lines are all of refreshes that were superseded before that time."""
    lines = _lines_of(writer, None)
    kept = {line.lsn for line in lines if line.refreshed_at >= before}
    for slot in {line.slot for line in lines}:
        earlier = [line.lsn for line in lines if line.slot == slot and line.refreshed_at < before]
        kept |= {max(earlier)} if earlier else set()
    return [path for path, lsn in _lsn_of_files(writer) if lsn not in kept]


def _lsn_of_files(writer: DeltaTableWriter) -> list[tuple[str, int]]:
    """The manifest's files, one for each refresh, and their LSNs."""
    files = writer.files()
    if not files.num_rows:
        return []
    return list(zip(files["path"].to_pylist(), files["min.lsn"].to_pylist(), strict=True))


class ManifestWriter:
    """The manifest as one mirror of one slot writes it. Raises StorageFault and Superseded from every method."""

    def __init__(self, root: Location, application_id: str) -> None:
        self._location = current(root).child(MANIFEST)
        self._slot = application_id
        self._lsn_id = f"mirror/{application_id}"
        self._owner_id = f"{self._lsn_id}/owner"
        self.owner = NOTHING

    def claim(self) -> int:
        """Take the next number. What mirrors with lower ones still commit is refused from here on."""
        for _ in range(ATTEMPTS):
            writer = self._open()
            number = writer.watermark(self._owner_id) + 1
            try:
                writer.commit([], {self._owner_id: number})
            except SnapshotOutdated:
                continue
            self.owner = number
            return number
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to claim it")

    def check(self) -> None:
        """Raise Superseded where a later mirror has claimed the manifest."""
        self._check(self._open())

    @property
    def marks(self) -> dict[str, int]:
        """The application transaction that goes with each commit of this mirror, whatever the table."""
        return {self._owner_id: self.owner}

    def lines(self) -> list[ManifestLine]:
        return _lines_of(self._open(), self._slot)

    def newest(self) -> list[ManifestLine]:
        """Those of the last refresh; none where there was none."""
        writer = self._open()
        lsn = writer.watermark(self._lsn_id)
        return _lines_of(writer, self._slot, lsn, lsn) if lsn else []

    def last_lsn(self) -> int:
        return self._open().watermark(self._lsn_id)

    def append(self, lines: Sequence[ManifestLine]) -> None:
        """Name the versions of one refresh, which all have one LSN, above that of the last one."""
        (lsn,) = {line.lsn for line in lines}
        columns = [[getattr(line, name) for line in lines] for name in MANIFEST_SCHEMA.names]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, MANIFEST_SCHEMA, strict=True)]
        rows = pa.RecordBatch.from_arrays(arrays, schema=MANIFEST_SCHEMA)
        for _ in range(ATTEMPTS):
            writer = self._open()
            self._check(writer)
            files = ParquetFiles(self._location, f"data-{uuid.uuid4().hex}-mirror", MANIFEST_SCHEMA, "lsn")
            files.write(rows)
            try:
                writer.commit(files.close(), {self._lsn_id: lsn}, "lsn", marks=self.marks)
            except SnapshotOutdated:
                continue  # Another slot's mirror, or one that overtook us: the next look tells.
            return
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to commit")

    def forget(self, before: datetime.datetime) -> None:
        """Remove the lines of the refreshes that were superseded before this time.

        A reader may have begun with a refresh as long as none followed it. So the newest one before that time stays,
        too. Whole files are removed, and each file is one refresh.
        """
        for _ in range(ATTEMPTS):
            writer = self._open()
            self._check(writer)
            gone = _files_before(writer, before)
            if not gone:
                return
            try:
                writer.swap([], gone, self.marks)
            except SnapshotOutdated:
                continue
            return
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to shorten it")

    def _open(self) -> DeltaTableWriter:
        columns = [Target(f.name, f.type, f.name) for f in MANIFEST_SCHEMA]
        return DeltaTableWriter.open_or_create(self._location, MANIFEST, columns, _ABOUT)

    def _check(self, writer: DeltaTableWriter) -> None:
        check_owner(writer, self._slot, self.owner)


def check_owner(writer: DeltaTableWriter, application_id: str, owner: int) -> None:
    """Raise Superseded where a later mirror of the slot has written to this table."""
    found = writer.watermark(f"mirror/{application_id}/owner")
    if found > owner:
        raise Superseded(
            f"another mirror of slot {application_id.rpartition('/')[2]} has taken over: Delta table {writer.label} is "
            f"written by mirror {found}, this is mirror {owner}",
            remedy="let one mirror alone refresh the base tables of a slot",
        )
