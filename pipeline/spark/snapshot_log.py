"""The Delta sink's side of snapshots: a table's rows in one commit, and the line about them in ``_snapshots``.

Readers write a snapshot's Parquet files straight into the directory of the Delta table. Nobody names them before the
table's snapshot is complete. Then one commit names them all, under an application id of their own (``<application
id>/snapshot``, whose version is the generation's number): the slot's own watermark is above their place by then, and
its rule would drop them. The line in ``_snapshots`` comes behind it, under an application id of the table's
(``<application id>/snapshot/<directory>``). So each of the two commits is made once, however often it is asked for. A
fold takes no notice of rows that no line names.

A crash between the two commits leaves rows without a line. The storage has the generation's bounds then
(``pipeline.segments.snapshot_record``), and ``commit`` is asked for again, with no files to name.

A third thing is told here: up to which LSN it is proven that the generations which stand are what the tables were
(``prove``). It is an application transaction of ``_transactions`` (``<application id>/proven``), so a reader has both
of its bounds from one snapshot of one table. A generation that ends stands up to what was proven by then: its second
line says so (``until``).

Each call opens the tables anew, because the sink commits to the same ones on another thread. Whoever of the two comes
second finds the snapshot of the log outdated, and takes a new one (``delta_table``). The number of the run's hold on
the slot goes with every commit, so a run that was taken over completes nothing (``ownership``).

Rejected: the sink's own thread and its open tables. A batch that Spark writes for minutes would hold up every table.

Runs in the driver's process; from any thread.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa

from xidstream.pipeline.credentials import holds_secret_option
from xidstream.pipeline.errors import SnapshotInterrupted, StorageFault, Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.rows import contract_schema
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark import naming
from xidstream.pipeline.spark.attempt_files import missing, remove
from xidstream.pipeline.spark.delta_table import MAX_VERSION, DeltaTableWriter, SnapshotOutdated
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.spark.ownership import Ownership
from xidstream.pipeline.spark.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.spark.placement import Conform, Target, place
from xidstream.pipeline.spark.relation_history import VersionSince
from xidstream.pipeline.spark.spark_errors import fault_of
from xidstream.pipeline.spark.table_metadata import NOTHING_KNOWN, OF_OWN_TABLES, metadata_of_source

ATTEMPTS: Final = 8
"""Of one commit beside the sink's own: each failure means that the sink's got through."""

SNAPSHOTS_SCHEMA: Final = pa.schema(
    [
        pa.field("table", pa.string()),
        pa.field("relid", pa.int64()),
        pa.field("generation", pa.int64()),
        pa.field("place", pa.int64()),
        pa.field("valid_from", pa.int64()),
        pa.field("xmin", pa.int64()),
        pa.field("xmax", pa.int64()),
        pa.field("xip", pa.list_(pa.int64())),
        pa.field("key", pa.list_(pa.string())),
        pa.field("state", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("until", pa.int64()),
        pa.field("contained_upto", pa.int64()),
        pa.field("rows", pa.int64()),
    ]
)
"""One row for each generation that finished, and one more when it has ended. The last row of a generation counts.
``until``: the last LSN at which a generation that has ended still stands; null in the row of one that finished.
``contained_upto``: all that committed up to this LSN is in the snapshot; null where none is known. ``rows``: of the
snapshot; null in the rows of an earlier xidstream, as ``contained_upto`` is."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class SnapshotTarget:
    """Where readers write one table's files, and in which columns. ``directory``: below ``table``, of this attempt's
    alone."""

    table: Location
    directory: str
    conform: Conform


@dataclass(frozen=True)
class GenerationLine:
    """``table``: ``schema.table``. ``place`` and ``valid_from`` are LSNs. ``is_ours``: whether a run of this slot has
    told it, and none told later of its table."""

    table: str
    relid: int
    number: int
    place: int
    valid_from: int
    state: GenerationState
    is_ours: bool


