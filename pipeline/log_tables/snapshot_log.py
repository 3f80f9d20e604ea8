"""A sink's side of snapshots: a table's rows in one commit, and the line about them in ``_snapshots``.

Readers write a snapshot's Parquet files straight into the directory of the table. Nobody names them before the
table's snapshot is complete. Then one commit names them all, under an application id of their own (``<application
id>/snapshot``, whose version is the generation's number): the slot's own watermark is above their place by then, and
its rule would drop them. The line in ``_snapshots`` comes behind it, under an application id of the table's
(``<application id>/snapshot/<directory>``). So each of the two commits is made once, however often it is asked for. A
fold takes no notice of rows that no line names.

A snapshot that was read while keys were erased from the table (``erased_rows``) may have their rows, and is taken
again.

A crash between the two commits leaves rows without a line. The storage has the generation's bounds then
(``pipeline.storage.snapshot_record``), and ``commit`` is asked for again, with no files to name.

A third thing is told here: up to which LSN it is proven that the generations which stand are what the tables were
(``prove``). It is an application transaction of ``_transactions`` (``<application id>/proven``), so a reader has both
of its bounds from one snapshot of one table. A generation that ends stands up to what was proven by then, or up to the
DDL that ended it where its place is known (``pipeline.snapshot.ddl``): its second line says so (``until``). Where the
place is known later there is a third line, and the greatest ``until`` counts.

Each call opens the tables anew, because the sink commits to the same ones on another thread. Whoever of the two comes
second finds the snapshot of the log outdated, and takes a new one (``log_table``). The number of the run's hold on
the slot goes with every commit, so a run that was taken over completes nothing (``ownership``).

The rows that a repair does not read are carried over by Spark (``carry``, ``pipeline.changelog.carrying``). The sink
hands that in, because it is above this room. It is not there where states are not read from the tables.

Rejected: the sink's own thread and its open tables. A batch that Spark writes for minutes would hold up every table.

Runs in the driver's process; from any thread.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa

from xidstream.pipeline.errors import SnapshotInterrupted, StorageFault, Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.attempt_files import missing, remove
from xidstream.pipeline.log_tables.columns import Conform, TableColumn, place
from xidstream.pipeline.log_tables.erased_marks import UPTO, erased_id
from xidstream.pipeline.log_tables.generation_rows import (
    Spoiler,
    ddl_spoiler,
    ended_row,
    park_spoiler,
    row_of,
    spoiled_rows,
)
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, LogTable, LogTables, SnapshotOutdated
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.snapshot_tables import Carrying, GenerationLine, Proven, SnapshotTarget
from xidstream.pipeline.log_tables.table_metadata import NOTHING_KNOWN
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.settings.credentials import holds_secret_option
from xidstream.pipeline.snapshot.ddl import Ddl, KnownDdl, Witnessed
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark_errors import fault_of

ATTEMPTS: Final = 8
"""How often one commit is tried. Each failure means that the sink committed first."""

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
``contained_upto``: all of the table that committed up to this LSN is in the snapshot; null where none is known.
``rows``: of the snapshot; null in the rows of an earlier xidstream, as ``contained_upto`` is."""

Carry = Callable[[str, Carrying, SnapshotTarget], tuple[WrittenFile, ...] | None]
"""``SnapshotTables.carry``, given the application id."""

_T = TypeVar("_T")


