"""The table ``_snapshots``: what a run tells of a table's generations, each line once.

A generation has one line when it has finished, and one more when it has ended. The second line says up to where the
generation stands (``until``). Where the place of the DDL that ended it is known later, there is a third line, and the
greatest ``until`` counts.

A line is added under an application id of its table (``<application id>/snapshot/<directory>``), whose version is twice
the generation's number, and one more for the line that ends it. So a line that is asked for again is not added again.
The line that ends an older generation has no version. One commit ends all generations that one event ends.

Rejected: one application id for all tables. Their snapshots finish in any order, and a version that is higher would
hide one that comes later.

Each call opens the table anew (``commit_attempts``). Used by ``snapshot_log``, from any thread; ``generation_states``
without a run.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline.errors import StorageFault, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.commit_attempts import guarded
from xidstream.pipeline.log_tables.generation_rows import Spoiler, ended_row, spoiled_rows
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, LogTables, LogTableWriter
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.generation import GenerationState

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

Ended = tuple[GenerationLine, str]
"""A generation as it was before it ended, and why it has ended."""


class GenerationLines:
    """Raises Superseded, SinkDiverged, StorageFault and SinkFailed from every method."""

    def __init__(self, tables: LogTables, application_id: str, ownership: Ownership) -> None:
        self._tables = tables
        self._application_id = application_id
        self._ownership = ownership
        self._last: deque[LogTableWriter] = deque(maxlen=1)
        """The handle of ``_snapshots`` after the last ``add``. The next ``add`` need not open the table, which takes
        longer with each snapshot in it. If somebody else has committed meanwhile, the commit is refused, and the table
        is opened again."""

    def all(self, makes: bool) -> list[GenerationLine]:
        """The last state of each generation, by table and number; of all slots that write below this root.

        ``makes``: make ``_snapshots`` where it is not, as a run must that may add lines. From then on an earlier owner
        of the slot can add none. A run that takes no snapshots leaves no table behind that says so.
        """

        def read() -> list[GenerationLine]:
            columns = ["table", "relid", "generation", "place", "valid_from", "state"]
            writer = self._opened(makes=makes)
            if writer is None:
                return []
            rows = writer.read(columns, "place", 0, MAX_VERSION).to_pylist()
            found: dict[tuple[str, int, int], GenerationLine] = {}
            # Of the two rows of a generation that has ended, that one counts, wherever it stands.
            for row in sorted(rows, key=_is_ended):
                ours = writer.watermark(self._line_id(row["table"])) // 2 == row["generation"]
                line = _line(row, GenerationState(row["state"]), is_ours=ours)
                found[line.table, line.number, line.snapshot_lsn] = line
            lines = sorted(found.values(), key=lambda line: (line.table, line.number))
            standing = (each for each in lines if each.is_ours and each.state is GenerationState.FINISHED)
            self._ownership.check_snapshots(writer, max((each.valid_from for each in standing), default=0))
            self._ownership.claim(writer)
            return lines

        return guarded(self._tables, locations.SNAPSHOTS, read)

    def add(self, lines: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]) -> None:
        """Add the lines of finished generations, of a table each, in one commit.

        The second line of a pair ends its generation at once. A line that is there already is left out.
        """

        def add() -> None:
            # It may be older than the table is: no row of it is looked at.
            writer = self._last.pop() if self._last else self._opened()
            assert writer is not None
            rows: list[dict[str, Any]] = []
            versions: dict[str, int] = {}
            for row, ended in lines:
                line_id, finished = self._line_id(row["table"]), 2 * row["generation"]
                told, version = writer.watermark(line_id), finished + (ended is not None)
                if told >= version:
                    continue
                rows += [row] if told < finished else []
                rows += [] if ended is None else [ended]
                versions[line_id] = version
            if versions:
                self._append(writer, rows, versions)
                reach("snapshot_told")
            self._last.append(writer)

        guarded(self._tables, locations.SNAPSHOTS, add)

    def end(self, line: GenerationLine, reason: str, until: Callable[[], int]) -> None:
        """Add the line that says why the generation has ended, and up to where it stands."""

        def ended(writer: LogTableWriter) -> list[dict[str, Any]]:
            found = (row for row in _all_rows(writer) if not _is_ended(row))
            row = next(r for r in found if (r["table"], r["place"]) == (line.table, line.snapshot_lsn))
            return [ended_row(row, reason, until())]

        self._add(line.table, 2 * line.number + 1, ended)

    def extend(self, line: GenerationLine, until_of: Callable[[int], int]) -> None:
        """Have a generation that has ended stand longer. ``until_of``: given up to where it stands."""

        def extended() -> None:
            writer = self._opened()
            assert writer is not None
            known_rows = [
                row
                for row in _all_rows(writer)
                if (row["table"], row["place"]) == (line.table, line.snapshot_lsn)
            ]
            last = max((row for row in known_rows if _is_ended(row)), key=lambda row: row["until"])
            until = until_of(last["until"])
            if until > last["until"]:
                self._append(writer, [{**last, "until": until}], {})

        guarded(self._tables, locations.SNAPSHOTS, extended)

    def end_spoiled(self, table: str, spoilers: Sequence[Spoiler], proven: Callable[[], int]) -> list[Ended]:
        """End all generations of the table that these end, in one commit: no reader finds one of them ended and another
        not. Returns the slot's newest one, if it is among them."""

        def ended_here() -> list[Ended]:
            writer = self._opened()
            assert writer is not None
            line_id = self._line_id(table)
            newest = writer.watermark(line_id) // 2
            known_rows = [row for row in _all_rows(writer) if row["table"] == table]
            ended = spoiled_rows(known_rows, spoilers, newest, proven)
            if ended:
                is_newest = any(row["generation"] == newest for row in ended)
                self._append(writer, ended, {line_id: 2 * newest + 1} if is_newest else {})
            return [ended_of(row) for row in ended if row["generation"] == newest]

        return guarded(self._tables, locations.SNAPSHOTS, ended_here)

    # -- inside --------------------------------------------------------------------------------------------

    def _add(
        self,
        table: str,
        version: int,
        make: Callable[[LogTableWriter], list[dict[str, Any]]],
    ) -> None:

        def add() -> None:
            writer = self._opened()
            assert writer is not None
            line_id = self._line_id(table)
            if writer.watermark(line_id) < version:
                self._append(writer, make(writer), {line_id: version})
                reach("snapshot_told")

        guarded(self._tables, locations.SNAPSHOTS, add)

    def _append(
        self, writer: LogTableWriter, rows: Sequence[dict[str, Any]], versions: Mapping[str, int]
    ) -> None:
        job = f"data-{uuid.uuid4().hex}-driver"
        files = ParquetFiles(writer.location, job, SNAPSHOTS_SCHEMA, "place")
        files.write(pa.RecordBatch.from_pylist(rows, schema=SNAPSHOTS_SCHEMA))
        writer.commit(files.close(), versions, "place", marks=self._ownership.marks)

    def _line_id(self, table: str) -> str:
        return f"{self._application_id}/snapshot/{locations.encode(table)}"

    def _opened(self, *, makes: bool = True) -> LogTableWriter | None:
        """None where there is none, and none is to be made."""
        columns = [TableColumn(f.name, f.type, f.name) for f in SNAPSHOTS_SCHEMA]
        key = locations.SNAPSHOTS
        writer = self._tables.open(key, key)
        if writer is None and makes:
            writer = self._tables.open_or_create(key, key, columns, self._tables.about_own(key))
        if writer is not None:
            self._ownership.check(writer)
            writer.take_columns(columns)
            if makes:
                writer.describe(self._tables.about_own(key))
        return writer


def ended_of(row: Mapping[str, Any]) -> Ended:
    """Given the row that ends it."""
    return _line(row, GenerationState.FINISHED, is_ours=True), row["reason"]


def generation_states(tables: LogTables) -> dict[tuple[str, int, Lsn], tuple[GenerationState, str]]:
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
    for row in sorted(rows, key=_is_ended):
        key = (row["table"], row["generation"], Lsn(row["place"]))
        found[key] = (GenerationState(row["state"]), row["reason"] or "")
    return found


def _all_rows(writer: LogTableWriter) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = writer.read(SNAPSHOTS_SCHEMA.names, "place", 0, MAX_VERSION).to_pylist()
    return rows


def _is_ended(row: Mapping[str, Any]) -> bool:
    return bool(row["state"] == GenerationState.ENDED.value)


def _line(row: Mapping[str, Any], state: GenerationState, is_ours: bool) -> GenerationLine:
    return GenerationLine(
        row["table"], row["relid"], row["generation"], row["place"], row["valid_from"], state, is_ours
    )