class SnapshotLog:
    """One for each claim of the sink: it knows what it was told of parked tables, at the claim and since.

    Raises Superseded, SinkDiverged, StorageFault and SinkFailed from every method."""

    def __init__(self, root: Location, application_id: str, ownership: Ownership) -> None:
        self._root = root
        self._application_id = application_id
        self._ownership = ownership
        self._parked: dict[tuple[int, Lsn], ParkedTable] = {}
        # A generation's line comes before a park, which ends it, or behind, and then ends it itself.
        self._parking = threading.Lock()
        self._proofs: DeltaTableWriter | None = None

    def lines(self, makes: bool) -> list[GenerationLine]:
        """The last state of each generation, by table and number; of all slots that write below this root.

        ``makes``: make ``_snapshots`` where it is not, as a run must that may add lines. After this, whoever had the
        slot before adds none. A run that takes no snapshots leaves no table behind that says so.
        """

        def read() -> list[GenerationLine]:
            columns = ["table", "relid", "generation", "place", "valid_from", "state"]
            writer = self._snapshots(makes=makes)
            if writer is None:
                return []
            rows = writer.read(columns, "place", 0, MAX_VERSION).to_pylist()
            found: dict[tuple[str, int, int], GenerationLine] = {}
            # Of the two rows of a generation that has ended, that one counts, wherever it stands.
            for row in sorted(rows, key=lambda row: bool(row["state"] == GenerationState.ENDED.value)):
                ours = writer.watermark(self._line_id(row["table"])) // 2 == row["generation"]
                line = GenerationLine(
                    row["table"],
                    row["relid"],
                    row["generation"],
                    row["place"],
                    row["valid_from"],
                    GenerationState(row["state"]),
                    ours,
                )
                found[line.table, line.number, line.place] = line
            lines = sorted(found.values(), key=lambda line: (line.table, line.number))
            standing = (each for each in lines if each.is_ours and each.state is GenerationState.FINISHED)
            self._ownership.check_snapshots(writer, max((each.valid_from for each in standing), default=0))
            self._claim(writer)
            return lines

        return self._guarded(naming.SNAPSHOTS, read)

    def target(self, relation: RelationVersion, place_lsn: Lsn) -> SnapshotTarget:
        """Make the table, or widen it, for what the snapshot at ``place_lsn`` has."""
        if holds_secret_option(self._root.storage_options or {}):
            raise Unsupported(
                "snapshots are read by Ray's actors, to which no credentials are sent: storage_options hold some",
                remedy="give each node its own credentials (docs/security.md), and leave them out of storage_options",
            )
        directory = naming.encode_table(relation.schema, relation.table)
        about = metadata_of_source(relation)

        def prepare() -> SnapshotTarget:
            location = self._root.child(directory)
            found = DeltaTableWriter.open(location, relation.name)
            placement = place(() if found is None else found.columns, contract_schema(relation))
            brought = [VersionSince(self._application_id, place_lsn, relation, placement.names)]
            writer = found or DeltaTableWriter.open_or_create(
                location, relation.name, placement.columns, about, brought
            )
            self._ownership.check(writer)
            known = {column.name for column in writer.columns}
            writer.add_columns([column for column in placement.columns if column.name not in known])
            # The other properties are those of the newest layout in the stream.
            writer.describe(about if found is None else NOTHING_KNOWN, brought)
            conform = Conform.of(placement.columns, placement.names)
            # Whoever had the slot before can name no files here after this.
            self._claim(writer)
            return SnapshotTarget(location, f"snapshot-{uuid.uuid4().hex}", conform)

        return self._guarded(relation.name, prepare)

    def discard(self, target: SnapshotTarget) -> None:
        """Remove what an attempt wrote that has failed. A table that names it keeps it."""

        def removed() -> None:
            writer = DeltaTableWriter.open(target.table, target.directory)
            if writer is not None:
                self._ownership.check(writer)
                if any(path.startswith(target.directory) for path in writer.files()["path"].to_pylist()):
                    return
            remove(target.table, target.directory)

        self._guarded(target.directory, removed)

    def commit(self, generation: Generation, files: Sequence[WrittenFile] | None) -> bool:
        """Name the files, unless this generation's were named before, and add its line.

        With None nothing is named: returns False where the generation's files were not named before. Where a file is
        gone, nothing is named either, and SnapshotInterrupted raised: take the snapshot again. A later snapshot
        of the table has a higher place, so what a run that was taken over has named is never taken for this one.

        The generation of a table that was parked meanwhile ends in the same commit.
        """
        directory = naming.encode_table(generation.relation.schema, generation.relation.table)
        rows_id, place = f"{self._application_id}/snapshot", int(generation.bounds.place)

        def commit_rows() -> int | None:
            """How many there are; None where they were not named."""
            writer = DeltaTableWriter.open(self._root.child(directory), generation.name)
            held = 0 if writer is None else writer.watermark(rows_id)
            if writer is not None and held == place:
                return _n_rows(files, writer, place)
            if writer is None or files is None:
                return None
            self._ownership.check(writer)
            if Lsn(held).next_record > Lsn(place).next_record:
                raise self._ownership.diverged(
                    f"Delta table {writer.label} has a snapshot that was taken at {Lsn(held)}, and a later one was "
                    f"taken at {Lsn(place)}: the server was restored, or failed over, to an older state"
                )
            if held > place:
                return None  # an earlier xidstream's, at the same position, which had a place one byte higher
            gone = missing(writer.location, [file.path for file in files])
            if gone:
                raise SnapshotInterrupted(
                    f"table {generation.name}: {len(gone)} of {len(files)} files of its snapshot were removed before "
                    "it was complete: a vacuum keeps what nobody names yet for too short a time"
                )
            reach("committing_snapshot")
            # The sink may have written for minutes, for a commit that a merge would have it do again.
            writer.commit(files, {rows_id: place}, marks=self._ownership.marks, merges=False)
            reach("snapshot_committed")
            return _n_rows(files, writer, place)

        n_rows = self._guarded(generation.name, commit_rows)
        if n_rows is None:
            return False
        with self._parking:
            spoiling = (p for p in self._parked.values() if p.concerns(generation.relid) and p.spoils(place))
            self._add_generation(generation, n_rows, next(spoiling, None))
        return True

    def _add_generation(self, generation: Generation, n_rows: int, spoiled_by: ParkedTable | None) -> None:
        row, version = _row_of(generation, n_rows), 2 * generation.number
        if spoiled_by is None:
            self._add_line(generation.name, version, lambda writer: [row])
            return
        line_id, ended = self._line_id(generation.name), _spoiled_row(row, spoiled_by, self._proven())

        def rows(writer: DeltaTableWriter) -> list[dict[str, Any]]:
            return [ended] if writer.watermark(line_id) >= version else [row, ended]

        self._add_line(generation.name, version + 1, rows)

    def reach(self, lsn: Lsn) -> None:
        """Have ``_transactions`` say that all up to ``lsn`` is in the tables, though no transaction says so.

        Only for a position that the slot is confirmed to, and that no commit to come has. In a quiet database a
        snapshot would be valid from behind the newest commit of the log, and nobody could read its table.
        """

        def move() -> None:
            writer = DeltaTableWriter.open(self._root.child(naming.TRANSACTIONS), naming.TRANSACTIONS)
            assert writer is not None, "the sink has made it"
            if writer.watermark(self._application_id) < lsn:
                self._ownership.check(writer)
                writer.commit([], {self._application_id: int(lsn)}, marks=self._ownership.marks)

        self._guarded(naming.TRANSACTIONS, move)

    def prove(self, lsn: Lsn) -> None:
        """Have readers know that up to ``lsn`` the generations which stand are what the tables were. It is kept: a
        lower one than before changes nothing."""
        proven_id = naming.proven_id(self._application_id)

        def told() -> None:
            # Kept open, for it is called every second. Nobody else moves this mark, but a run that took over.
            if self._proofs is None:
                self._proofs = DeltaTableWriter.open(
                    self._root.child(naming.TRANSACTIONS), naming.TRANSACTIONS
                )
            else:
                self._proofs.refresh()
            writer, self._proofs = self._proofs, None
            assert writer is not None, "the sink has made it"
            self._ownership.check(writer)
            if writer.watermark(proven_id) < lsn:
                writer.commit([], {proven_id: int(lsn)}, marks=self._ownership.marks)
            self._proofs = writer

        self._guarded(naming.TRANSACTIONS, told)

    def _proven(self) -> int:
        writer = DeltaTableWriter.open(self._root.child(naming.TRANSACTIONS), naming.TRANSACTIONS)
        return 0 if writer is None else writer.watermark(naming.proven_id(self._application_id))

    def end(self, line: GenerationLine, reason: str) -> None:
        """Add the line that says why the generation has ended, and up to where it stands, once."""

        def ended(writer: DeltaTableWriter) -> list[dict[str, Any]]:
            rows = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
            found = (r for r in rows if r["state"] == GenerationState.FINISHED.value)
            row = next(r for r in found if (r["table"], r["place"]) == (line.table, line.place))
            return [_ended(row, reason, self._proven())]

        self._add_line(line.table, 2 * line.number + 1, ended)

    def park(self, tables: Sequence[ParkedTable]) -> None:
        """End what stands of these tables where rows of them are left out of the log. That may be several generations:
        of one that was taken before the stream got to the park, the former stands up to the later one's
        ``valid_from``. What it has done once it does not do again."""
        with self._parking:
            known = {key: each.until_lsn for key, each in self._parked.items()}
            told = {(each.relid, each.since_lsn): each for each in tables}
            new = {key: each for key, each in told.items() if known.get(key, INVALID_LSN) != each.until_lsn}
            if new:
                self._end_all_spoiled(list(new.values()))
                self._parked.update(new)

    def _end_all_spoiled(self, parked: Sequence[ParkedTable]) -> None:
        lines = self.lines(makes=False)
        for table in dict.fromkeys(line.table for line in lines if line.is_ours):
            relids = {line.relid for line in lines if line.table == table}
            if any(each.concerns(relid) for each in parked for relid in relids):
                self._guarded(naming.SNAPSHOTS, partial(self._end_spoiled, table, parked))

    def _end_spoiled(self, table: str, parked: Sequence[ParkedTable]) -> None:
        """In one commit, so that no reader finds one of them ended and another not."""
        writer = self._snapshots()
        assert writer is not None
        told = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
        line_id = self._line_id(table)
        newest = writer.watermark(line_id) // 2
        ended = _spoiled([row for row in told if row["table"] == table], parked, newest, self._proven())
        if ended:
            is_newest = any(row["generation"] == newest for row in ended)
            self._append(writer, ended, {line_id: 2 * newest + 1} if is_newest else {})

    def _add_line(
        self, table: str, version: int, make: Callable[[DeltaTableWriter], list[dict[str, Any]]]
    ) -> None:
        def add() -> None:
            writer = self._snapshots()
            assert writer is not None
            line_id = self._line_id(table)
            if writer.watermark(line_id) >= version:
                return
            self._append(writer, make(writer), {line_id: version})
            reach("snapshot_told")

        self._guarded(naming.SNAPSHOTS, add)

    def _append(
        self, writer: DeltaTableWriter, rows: Sequence[dict[str, Any]], versions: Mapping[str, int]
    ) -> None:
        job = f"data-{uuid.uuid4().hex}-driver"
        files = ParquetFiles(self._root.child(naming.SNAPSHOTS), job, SNAPSHOTS_SCHEMA, "place")
        files.write(pa.RecordBatch.from_pylist(rows, schema=SNAPSHOTS_SCHEMA))
        writer.commit(files.close(), versions, "place", marks=self._ownership.marks)

    def _line_id(self, table: str) -> str:
        return f"{self._application_id}/snapshot/{naming.encode(table)}"

    def _snapshots(self, *, makes: bool = True) -> DeltaTableWriter | None:
        """None where there is none, and none is to be made."""
        columns = [Target(f.name, f.type, f.name) for f in SNAPSHOTS_SCHEMA]
        about = OF_OWN_TABLES[naming.SNAPSHOTS]
        location = self._root.child(naming.SNAPSHOTS)
        writer = DeltaTableWriter.open(location, naming.SNAPSHOTS)
        if writer is None and makes:
            writer = DeltaTableWriter.open_or_create(location, naming.SNAPSHOTS, columns, about)
        if writer is not None:
            self._ownership.check(writer)
            there = {column.name for column in writer.columns}
            writer.add_columns([column for column in columns if column.name not in there])
        return writer

    def _claim(self, writer: DeltaTableWriter) -> None:
        if Ownership.owner_of(writer, self._application_id) < self._ownership.number:
            writer.commit([], {}, marks=self._ownership.marks)

    def _guarded(self, label: str, act: Callable[[], _T]) -> _T:
        for _ in range(ATTEMPTS):
            try:
                return act()
            except SnapshotOutdated:
                continue
            except Exception as error:
                raise fault_of(error, f"the snapshot in Delta table {label}") from error
        raise StorageFault(f"Delta table {label} was changed by others during {ATTEMPTS} attempts to commit")


