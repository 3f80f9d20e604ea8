"""The manifest of the base tables: at which LSN which version of which of them counts.

A *base table* is a plain table that holds what a table of the source held at one LSN: a Delta table below
``URI/current/``, or an Iceberg table beside the log's (``base_stores``). A refresh (``pipeline.mirror``) brings all
tables of a slot to the same LSN, one commit after the other, and so a reader of two tables could meet them between two
of these commits. The manifest says what belongs together. It is a table, too, ``_manifest`` among the base tables, and
each refresh adds its lines to it in one commit, one line for each table. A reader takes the lines of the greatest
``lsn`` of a slot, and reads each table they name with its version. Only what the manifest names counts: a base table
may be ahead of it, where a refresh was cut short.

Readers read all of it, and a file costs them 0.65 ms of CPU time on a local disk. Its small files are merged as those
of the log are (``pipeline.log_tables.small_files``).

| column | |
| --- | --- |
| ``slot`` | system identifier/database/slot, which is the application id of the log's commits |
| ``lsn`` | all transactions with a commit LSN up to this one are in the tables, and no others |
| ``refreshed_at`` | when the refresh was committed |
| ``table`` | ``schema.table`` |
| ``directory`` | of the base table, below ``URI/current``; its name in the namespace of an Iceberg catalog |
| ``generation``, ``place`` | the snapshot that the base table comes from (``_snapshots``) |
| ``version`` | Delta's version of the base table, or the id of Iceberg's snapshot |

The commits carry watermarks: ``mirror/SLOT`` is the LSN, ``mirror/SLOT/owner`` is the number of the
mirror that refreshes. ``mirror/SLOT/erased`` counts how often an erasure took lines back. A mirror takes the next
higher number when it begins (``claim``), and this number stands in each of its commits. So one that was overtaken
completes nothing more.

Rejected: a JSON file in place of a table, which no engine reads as it reads the tables; one transaction over all
tables, which Delta has not; files for each refresh that stay as they are, of which a day makes 1,440.

Called by ``pipeline.changelog`` for reading (``base_at``), and by ``pipeline.mirror``. No Spark.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import pyarrow as pa

from xidstream.pipeline.changelog.base_stores import BaseStore, BaseVersion, StoredTable
from xidstream.pipeline.errors import StorageFault, Superseded
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, NOTHING, SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.table_metadata import STATISTICS, TableMetadata

MANIFEST: Final = "_manifest"
OWN_FILES: Final = "refresh-"
"""How the paths of a base table's files begin that a mirror writes. Their statistics are exact."""
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
"""Delta removes the log of old versions by its own clock. What the manifest names must stay readable, and the mirror's
vacuum removes what it does not name."""

RETIRED: Final = "erased:"
"""Stands before the ``slot`` of a line that an erasure took back, whose ``lsn`` is ``RETIRED_LSN``: no reader finds it,
also who looks for the greatest ``lsn`` alone. The vacuum keeps the files of its version, for those who found it before,
as long as it keeps those of a refresh that another one followed."""
RETIRED_LSN: Final = 1
"""No commit has it, and 0 would be no statistic."""

_ABOUT: Final = TableMetadata(
    "One line for each base table and refresh: the lines of a slot's greatest lsn name versions of one moment.",
    {STATISTICS: "lsn", **KEEPS_ITS_LOG},
    {},
)


@dataclass(frozen=True)
class ManifestLine:
    """One base table of one refresh: the columns of ``MANIFEST_SCHEMA`` in their order. ``slot`` is the log's
    application id, ``snapshot_lsn`` the column ``place``."""

    slot: str
    lsn: int
    refreshed_at: datetime.datetime
    table: str
    directory: str
    generation: int
    snapshot_lsn: int
    version: int


_ATTRIBUTES: Final = tuple(field.name for field in fields(ManifestLine))


@dataclass(frozen=True)
class Base:
    """A base table at the LSN to which it was brought."""

    at: BaseVersion
    lsn: int
    version: int


