"""Where the rows go that tables had before their stream: the one way of a snapshot to a sink.

Two do it. ``snapshot_log.SnapshotLog`` commits them to Delta tables, beside the batches.
``initial_copy.staged_snapshots`` keeps them in the storage until a function has had them. Whoever leads the snapshots
(``actors.snapshots``) sees neither of them, but a ``SnapshotTables`` whose calls go to the process with the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.ddl import Witnessed
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.key_filter import BoundComparison
from xidstream.pipeline.storage.stored_folder import StoredFolder


@dataclass(frozen=True)
class SnapshotOutput:
    """Where readers write one table's files, and in which columns. ``table``: of a log, or a store's folder where
    rows wait for a function. ``directory``: below ``table``, of this attempt's
    alone. ``key``: the table's name among a sink's, empty where it has none. ``cut``: what committed up to this LSN is
    gone from the table's log, so a snapshot must contain it."""

    table: Location | StoredFolder
    directory: str
    conform: Conform
    key: str = ""
    cut: Lsn = INVALID_LSN


@dataclass(frozen=True)
class Carrying:
    """The rows that a repair does not read from the server. They are the rows of generation ``number``, as a snapshot
    with ``bounds`` sees them, in the columns of ``relation``, without the rows that meet all of ``only``.
    ``first_seq``: no row that was read has this ``_seq``, nor a higher one."""

    relation: RelationVersion
    number: int
    bounds: SnapshotBounds
    only: tuple[BoundComparison, ...]
    first_seq: int


@dataclass(frozen=True)
class GenerationLine:
    """``table``: ``schema.table``. ``snapshot_lsn`` and ``valid_from`` are LSNs. ``is_ours``: whether it is the last
    generation of its table that a run of this slot added."""

    table: str
    relid: int
    number: int
    snapshot_lsn: int
    valid_from: int
    state: GenerationState
    is_ours: bool


@dataclass(frozen=True)
class Proven:
    """``lsn``: up to where readers may read. ``ended``: the generations that the stream's DDL has ended since the last
    call, each as it was before, and why."""

    lsn: Lsn
    ended: tuple[tuple[GenerationLine, str], ...] = ()


class SnapshotTables(Protocol):
    """The tables of one claim of the sink. The methods are called on several threads, each for tables of its own. They
    raise Superseded, StorageFault and what the sink raises, and then may be called again."""

    def clean(self) -> None:
        """When a run begins: remove what an earlier one had read, if nothing can come of it any more."""

    def lines(self, makes: bool) -> list[GenerationLine]:
        """The last state of each generation, by table and number. ``makes``: a run that may add lines asks. From then
        on an earlier owner of the slot can add none."""

    def outputs(self, wanted: Sequence[tuple[RelationVersion, Lsn]]) -> list[SnapshotOutput | XidstreamError]:
        """Where the files of each table are to be written, or why there is no place for them. ``wanted``: the
        tables, each with the LSN of its snapshot."""

    def carry(self, carrying: Carrying, output: SnapshotOutput) -> tuple[WrittenFile, ...] | None:
        """Write the rows of a generation that a repair does not read to files of the next one. None where the log does
        not answer at its snapshot yet: ask again. It may be asked for again after a failure, too.

        Raises PreconditionMissing where that generation does not stand, Unsupported where there is no log."""

    def commit(
        self, taken: Sequence[tuple[Generation, Sequence[WrittenFile]]]
    ) -> list[bool | XidstreamError]:
        """Take the rows of each generation. A repeated call takes nothing again. Returns for each whether the sink has
        the rows, or why it failed. Where it has not, ask again. What the tables have in common is done once."""

    def recover(self, generation: Generation) -> bool:
        """Whether a crash left the generation's rows in the sink. Then it has a line now."""

    def discard(self, output: SnapshotOutput) -> None:
        """Remove what an attempt wrote that has failed."""

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        """The generation does not stand any more. Once. ``witnessed``: where all that may have ended it left a
        message."""

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """DDL ended the generation up to what was proven by then: have it stand up to the DDL itself, where nothing
        has happened in between that left no message."""

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """The tables have these columns at these positions, up to where the sink has every commit, though perhaps no
        row with them. ``witnessed``: where all DDL left a message."""

    def reach(self, lsn: Lsn) -> None:
        """The sink has every commit up to ``lsn``, which is none itself."""

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """Up to ``lsn`` the generations that stand are what the tables were, as far as a look that took ``snapshot``
        proves it (``snapshot.ddl.KnownDdl.proves``)."""

    def complete(self) -> None:
        """Every table that is wanted is taken."""