def _n_rows(files: Sequence[WrittenFile] | None, writer: DeltaTableWriter, place: int) -> int:
    """Of the snapshot with that place, whose files are in the table."""
    if files is not None:
        return sum(file.n_rows for file in files)
    return int(writer.read(["_commit_lsn"], "_commit_lsn", place, place).num_rows)


def _row_of(generation: Generation, n_rows: int) -> dict[str, Any]:
    bounds = generation.bounds
    return {
        "table": generation.name,
        "relid": generation.relid,
        "generation": generation.number,
        "place": int(bounds.place),
        "valid_from": int(bounds.valid_from),
        "xmin": bounds.xmin,
        "xmax": bounds.xmax,
        "xip": list(bounds.xip),
        "key": None if generation.key is None else list(generation.key),
        "state": GenerationState.FINISHED.value,
        "reason": None,
        "until": None,
        "contained_upto": int(bounds.contained_upto) or None,
        "rows": n_rows,
    }


def _ended(row: Mapping[str, Any], reason: str, until: int) -> dict[str, Any]:
    return {**row, "state": GenerationState.ENDED.value, "reason": reason, "until": until}


def _spoiled_row(row: Mapping[str, Any], by: ParkedTable, proven: int) -> dict[str, Any]:
    """The first commit of which rows are missing is not part of it."""
    return _ended(row, by.why_no_snapshot_stands, min(proven, int(by.since_lsn) - 1))