def base_at(
    bases: BaseStore,
    application_id: str,
    table: str,
    generation: int,
    lsn: int,
    snapshot_lsn: int | None = None,
) -> Base | None:
    """The newest base of this generation of ``schema.table`` at or below ``lsn``; None where there is none.

    ``snapshot_lsn`` is the generation's, and checked where it is given: a table that two servers had under one name can
    have equal numbers.
    """
    writer = bases.open(MANIFEST, MANIFEST)
    if writer is None:
        return None
    found: ManifestLine | None = None
    # The files of refreshes that may be meant, from the newest on. Nearly always the first one has it.
    for file in sorted(_files(writer), key=lambda file: file.max_lsn, reverse=True):
        if file.min_lsn > lsn or (found is not None and found.lsn >= file.max_lsn):
            continue
        fitting = [
            line
            for line in _lines(writer.rows_of({file.path}))
            if (line.slot, line.table, line.generation) == (application_id, table, generation)
            and line.lsn <= lsn
            and snapshot_lsn in (None, line.snapshot_lsn)
        ]
        found = max([*fitting, *([found] if found else [])], key=lambda line: line.lsn, default=None)
    return None if found is None else base_of(bases, found)


def base_of(bases: BaseStore, line: ManifestLine) -> Base | None:
    """The base table that a line names; None where its directory holds another table by now, or where this version is
    gone: a vacuum came after the look at the manifest, or another engine.

    Somebody may have removed the directory, and the next refresh made it anew. Delta counts versions from 0 again then,
    so the number alone would find rows of a later moment. What a version holds, its watermarks say.
    """
    found = bases.at(line.directory, line.version)
    if found is None or not _is_of(found, line):
        return None
    return Base(found, line.lsn, line.version)


def _is_of(version: BaseVersion, line: ManifestLine) -> bool:
    """Whether a version of the base table is of the line's moment, and not of a refresh that is cut short."""
    mark = f"mirror/{line.slot}"
    lsn, snapshot_lsn = version.watermark(mark), version.watermark(f"{mark}/place")
    return lsn is not None and lsn <= line.lsn and snapshot_lsn == line.snapshot_lsn


def read_lines(bases: BaseStore, application_id: str | None = None) -> list[ManifestLine]:
    """All lines, of one slot or of all; none where there is no manifest. Ascending by LSN, then by table."""
    writer = bases.open(MANIFEST, MANIFEST)
    return [] if writer is None else _lines_of(writer, application_id)


def newest(lines: Iterable[ManifestLine]) -> list[ManifestLine]:
    """The lines of the greatest LSN, which belong together. ``lines`` are of one slot."""
    lines = list(lines)
    last = max((line.lsn for line in lines), default=NOTHING)
    return [line for line in lines if line.lsn == last]


@dataclass(frozen=True)
class _File:
    """One of the manifest's files. ``path`` is as in ``StoredTable.files``."""

    path: str
    min_lsn: int
    max_lsn: int


def _files(writer: StoredTable) -> list[_File]:
    listed = writer.files()
    if not listed.num_rows:
        return []
    columns = (listed[name].to_pylist() for name in ("path", "min.lsn", "max.lsn"))
    return [_File(*values) for values in zip(*columns, strict=True)]


def _lines(rows: pa.Table) -> list[ManifestLine]:
    """Ascending by LSN, then by table."""
    columns = [rows[name].to_pylist() for name in MANIFEST_SCHEMA.names]
    lines = [ManifestLine(*values) for values in zip(*columns, strict=True)]
    return sorted(lines, key=lambda line: (line.lsn, line.table))


def _lines_of(
    writer: StoredTable, application_id: str | None, first: int = 0, last: int = MAX_VERSION
) -> list[ManifestLine]:
    lines = _lines(writer.read(MANIFEST_SCHEMA.names, "lsn", first, last))
    return [line for line in lines if application_id in (None, line.slot)]


def _superseded(lines: Iterable[ManifestLine], before: datetime.datetime) -> set[tuple[str, int]]:
    """The refreshes, (slot, LSN), that another one followed before that time.

    Several machines may have stamped them. One whose clock is behind stamps a refresh earlier than the one ahead of it
    by its LSN. So each counts as no earlier than all that it follows."""
    earlier: dict[str, set[int]] = {}
    latest: dict[str, datetime.datetime] = {}
    for line in sorted(lines, key=lambda line: line.lsn):
        latest[line.slot] = max(line.refreshed_at, latest.get(line.slot, line.refreshed_at))
        if latest[line.slot] < before:
            earlier.setdefault(line.slot, set()).add(line.lsn)
    return {(slot, lsn) for slot, lsns in earlier.items() for lsn in lsns - {max(lsns)}}


