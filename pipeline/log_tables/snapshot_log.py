"""A sink's side of snapshots: a table's rows in one commit, and the line about them in ``_snapshots``.

Readers write a snapshot's Parquet files straight into the directory of the table. Nobody names them before the
table's snapshot is complete. Then one commit names them all, under an application id of their own (``<application
id>/snapshot``, whose version is the generation's number): the slot's own watermark is above their place by then, and
its rule would drop them. The line in ``_snapshots`` comes after it, under an application id of the table's
(``<application id>/snapshot/<directory>``). So each of the two commits is made once, however often it is asked for. A
fold takes no notice of rows that no line names. Of small tables that are taken together one commit adds all lines: it
costs as much as one for each, and the rows' commits are those of different tables.

A snapshot that was read while keys were erased from the table (``erased_rows``) may have their rows, and is taken
again.

A crash between the two commits leaves rows without a line. The storage has the generation's bounds then
(``pipeline.storage.snapshot_record``), and ``commit`` is asked for again, with no files to name.

A generation that ends stands up to what was proven by then (``transaction_marks``), or up to the DDL that ended it
where its place is known (``pipeline.snapshot.ddl``). A look at the catalog ends it (``end``), or the stream does
(``park``, ``note_ddl``), perhaps before the generation's own line is there. Then that line and its end are one commit.

Each call opens the tables anew, because the sink commits to the same ones on another thread (``commit_attempts``). The
number of the run's hold on the slot goes with every commit, so a run that was taken over completes nothing
(``ownership``). The lines are added by ``generation_lines``.

The rows that a repair does not read are carried over by Spark (``carry``, ``pipeline.changelog.carrying``). The sink
hands that in, because it is above this room. It is not there where states are not read from the tables.

Rejected: the sink's own thread and its open tables. A batch that Spark writes for minutes would hold up every table.

Runs in the driver's process; from any thread.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from xidstream.pipeline.errors import SnapshotInterrupted, Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.attempt_files import missing, remove
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.commit_attempts import guarded
from xidstream.pipeline.log_tables.erased_marks import UPTO, erased_id
from xidstream.pipeline.log_tables.generation_lines import Ended, GenerationLines, ended_of
from xidstream.pipeline.log_tables.generation_rows import Spoiler, ddl_spoiler, park_spoiler, row_of
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import LogTables
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.snapshot_tables import Carrying, GenerationLine, Proven, SnapshotOutput
from xidstream.pipeline.log_tables.table_metadata import NOTHING_KNOWN
from xidstream.pipeline.log_tables.transaction_marks import TransactionMarks
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.settings.credentials import holds_secret_option
from xidstream.pipeline.snapshot.ddl import Ddl, KnownDdl, Witnessed
from xidstream.pipeline.snapshot.generation import Generation

_One = TypeVar("_One")
_T = TypeVar("_T")
_AT_A_TIME: Final = 4
"""Tables of a group."""
Carry = Callable[[str, Carrying, SnapshotOutput], tuple[WrittenFile, ...] | None]
"""``SnapshotTables.carry``, given the application id."""


class SnapshotLog:
    """One object for each claim of the sink. It keeps the parked tables and the DDL that it has heard of, at the claim
    and since. ``begins_at``: the sink's watermark at the claim. ``carry``: None where there is no Spark, or no state.

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
        self._rows_id = f"{application_id}/snapshot"
        """A table's watermark of this name is the LSN of the last snapshot whose rows it has."""
        self._ownership = ownership
        self._lines = GenerationLines(tables, application_id, ownership)
        self._marks = TransactionMarks(tables, application_id, ownership)
        self._parked: dict[tuple[int, Lsn], ParkedTable] = {}
        self._ddl = KnownDdl(begins_at)
        self._ended: list[Ended] = []
        """What DDL of the stream has ended since it was told last (``prove``)."""
        self._taken: set[str] = set()
        # A generation's line comes before a park or DDL, which ends it, or after, and then ends it itself.
        self._parking = threading.Lock()

    def lines(self, makes: bool) -> list[GenerationLine]:
        return self._lines.all(makes)

    def outputs(self, wanted: Sequence[tuple[RelationVersion, Lsn]]) -> list[SnapshotOutput | XidstreamError]:
        """Make the tables, or widen them, for what their snapshots have."""
        return _each(lambda one: self._output(*one), wanted)

    def _output(self, relation: RelationVersion, snapshot_lsn: Lsn) -> SnapshotOutput:
        key = self._tables.key_of(relation.schema, relation.table)
        about = self._tables.about(relation)

        def prepare() -> SnapshotOutput:
            found = self._tables.open(key, relation.name)
            columns = () if found is None else found.columns
            mapping = map_columns(columns, contract_schema(relation), self._tables.rules)
            brought = [VersionSince(self._application_id, snapshot_lsn, relation, mapping.targets)]
            writer = found or self._tables.open_or_create(
                key, relation.name, mapping.columns, about, brought, marks=self._ownership.marks
            )
            if holds_secret_option(writer.location.storage_options or {}):
                raise Unsupported(
                    "snapshots are read by Ray's actors, to which no credentials are sent: storage_options hold some",
                    remedy="give each node its own credentials (docs/security.md), and leave them out of "
                    "storage_options",
                )
            self._ownership.check(writer)
            writer.take_columns(mapping.columns)
            # The other properties are those of the newest layout in the stream.
            writer.describe(about if found is None else NOTHING_KNOWN, brought)
            conform = Conform.of(mapping.columns, mapping.names)
            self._taken.add(key)
            # Whoever had the slot before can name no files here after this.
            self._ownership.claim(writer)
            cut = Lsn(writer.watermark(locations.cut_id(self._application_id)))
            return SnapshotOutput(writer.location, f"snapshot-{uuid.uuid4().hex}", conform, key, cut)

        return guarded(self._tables, relation.name, prepare)

    def is_being_taken(self, key: str) -> bool:
        """Whether a snapshot of the table with this key was begun here, and not committed or given up."""
        return key in self._taken

    def discard(self, output: SnapshotOutput) -> None:
        """Remove what an attempt wrote that has failed. A table that names it keeps it."""
        self._taken.discard(output.key)

        def removed() -> None:
            writer = self._tables.open(output.key, output.directory)
            if writer is not None:
                self._ownership.check(writer)
                if any(path.startswith(output.directory) for path in writer.paths()):
                    return
            assert isinstance(output.table, Location), "a log's tables, which outputs() named"
            remove(output.table, output.directory)

        guarded(self._tables, output.directory, removed)

    def carry(self, carrying: Carrying, output: SnapshotOutput) -> tuple[WrittenFile, ...] | None:
        carry, name = self._carry, carrying.relation.name
        if carry is None:
            raise Unsupported(
                "the other rows of a snapshot are carried over by Spark, from a state of the log: there is none"
            )

        def carried() -> tuple[WrittenFile, ...] | None:
            writer = self._tables.open(output.key, name)
            if writer is not None:
                self._ownership.check(writer)
            return carry(self._application_id, carrying, output)

        return guarded(self._tables, name, carried)

    def commit(
        self, taken: Sequence[tuple[Generation, Sequence[WrittenFile]]]
    ) -> list[bool | XidstreamError]:
        """The rows of each table are a commit of its own, and the lines of all are one."""
        found = _each(lambda one: self._commit_rows(*one), taken)
        named: list[tuple[Generation, int]] = []
        answers: list[bool | XidstreamError] = []
        for (generation, _), n_rows in zip(taken, found, strict=True):
            if isinstance(n_rows, XidstreamError):
                answers.append(n_rows)
                continue
            answers.append(n_rows is not None)
            if n_rows is not None:
                named.append((generation, n_rows))
        if named:
            self._tell(named)
        return answers

    def recover(self, generation: Generation) -> bool:
        key = self._tables.key_of(generation.relation.schema, generation.relation.table)
        snapshot_lsn = int(generation.bounds.snapshot_lsn)

        def rows_there() -> int | None:
            """How many the crash left, with those that were erased since; None where no commit names them."""
            writer = self._tables.open(key, generation.name)
            if writer is None or writer.watermark(self._rows_id) != snapshot_lsn:
                return None
            there = writer.read(["_commit_lsn"], "_commit_lsn", snapshot_lsn, snapshot_lsn).num_rows
            return int(there) + writer.watermark(erased_id(snapshot_lsn))

        n_rows = guarded(self._tables, generation.name, rows_there)
        if n_rows is not None:
            self._tell([(generation, n_rows)])
        return n_rows is not None

    def _commit_rows(self, generation: Generation, files: Sequence[WrittenFile]) -> int | None:
        """Name the files, unless this generation's were named before. Returns how many rows they have; None where
        there is no table.

        Where a file is gone, nothing is named, and SnapshotInterrupted raised: take the snapshot again. A later
        snapshot of the table has a higher LSN, so what a run that was taken over has named is never taken for this one.
        """
        key = self._tables.key_of(generation.relation.schema, generation.relation.table)
        snapshot_lsn, n_rows = int(generation.bounds.snapshot_lsn), sum(file.n_rows for file in files)

        def commit_rows() -> int | None:
            writer = self._tables.open(key, generation.name)
            if writer is None:
                return None
            held = writer.watermark(self._rows_id)
            if held == snapshot_lsn:
                return n_rows
            self._ownership.check(writer)
            if held > snapshot_lsn:
                raise self._ownership.diverged(
                    f"{writer.title} has a snapshot that was taken at {Lsn(held)}, and a later one was "
                    f"taken at {Lsn(snapshot_lsn)}: the server was restored, or failed over, to an older state"
                )
            if writer.watermark(UPTO) >= snapshot_lsn:
                raise SnapshotInterrupted(
                    f"table {generation.name}: its snapshot at {Lsn(snapshot_lsn)} may have rows of keys that were "
                    f"erased meanwhile, up to {Lsn(writer.watermark(UPTO))}"
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
            writer.commit(files, {self._rows_id: snapshot_lsn}, marks=self._ownership.marks, merges=False)
            reach("snapshot_committed")
            return n_rows

        return guarded(self._tables, generation.name, commit_rows)

    def _tell(self, taken: Sequence[tuple[Generation, int]]) -> None:
        """Add the lines of generations whose rows are named. One of a table that was parked meanwhile, or altered, ends
        in the same commit."""
        lines, ended = [], []
        with self._parking:
            for generation, n_rows in taken:
                row = row_of(generation, n_rows)
                parks = (park_spoiler(each).ended(row, self._marks.proven) for each in self._parked.values())
                ddl = (ddl_spoiler(each).ended(row, self._marks.proven) for each in self._ddl)
                parked, altered = (
                    next((row for row in rows if row is not None), None) for rows in (parks, ddl)
                )
                lines.append((row, parked or altered))
                if altered is not None and parked is None:
                    ended.append(ended_of(altered))
            self._lines.add(lines)
            self._ended += ended
        for generation, _ in taken:
            self._taken.discard(self._tables.key_of(generation.relation.schema, generation.relation.table))

    def clean(self) -> None:
        """Files that no commit names are no rows, and go with a vacuum."""

    def complete(self) -> None:
        """The batches went on all the time."""

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """Have each table record that it has these columns from that LSN on, or from the DDL that made them, where its
        LSN is known. Between the proven LSN and this one the columns are unknown.

        Then ``_transactions`` records that all is whole up to there, and that tables have another layout. A repeated
        call changes nothing."""
        for relation, found_lsn in found:
            guarded(
                self._tables, relation.name, partial(self._lay_out_one, relation, int(found_lsn), witnessed)
            )
        last = max(found_lsn for _, found_lsn in found)
        self._marks.reach(last, {locations.layouts_id(self._application_id): int(last)})

    def _lay_out_one(self, relation: RelationVersion, found_lsn: int, witnessed: Witnessed | None) -> None:
        writer = self._tables.open(self._tables.key_of(relation.schema, relation.table), relation.name)
        if writer is None:
            return  # removed by hand: its snapshot is not whole, and whoever reads it is told
        self._ownership.check(writer)
        proven = self._marks.proven()
        with self._parking:
            ddl = self._ddl.altered(relation.relid, proven, found_lsn, witnessed)
        first, last = (proven, found_lsn) if ddl is None else (int(ddl[0]), int(ddl[1]))
        mapping = map_columns(writer.columns, contract_schema(relation), self._tables.rules)
        after = first if first < last else None
        brought = VersionSince(self._application_id, last, relation, mapping.targets, after)
        writer.take_columns(mapping.columns)
        writer.describe(NOTHING_KNOWN, [brought])

    @property
    def n_mark_commits(self) -> int:
        """How many commits of marks were made to ``_transactions`` beside the batches."""
        return self._marks.n_commits

    def reach(self, lsn: Lsn) -> None:
        """Have ``_transactions`` record that the tables have everything up to ``lsn``, though no transaction ends
        there.

        Only for a position up to which the slot is confirmed, and that no later commit can have. Without it, in a quiet
        database, a snapshot would be valid only after the newest commit of the log, and its table could not be read.
        """
        self._marks.reach(lsn)

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """Have readers know that up to ``lsn`` the generations which stand are what the tables were, as far as a look
        that took ``snapshot`` proves it (``KnownDdl.proves``). It is kept: a lower one than before changes nothing."""
        with self._parking:
            proven_lsn = self._ddl.proves(lsn, snapshot)
        self._marks.prove(proven_lsn)
        with self._parking:
            ended, self._ended = tuple(self._ended), []
        return Proven(proven_lsn, ended)

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        """Add the line that says why the generation has ended, and up to where it stands, once. ``witnessed``: where
        all that may have ended it left a message."""
        self._lines.end(line, reason, lambda: self._stands_until(line, self._marks.proven(), witnessed))

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """Extend a generation that DDL ended, up to what was proven by then: have it stand up to the DDL itself, where
        nothing has happened in between that left no message."""
        self._lines.extend(line, lambda until: self._stands_until(line, until, witnessed))

    def _stands_until(self, line: GenerationLine, proven: int, witnessed: Witnessed | None) -> int:
        with self._parking:
            if any(each.concerns(line.relid) for each in self._parked.values()):
                return proven  # rows may be missing after that
            return self._ddl.stands_until(proven, witnessed)

    def park(self, tables: Sequence[ParkedTable]) -> None:
        """End what stands of these tables where rows of them are left out of the log. That may be several generations:
        of one that was taken before the stream got to the park, the former stands up to the later one's
        ``valid_from``. What it has done once it does not do again."""
        with self._parking:
            known = {key: each.until_lsn for key, each in self._parked.items()}
            given = {(each.relid, each.since_lsn): each for each in tables}
            new = {key: each for key, each in given.items() if known.get(key, INVALID_LSN) != each.until_lsn}
            if new:
                self._end_all_spoiled([park_spoiler(each) for each in new.values()])
                self._parked.update(new)

    def note_ddl(self, ddl: Sequence[Ddl]) -> None:
        """What a batch tells of DDL, in commit order, before ``_transactions`` says that all is whole up to there. Ends
        what it ends by itself, as ``park`` does."""
        with self._parking:
            if new := self._ddl.add(ddl):
                self._ended += self._end_all_spoiled([ddl_spoiler(each) for each in new if each.relids])

    def _end_all_spoiled(self, spoilers: Sequence[Spoiler]) -> list[Ended]:
        lines = self.lines(makes=False) if spoilers else []
        ended: list[Ended] = []
        for table in dict.fromkeys(line.table for line in lines if line.is_ours):
            relids = {line.relid for line in lines if line.table == table}
            if any(each.concerns(relid) for each in spoilers for relid in relids):
                ended += self._lines.end_spoiled(table, spoilers, self._marks.proven)
        return ended


def _each(act: Callable[[_One], _T], several: Sequence[_One]) -> list[_T | XidstreamError]:
    """What ``act`` returns, or raises, of each of these: some at a time, as each waits for a disk or a store."""

    def tried(one: _One) -> _T | XidstreamError:
        try:
            return act(one)
        except XidstreamError as error:
            return error

    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="snapshot-log") as threads:
        return list(threads.map(tried, several))