class SnapshotLog:
    """One for each claim of the sink: it knows what it was told of parked tables and of DDL, at the claim and since.
    ``begins_at``: the sink's watermark then. ``carry``: None where there is no Spark, or no state.

    Raises Superseded, SinkDiverged, StorageFault and SinkFailed from every method."""

    def __init__(
        self,
        tables: LogTables,
        application_id: str,
        ownership: Ownership,
        begins_at: Lsn = INVALID_LSN,
        carry: Carry | None = None,
    ) -> None:
        self._tables = tables
        self._carry = carry
        self._application_id = application_id
        self._ownership = ownership
        self._parked: dict[tuple[int, Lsn], ParkedTable] = {}
        self._ddl = KnownDdl(begins_at)
        self._ended: list[tuple[GenerationLine, str]] = []
        # A generation's line comes before a park or DDL, which ends it, or behind, and then ends it itself.
        self._parking = threading.Lock()
        self._proofs: LogTable | None = None
        self._taken: set[str] = set()

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

        return self._guarded(locations.SNAPSHOTS, read)

    def target(self, relation: RelationVersion, place_lsn: Lsn) -> SnapshotTarget:
        """Make the table, or widen it, for what the snapshot at ``place_lsn`` has."""
        key = self._tables.key_of(relation.schema, relation.table)
        about = self._tables.about(relation)

        def prepare() -> SnapshotTarget:
            found = self._tables.open(key, relation.name)
            columns = () if found is None else found.columns
            placement = place(columns, contract_schema(relation), self._tables.rules)
            brought = [VersionSince(self._application_id, place_lsn, relation, placement.targets)]
            writer = found or self._tables.open_or_create(
                key, relation.name, placement.columns, about, brought
            )
            if holds_secret_option(writer.location.storage_options or {}):
                raise Unsupported(
                    "snapshots are read by Ray's actors, to which no credentials are sent: storage_options hold some",
                    remedy="give each node its own credentials (docs/security.md), and leave them out of "
                    "storage_options",
                )
            self._ownership.check(writer)
            writer.take_columns(placement.columns)
            # The other properties are those of the newest layout in the stream.
            writer.describe(about if found is None else NOTHING_KNOWN, brought)
            conform = Conform.of(placement.columns, placement.names)
            self._taken.add(key)
            # Whoever had the slot before can name no files here after this.
            self._claim(writer)
            cut = Lsn(writer.watermark(locations.cut_id(self._application_id)))
            return SnapshotTarget(writer.location, f"snapshot-{uuid.uuid4().hex}", conform, key, cut)

        return self._guarded(relation.name, prepare)

    def is_being_taken(self, key: str) -> bool:
        """Whether a snapshot of the table with this key was begun here, and not committed or given up."""
        return key in self._taken

    def discard(self, target: SnapshotTarget) -> None:
        """Remove what an attempt wrote that has failed. A table that names it keeps it."""
        self._taken.discard(target.key)

        def removed() -> None:
            writer = self._tables.open(target.key, target.directory)
            if writer is not None:
                self._ownership.check(writer)
                if any(path.startswith(target.directory) for path in writer.paths()):
                    return
            remove(target.table, target.directory)

        self._guarded(target.directory, removed)

    def carry(self, carrying: Carrying, target: SnapshotTarget) -> tuple[WrittenFile, ...] | None:
        carry, name = self._carry, carrying.relation.name
        if carry is None:
            raise Unsupported(
                "the other rows of a snapshot are carried over by Spark, from a state of the log: there is none"
            )

        def carried() -> tuple[WrittenFile, ...] | None:
            writer = self._tables.open(target.key, name)
            if writer is not None:
                self._ownership.check(writer)
            return carry(self._application_id, carrying, target)

        return self._guarded(name, carried)

    def commit(self, generation: Generation, files: Sequence[WrittenFile] | None) -> bool:
        """Name the files, unless this generation's were named before, and add its line.

        With None nothing is named: returns False where the generation's files were not named before. Where a file is
        gone, nothing is named either, and SnapshotInterrupted raised: take the snapshot again. A later snapshot
        of the table has a higher place, so what a run that was taken over has named is never taken for this one.

        The generation of a table that was parked meanwhile, or altered, ends in the same commit.
        """
        key = self._tables.key_of(generation.relation.schema, generation.relation.table)
        rows_id, place = f"{self._application_id}/snapshot", int(generation.bounds.place)

        def commit_rows() -> int | None:
            """How many there are; None where they were not named."""
            writer = self._tables.open(key, generation.name)
            held = 0 if writer is None else writer.watermark(rows_id)
            if writer is not None and held == place:
                return _n_rows(files, writer, place)
            if writer is None or files is None:
                return None
            self._ownership.check(writer)
            if held > place:
                raise self._ownership.diverged(
                    f"{writer.title} has a snapshot that was taken at {Lsn(held)}, and a later one was "
                    f"taken at {Lsn(place)}: the server was restored, or failed over, to an older state"
                )
            if writer.watermark(UPTO) >= place:
                raise SnapshotInterrupted(
                    f"table {generation.name}: its snapshot at {Lsn(place)} may have rows of keys that were erased "
                    f"meanwhile, up to {Lsn(writer.watermark(UPTO))}"
                )
            gone = missing(writer.location, [file.path for file in files])
            if gone:
                raise SnapshotInterrupted(
                    f"table {generation.name}: {len(gone)} of {len(files)} files of its snapshot were removed before "
                    "it was complete: a vacuum keeps what nobody names yet for too short a time"
                )
            cut, bounds = writer.watermark(locations.cut_id(self._application_id)), generation.bounds
            if bounds.whole_upto < cut:
                raise SnapshotInterrupted(
                    f"table {generation.name}: its change log was shortened up to {Lsn(cut)} while the snapshot was "
                    f"taken, which needs the changes behind {bounds.whole_upto}"
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
            row = row_of(generation, n_rows)
            parks = (park_spoiler(each).ended(row, self._proven) for each in self._parked.values())
            ddl = (ddl_spoiler(each).ended(row, self._proven) for each in self._ddl)
            parked, altered = (next((row for row in rows if row is not None), None) for rows in (parks, ddl))
            self._add_generation(generation.name, row, parked or altered)
            if altered is not None and parked is None:
                self._ended.append(_line_of(row, altered["reason"]))
        self._taken.discard(key)
        return True

    def _add_generation(self, table: str, row: dict[str, Any], ended: dict[str, Any] | None) -> None:
        version = 2 * row["generation"]
        if ended is None:
            self._add_line(table, version, lambda writer: [row])
            return
        line_id = self._line_id(table)

        def rows(writer: LogTable) -> list[dict[str, Any]]:
            return [ended] if writer.watermark(line_id) >= version else [row, ended]

        self._add_line(table, version + 1, rows)

    def clean(self) -> None:
        """Files that no commit names are no rows, and go with a vacuum."""

    def complete(self) -> None:
        """The batches went on all the time."""

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """Have each table say that it has these columns from that LSN on, or from the DDL that made them where its
        place is known. Behind what is proven, and before that, nobody knows them.

        Then ``_transactions`` says that all is whole up to there, and that tables have another layout. What is told
        already is not told again."""
        for relation, found_lsn in found:
            self._guarded(relation.name, partial(self._lay_out_one, relation, int(found_lsn), witnessed))
        last = max(found_lsn for _, found_lsn in found)
        self._move({locations.layouts_id(self._application_id): int(last)}, last)

    def _lay_out_one(self, relation: RelationVersion, found_lsn: int, witnessed: Witnessed | None) -> None:
        writer = self._tables.open(self._tables.key_of(relation.schema, relation.table), relation.name)
        if writer is None:
            return  # removed by hand: its snapshot is not whole, and whoever reads it is told
        self._ownership.check(writer)
        proven = self._proven()
        with self._parking:
            ddl = self._ddl.altered(relation.relid, proven, found_lsn, witnessed)
        first, last = (proven, found_lsn) if ddl is None else (int(ddl[0]), int(ddl[1]))
        placement = place(writer.columns, contract_schema(relation), self._tables.rules)
        after = first if first < last else None
        brought = VersionSince(self._application_id, last, relation, placement.targets, after)
        writer.take_columns(placement.columns)
        writer.describe(NOTHING_KNOWN, [brought])

    def reach(self, lsn: Lsn) -> None:
        """Have ``_transactions`` say that all up to ``lsn`` is in the tables, though no transaction says so.

        Only for a position that the slot is confirmed to, and that no commit to come has. In a quiet database a
        snapshot would be valid from behind the newest commit of the log, and nobody could read its table.
        """
        self._move({}, lsn)

    def _move(self, marks: Mapping[str, int], lsn: Lsn) -> None:
        def move() -> None:
            writer = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
            assert writer is not None, "the sink has made it"
            wanted = {self._application_id: int(lsn), **marks}
            moved = {name: version for name, version in wanted.items() if writer.watermark(name) < version}
            if moved:
                self._ownership.check(writer)
                writer.commit([], moved, marks=self._ownership.marks)

        self._guarded(locations.TRANSACTIONS, move)

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """Have readers know that up to ``lsn`` the generations which stand are what the tables were, as far as a look
        that took ``snapshot`` proves it (``KnownDdl.proves``). It is kept: a lower one than before changes nothing."""
        proven_id = locations.proven_id(self._application_id)
        with self._parking:
            proven_lsn = self._ddl.proves(lsn, snapshot)

        def told() -> None:
            # Kept open, for it is called every second. Nobody else moves this mark, but a run that took over.
            if self._proofs is None:
                self._proofs = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
            else:
                self._proofs.refresh()
            writer, self._proofs = self._proofs, None
            assert writer is not None, "the sink has made it"
            self._ownership.check(writer)
            if writer.watermark(proven_id) < proven_lsn:
                writer.commit([], {proven_id: int(proven_lsn)}, marks=self._ownership.marks)
            self._proofs = writer

        self._guarded(locations.TRANSACTIONS, told)
        with self._parking:
            ended, self._ended = tuple(self._ended), []
        return Proven(proven_lsn, ended)

    def _proven(self) -> int:
        writer = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
        return 0 if writer is None else writer.watermark(locations.proven_id(self._application_id))

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        """Add the line that says why the generation has ended, and up to where it stands, once. ``witnessed``: where
        all that may have ended it left a message."""

        def ended(writer: LogTable) -> list[dict[str, Any]]:
            rows = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
            found = (r for r in rows if r["state"] == GenerationState.FINISHED.value)
            row = next(r for r in found if (r["table"], r["place"]) == (line.table, line.place))
            return [ended_row(row, reason, self._stands_until(line, self._proven(), witnessed))]

        self._add_line(line.table, 2 * line.number + 1, ended)

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """Extend a generation that DDL ended, up to what was proven by then: have it stand up to the DDL itself, where
        nothing has happened in between that left no message."""

        def extended() -> None:
            writer = self._snapshots()
            assert writer is not None
            rows = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
            told = [row for row in rows if (row["table"], row["place"]) == (line.table, line.place)]
            last = max(
                (r for r in told if r["state"] == GenerationState.ENDED.value), key=lambda r: r["until"]
            )
            until = self._stands_until(line, last["until"], witnessed)
            if until > last["until"]:
                self._append(writer, [{**last, "until": until}], {})

        self._guarded(locations.SNAPSHOTS, extended)

    def _stands_until(self, line: GenerationLine, proven: int, witnessed: Witnessed | None) -> int:
        with self._parking:
            if any(each.concerns(line.relid) for each in self._parked.values()):
                return proven  # rows may be missing behind that
            return self._ddl.stands_until(proven, witnessed)

    def park(self, tables: Sequence[ParkedTable]) -> None:
        """End what stands of these tables where rows of them are left out of the log. That may be several generations:
        of one that was taken before the stream got to the park, the former stands up to the later one's
        ``valid_from``. What it has done once it does not do again."""
        with self._parking:
            known = {key: each.until_lsn for key, each in self._parked.items()}
            told = {(each.relid, each.since_lsn): each for each in tables}
            new = {key: each for key, each in told.items() if known.get(key, INVALID_LSN) != each.until_lsn}
            if new:
                self._end_all_spoiled([park_spoiler(each) for each in new.values()])
                self._parked.update(new)

    def note_ddl(self, ddl: Sequence[Ddl]) -> None:
        """What a batch tells of DDL, in commit order, before ``_transactions`` says that all is whole up to there. Ends
        what it ends by itself, as ``park`` does."""
        with self._parking:
            if new := self._ddl.add(ddl):
                self._ended += self._end_all_spoiled([ddl_spoiler(each) for each in new if each.relids])

    def _end_all_spoiled(self, spoilers: Sequence[Spoiler]) -> list[tuple[GenerationLine, str]]:
        lines = self.lines(makes=False) if spoilers else []
        ended: list[tuple[GenerationLine, str]] = []
        for table in dict.fromkeys(line.table for line in lines if line.is_ours):
            relids = {line.relid for line in lines if line.table == table}
            if any(each.concerns(relid) for each in spoilers for relid in relids):
                ended += self._guarded(locations.SNAPSHOTS, partial(self._end_spoiled, table, spoilers))
        return ended

    def _end_spoiled(self, table: str, spoilers: Sequence[Spoiler]) -> list[tuple[GenerationLine, str]]:
        """In one commit, so that no reader finds one of them ended and another not."""
        writer = self._snapshots()
        assert writer is not None
        told = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
        line_id = self._line_id(table)
        newest = writer.watermark(line_id) // 2
        ended = spoiled_rows([row for row in told if row["table"] == table], spoilers, newest, self._proven)
        if ended:
            is_newest = any(row["generation"] == newest for row in ended)
            self._append(writer, ended, {line_id: 2 * newest + 1} if is_newest else {})
        return [_line_of(row, row["reason"]) for row in ended if row["generation"] == newest]

    def _add_line(self, table: str, version: int, make: Callable[[LogTable], list[dict[str, Any]]]) -> None:
        def add() -> None:
            writer = self._snapshots()
            assert writer is not None
            line_id = self._line_id(table)
            if writer.watermark(line_id) >= version:
                return
            self._append(writer, make(writer), {line_id: version})
            reach("snapshot_told")

        self._guarded(locations.SNAPSHOTS, add)

    def _append(self, writer: LogTable, rows: Sequence[dict[str, Any]], versions: Mapping[str, int]) -> None:
        job = f"data-{uuid.uuid4().hex}-driver"
        files = ParquetFiles(writer.location, job, SNAPSHOTS_SCHEMA, "place")
        files.write(pa.RecordBatch.from_pylist(rows, schema=SNAPSHOTS_SCHEMA))
        writer.commit(files.close(), versions, "place", marks=self._ownership.marks)

    def _line_id(self, table: str) -> str:
        return f"{self._application_id}/snapshot/{locations.encode(table)}"

    def _snapshots(self, *, makes: bool = True) -> LogTable | None:
        """None where there is none, and none is to be made."""
        columns = [TableColumn(f.name, f.type, f.name) for f in SNAPSHOTS_SCHEMA]
        key = locations.SNAPSHOTS
        writer = self._tables.open(key, key)
        if writer is None and makes:
            writer = self._tables.open_or_create(key, key, columns, self._tables.about_own(key))
        if writer is not None:
            self._ownership.check(writer)
            writer.take_columns(columns)
        return writer

    def _claim(self, writer: LogTable) -> None:
        if Ownership.owner_of(writer, self._application_id) < self._ownership.number:
            writer.commit([], {}, marks=self._ownership.marks)

    def _guarded(self, label: str, act: Callable[[], _T]) -> _T:
        for _ in range(ATTEMPTS):
            try:
                return act()
            except SnapshotOutdated:
                continue
            except Exception as error:
                raise fault_of(error, f"the snapshot in {self._tables.title(label)}") from error
        title = self._tables.title(label)
        raise StorageFault(f"{title} was changed by others during {ATTEMPTS} attempts to commit")


def _n_rows(files: Sequence[WrittenFile] | None, writer: LogTable, place: int) -> int:
    """The rows of the snapshot with that place, whose files are in the table, with those that were erased since."""
    if files is not None:
        return sum(file.n_rows for file in files)
    there = writer.read(["_commit_lsn"], "_commit_lsn", place, place).num_rows
    return int(there) + writer.watermark(erased_id(place))


def _line_of(row: Mapping[str, Any], reason: str) -> tuple[GenerationLine, str]:
    """The line as it was before it ended."""
    place, valid_from, state = row["place"], row["valid_from"], GenerationState.FINISHED
    return GenerationLine(
        row["table"], row["relid"], row["generation"], place, valid_from, state, is_ours=True
    ), reason


def told_by(tables: LogTables) -> dict[tuple[str, int, Lsn], tuple[GenerationState, str]]:
    """What ``_snapshots`` says now, without a run: the state of each generation, by table, number and place, and the
    reason why one has ended. Raises StorageFault."""
    try:
        writer = tables.open(locations.SNAPSHOTS, locations.SNAPSHOTS)
        columns = ["table", "generation", "place", "state", "reason"]
        rows = [] if writer is None else writer.read(columns, "place", 0, MAX_VERSION).to_pylist()
    except XidstreamError:
        raise
    except Exception as error:
        raise StorageFault(
            f"{locations.SNAPSHOTS} of the sink cannot be read: {type(error).__name__}"
        ) from error
    found: dict[tuple[str, int, Lsn], tuple[GenerationState, str]] = {}
    for row in sorted(rows, key=lambda row: bool(row["state"] == GenerationState.ENDED.value)):
        key = (row["table"], row["generation"], Lsn(row["place"]))
        found[key] = (GenerationState(row["state"]), row["reason"] or "")
    return found