class ManifestWriter:
    """The manifest as one mirror of one slot writes it. Raises StorageFault and Superseded from every method."""

    def __init__(self, bases: BaseStore, application_id: str) -> None:
        self._bases = bases
        self._slot = application_id
        self._lsn_id = f"mirror/{application_id}"
        self._owner_id = f"{self._lsn_id}/owner"
        self._erased_id = f"{self._lsn_id}/erased"
        self.owner = NOTHING

    def claim(self) -> int:
        """Take the next number. What mirrors with lower ones still commit is refused from here on."""
        for _ in range(ATTEMPTS):
            writer = self._open()
            number = writer.watermark(self._owner_id) + 1
            try:
                writer.commit([], {self._owner_id: number})
            except SnapshotOutdated:
                self._bases.forget()
                continue
            self.owner = number
            return number
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to claim it")

    def check(self) -> None:
        """Raise Superseded where a later mirror has claimed the manifest."""
        self.look()

    def look(self) -> tuple[int, int]:
        """The LSN of the last refresh, and how often ``take_back`` was done. Raises as ``check``."""
        writer = self._open()
        self._check(writer)
        return writer.watermark(self._lsn_id), writer.watermark(self._erased_id)

    @property
    def marks(self) -> dict[str, int]:
        """The application transaction that goes with each commit of this mirror, whatever the table."""
        return {self._owner_id: self.owner}

    def lines(self) -> list[ManifestLine]:
        return _lines_of(self._open(), self._slot)

    def retired_lines(self) -> list[ManifestLine]:
        """The lines that erasures took back."""
        return _lines_of(self._open(), RETIRED + self._slot)

    def newest(self) -> list[ManifestLine]:
        """The lines of the last refresh; none where there was none."""
        writer = self._open()
        lsn = writer.watermark(self._lsn_id)
        return _lines_of(writer, self._slot, lsn, lsn) if lsn else []

    def append(self, lines: Sequence[ManifestLine], n_erasures: int | None = None) -> None:
        """Name the versions of one refresh, which all have one LSN, above that of the last one. ``n_erasures``: what
        that was when the refresh began. Raises SnapshotOutdated where it is another number: a version may be one with
        rows that were erased since."""
        (lsn,) = {line.lsn for line in lines}
        for _ in range(ATTEMPTS):
            writer = self._open()
            self._check(writer)
            if n_erasures is not None and writer.watermark(self._erased_id) != n_erasures:
                raise SnapshotOutdated(MANIFEST)
            if self._commit(writer, lines, (), lsn):
                return
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to commit")

    def take_back(self, directory: str, is_gone: Callable[[int], bool], version: int) -> None:
        """Take back the lines that name versions of a base table of which ``is_gone``. If one of them is the table's
        newest, ``version`` is named in its place, which has the same rows but for those that were erased.

        Any process may ask for it: it needs no number, and overtakes nobody."""
        if self._bases.open(MANIFEST, MANIFEST) is None:
            return
        for _ in range(ATTEMPTS):
            writer = self._open()
            self.owner = writer.watermark(self._owner_id)
            lines = _lines_of(writer, self._slot)
            ours = [line for line in lines if line.directory == directory]
            gone = [line for line in ours if is_gone(line.version)]
            newest = max(ours, key=lambda line: line.lsn, default=None)
            added = []
            if newest in gone and self._is_at(directory, version, newest):
                added.append(replace(newest, version=version))
            if len(lines) > len(gone) or added:  # else they would be the greatest ones
                now = datetime.datetime.now(datetime.timezone.utc)
                # This machine's clock may be behind that of who refreshed, and the vacuum counts from here.
                now = max([now, *(line.refreshed_at for line in lines)])
                added += [
                    replace(line, slot=RETIRED + line.slot, lsn=RETIRED_LSN, refreshed_at=now)
                    for line in gone
                ]
            n_erased = writer.watermark(self._erased_id) + 1
            if self._rewrite(writer, gone.__contains__, added, erased=n_erased):
                return
        raise StorageFault(
            f"the manifest was changed by others during {ATTEMPTS} attempts to take lines back"
        )

    def forget_retired(self, directory: str) -> None:
        """Remove the lines of a base table that were taken back, with what they keep. Any process may ask for it."""
        if self._bases.open(MANIFEST, MANIFEST) is None:
            return
        of_table = RETIRED + self._slot, directory
        for _ in range(ATTEMPTS):
            writer = self._open()
            self.owner = writer.watermark(self._owner_id)
            if self._rewrite(writer, lambda line: (line.slot, line.directory) == of_table):
                return
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to shorten it")

    def _is_at(self, directory: str, version: int, line: ManifestLine) -> bool:
        found = self._bases.at(directory, version)
        return found is not None and _is_of(found, line)

    def forget(self, before: datetime.datetime) -> None:
        """Remove the lines of the refreshes that were superseded before this time.

        A reader may have begun with a refresh as long as none followed it. So the newest one before that time stays,
        too. A file that has lines of other refreshes is written anew with these.
        """
        for _ in range(ATTEMPTS):
            writer = self._open()
            self._check(writer)
            superseded = _superseded(_lines_of(writer, None), before)

            def goes(line: ManifestLine, superseded: set[tuple[str, int]] = superseded) -> bool:
                if line.slot.startswith(RETIRED):
                    return line.refreshed_at < before
                return (line.slot, line.lsn) in superseded

            if self._rewrite(writer, goes):
                return
        raise StorageFault(f"the manifest was changed by others during {ATTEMPTS} attempts to shorten it")

    def _rewrite(
        self,
        writer: StoredTable,
        goes: Callable[[ManifestLine], bool],
        added: Sequence[ManifestLine] = (),
        *,
        erased: int | None = None,
    ) -> bool:
        """Remove lines, and add some. Returns as ``_commit``, and True where there is nothing to do."""
        by_file = {file.path: _lines(writer.rows_of({file.path})) for file in _files(writer)}
        touched = {path for path, lines in by_file.items() if any(map(goes, lines))}
        if not touched and erased is None:
            return True
        kept = [line for path in touched for line in by_file[path] if not goes(line)]
        return self._commit(writer, [*kept, *added], touched, erased=erased)

    def _commit(
        self,
        writer: StoredTable,
        lines: Iterable[ManifestLine],
        removed: Collection[str],
        lsn: int | None = None,
        erased: int | None = None,
    ) -> bool:
        """Write the lines as one file in place of those ``removed``. ``lsn`` is the refresh's, where it is one;
        ``erased``: how often lines were taken back, where that is done.

        Returns whether it succeeded. If not, another slot's mirror has committed, or one that overtook us: the next
        look tells.
        """
        lines = sorted(lines, key=lambda line: (line.lsn, line.table))
        columns = [[getattr(line, name) for line in lines] for name in _ATTRIBUTES]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, MANIFEST_SCHEMA, strict=True)]
        files = ParquetFiles(writer.location, f"data-{uuid.uuid4().hex}-mirror", MANIFEST_SCHEMA, "lsn")
        files.write(pa.RecordBatch.from_arrays(arrays, schema=MANIFEST_SCHEMA))
        moved = {} if lsn is None else {self._lsn_id: lsn}
        if erased is not None:
            moved[self._erased_id] = erased
        try:
            writer.commit(files.close(), moved, "lsn", marks=self.marks, removed=sorted(removed))
        except SnapshotOutdated:
            self._bases.forget()
            return False
        return True

    def _open(self) -> StoredTable:
        columns = [TableColumn(f.name, f.type, f.name) for f in MANIFEST_SCHEMA]
        return self._bases.open_or_create(MANIFEST, MANIFEST, columns, _ABOUT)

    def _check(self, writer: StoredTable) -> None:
        check_owner(writer, self._slot, self.owner)


def check_owner(writer: StoredTable, application_id: str, owner: int) -> None:
    """Raise Superseded where a later mirror of the slot has written to this table."""
    found = writer.watermark(f"mirror/{application_id}/owner")
    if found > owner:
        raise Superseded(
            f"another mirror of slot {application_id.rpartition('/')[2]} has taken over: {writer.title} is "
            f"written by mirror {found}, this is mirror {owner}",
            remedy="let one mirror alone refresh the base tables of a slot",
        )