def _spoiled(
    rows: Sequence[Mapping[str, Any]], parked: Sequence[ParkedTable], newest: int, proven: int
) -> list[dict[str, Any]]:
    """The lines that end those of one table's generations that stand at an LSN where rows are left out: whose successor
    does not begin before the park. The last one is ours if it has the number ``newest``."""
    ended = {row["place"] for row in rows if row["state"] == GenerationState.ENDED.value}
    finished = [row for row in rows if row["state"] == GenerationState.FINISHED.value]
    finished.sort(key=lambda row: row["place"])
    found = []
    for row, later in itertools.zip_longest(finished, finished[1:]):
        if row["place"] in ended or (later is None and row["generation"] != newest):
            continue
        spoiling = (
            each
            for each in parked
            if each.concerns(row["relid"])
            and each.spoils(row["place"])
            and (later is None or later["valid_from"] > each.since_lsn)
        )
        if (spoiled_by := next(spoiling, None)) is not None:
            found.append(_spoiled_row(row, spoiled_by, proven))
    return found


def told_by(root_uri: str) -> dict[tuple[str, int, Lsn], tuple[GenerationState, str]]:
    """What ``_snapshots`` below a root says now, without a run: the state of each generation, by table, number and
    place, and the reason why one has ended. Raises ConfigError, StorageFault."""
    location = Location.parse(root_uri).child(naming.SNAPSHOTS)
    try:
        writer = DeltaTableWriter.open(location, naming.SNAPSHOTS)
        columns = ["table", "generation", "place", "state", "reason"]
        rows = [] if writer is None else writer.read(columns, "place", 0, MAX_VERSION).to_pylist()
    except XidstreamError:
        raise
    except Exception as error:
        raise StorageFault(
            f"{naming.SNAPSHOTS} of the sink cannot be read: {type(error).__name__}"
        ) from error
    found: dict[tuple[str, int, Lsn], tuple[GenerationState, str]] = {}
    for row in sorted(rows, key=lambda row: bool(row["state"] == GenerationState.ENDED.value)):
        key = (row["table"], row["generation"], Lsn(row["place"]))
        found[key] = (GenerationState(row["state"]), row["reason"] or "")
    return found
