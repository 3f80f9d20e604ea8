"""Snapshots for a user's function: tables' rows wait in the storage, and go to the function before the stream goes on.

It is the ``SnapshotTables`` of a sink that keeps nothing itself.
A function has no fold: it gets each table's rows first, as one batch, and then the changes behind them. So nothing is
released to it before all tables are taken (``complete``), and of the changes it gets none that a snapshot contains
(``contained``). The slot keeps the stream meanwhile, and the reader holds what fits into its memory.

Readers write the rows as Parquet files below ``snapshots/rows`` of the storage. In a folder Spark's own reader reads
them. In an object store executors read them by the storage's client, a file each, because Spark's wheels have no
connector for stores. Rejected: to fetch them into a folder of the driver first, because that must have room for the
whole table, and be reached by all executors; to hand the rows over through Ray's object store, because they would have
to fit into memory.

The files are deleted when the function has had them. That it has, is recorded after its return: after a crash in
between it gets the table again, as it gets batches again. What a killed run leaves is removed by the next one
(``clean``).

The methods of the log are called by the threads of ``actors.snapshots``, ``deliver`` and ``contained`` by the batch
loop.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import StorageFault, Unsupported, XidstreamError
from xidstream.pipeline.log_tables.attempt_files import remove
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import Carrying, GenerationLine, Proven, SnapshotOutput
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.ddl import Witnessed
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import forget_delivered, read_delivered, write_delivered
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_folder import StoredFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S: Final = 0.5


@dataclass(frozen=True)
class _Waiting:
    """A table whose rows wait for the function."""

    generation: Generation
    paths: list[str]


class StagedSnapshots:
    """The staged snapshots of one epoch. ``check_owner`` raises Superseded where another run has the slot by now.
    Raises StorageFault and SegmentCorrupt from every method."""

    def __init__(self, storage: Storage, layout: Layout, check_owner: Callable[[], None]) -> None:
        self._storage = storage
        self._layout = layout
        self._check_owner = check_owner
        self._delivered = {(each.relid, each.number): each for each in read_delivered(storage, layout)}
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._queued: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._complete = threading.Event()

    # -- the log -----------------------------------------------------------------------------------------

    def lines(self, makes: bool) -> list[GenerationLine]:
        """There is nothing to make: what the function was given is recorded in the storage."""
        return [
            GenerationLine(
                each.name,
                each.relid,
                each.number,
                int(each.bounds.snapshot_lsn),
                int(each.bounds.valid_from),
                GenerationState.FINISHED,
                is_ours=True,
            )
            for each in list(self._delivered.values())
        ]

    def clean(self) -> None:
        """Delete what an earlier run had read and not delivered: its snapshots are gone.

        Raises Superseded, with nothing deleted: what is there may be what the rightful run reads."""
        rows = self._storage.list_keys(self._layout.snapshot_rows_prefix)
        self._check_owner()
        self._storage.delete(rows)
        self._storage.delete_empty_folder(self._layout.snapshot_rows_prefix)

    def outputs(self, wanted: Sequence[tuple[RelationVersion, Lsn]]) -> list[SnapshotOutput | XidstreamError]:
        return [self._output(relation) for relation, _ in wanted]

    def _output(self, relation: RelationVersion) -> SnapshotOutput:
        path = self._storage.local_path(self._layout.snapshot_rows_prefix)
        mapping = map_columns((), contract_schema(relation))
        return SnapshotOutput(
            self._stored_rows() if path is None else Location.parse(path),
            f"{relation.relid}-{uuid.uuid4().hex}",
            Conform.of(mapping.columns, mapping.names),
        )

    def carry(self, carrying: Carrying, output: SnapshotOutput) -> tuple[WrittenFile, ...] | None:
        raise Unsupported("a function has no log that rows could be carried over from")

    def commit(
        self, taken: Sequence[tuple[Generation, Sequence[WrittenFile]]]
    ) -> list[bool | XidstreamError]:
        """Whether the function has the rows of each. If not, they are put in its way.

        It does not wait: the driver's process has a few threads for all its callers. Ask again.
        """
        return [self._has_or_waits(*each) for each in taken]

    def _has_or_waits(self, generation: Generation, files: Sequence[WrittenFile]) -> bool:
        name = generation.relid, generation.number
        if name in self._delivered:
            return True
        with self._lock:
            if name not in self._queued:
                self._queued.add(name)
                paths = [f"{self._layout.snapshot_rows_prefix}/{file.path}" for file in files]
                self._waiting.put(_Waiting(generation, paths))
        return False

    def recover(self, generation: Generation) -> bool:
        """Whether the function has the rows: its line was written when it had them."""
        return (generation.relid, generation.number) in self._delivered

    def discard(self, output: SnapshotOutput) -> None:
        """Remove what an attempt wrote that has failed."""
        self._check_owner()
        if isinstance(output.table, StoredFolder):
            output.table.remove(output.directory)
            return
        try:
            remove(output.table, output.directory)
        except OSError as error:
            raise StorageFault(
                f"rows of a snapshot that failed cannot be removed: {error.strerror}"
            ) from error

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        """Forget that the function had it. ``reason`` is told by the caller."""
        ended = self._delivered.pop((line.relid, line.number), None)
        if ended is not None:
            forget_delivered(self._storage, self._layout, [ended])

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """Nothing is to be done: a function's rows have no states to read."""

    def reach(self, lsn: Lsn) -> None:
        """A function has no log."""

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """Nothing is to be done: a function's rows have no states to read."""

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """Nothing is to be done: a function's rows have no states to read."""
        return Proven(lsn)

    def complete(self) -> None:
        """Every table that is wanted is taken: let the stream go on."""
        self._complete.set()

    # -- the batch loop ----------------------------------------------------------------------------------

    def deliver(
        self, spark: SparkSession, give: Callable[[SnapshotBatch], None], stopped: Callable[[], bool]
    ) -> None:
        """Give each table to the function as it is taken, until all are, or ``stopped`` says so. Raises what ``give``
        raises."""
        number = 0
        while not (self._complete.is_set() or stopped()):
            try:
                waiting = self._waiting.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            generation = waiting.generation
            give(self._batch(spark, waiting, number))
            number += 1
            if stopped():
                return
            # The function may have taken long, and the rightful run may have a generation of this number by now.
            self._check_owner()
            write_delivered(self._storage, self._layout, generation)
            self._delivered[generation.relid, generation.number] = generation
            for folder in sorted({path.rpartition("/")[0] for path in waiting.paths}):
                self._storage.delete_folder(folder)
        if self._complete.is_set():
            # In an object store markers of these folders are left.
            self._check_owner()
            self._storage.delete_empty_folder(self._layout.snapshot_rows_prefix)

    def _batch(self, spark: SparkSession, waiting: _Waiting, number: int) -> SnapshotBatch:
        if self._storage.local_root is None:
            prefix = f"{self._layout.snapshot_rows_prefix}/"
            paths = [path.removeprefix(prefix) for path in waiting.paths]
            return SnapshotBatch(spark, waiting.generation, paths, number, self._stored_rows())
        paths = [f"file://{self._storage.local_path(path)}" for path in waiting.paths]
        return SnapshotBatch(spark, waiting.generation, paths, number)

    def _stored_rows(self) -> StoredFolder:
        return StoredFolder(self._storage, self._layout.snapshot_rows_prefix)

    def contained(self) -> Mapping[tuple[str, str], SnapshotBounds]:
        """By table: what the function has of it already."""
        newest: dict[tuple[str, str], Generation] = {}
        for each in self._delivered.values():
            name = each.relation.schema, each.relation.table
            if name not in newest or newest[name].number < each.number:
                newest[name] = each
        return {name: each.bounds for name, each in newest.items()}
