"""How far readers of the change log have come, by name: what ``log_retention`` must not remove before they have it.

A consumer is whoever reads the changes of a log in order, and keeps no place of its own that the run could know. It
tells a position after each portion: all changes up to there are processed. The retention cuts no table after the
lowest position of all consumers. One that never comes back holds the whole log, so ``ChangeLog.consumers`` tells when
each has moved last, and ``Consumer.remove`` forgets it. `xidstream check` and the run warn of one that has said nothing
for a week.

The positions are the rows of one small Delta table, ``_consumers`` below the root, so they are where the log is, in a
folder as in an object store. Each commit replaces its one file. Of two consumers that commit at once the second one
reads the first one's row, and tries again. The table's log is shortened every hundred commits, and replaced files go.

| column | |
| --- | --- |
| ``slot`` | system identifier/database/slot |
| ``name`` | the consumer's |
| ``lsn`` | all changes with a commit LSN up to this one are processed |
| ``moved_at`` | when it was told, by the clock of who told it |

Rejected: an application transaction for each name, which Delta never forgets; a file for each, without a way on stores
to tell a slower writer of the same name from a faster one.

Called by ``change_log`` and ``pipeline.sinks.log_shortening``. deltalake only, no Spark.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from xidstream.pipeline.changelog.log_table import reading
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import StorageFault, UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import MAX_VERSION, SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.table_metadata import STATISTICS, TableMetadata
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.delta_retention import LOG, REMOVED_FILES

SCHEMA: Final = pa.schema(
    [
        pa.field("slot", pa.string()),
        pa.field("name", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("moved_at", pa.timestamp("us", tz="UTC")),
    ]
)
ATTEMPTS: Final = 16
FORGOTTEN_S: Final = 7 * 86_400.0
"""A consumer that is read once a week is not forgotten; one that has said nothing for longer may be."""
_TIDY_EVERY: Final = 100
_KEPT_H: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_ABOUT: Final = TableMetadata(
    "One row for each consumer of the change log: it has processed all changes with a commit LSN up to lsn.",
    {STATISTICS: "lsn", LOG: f"interval {_KEPT_H} hours", REMOVED_FILES: f"interval {_KEPT_H} hours"},
    {},
)
_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class ConsumerPosition:
    """``moved_at``: when the consumer told a position last, even the same one; by its own clock."""

    name: str
    lsn: Lsn
    moved_at: datetime.datetime

    def age_s(self, now: datetime.datetime) -> float:
        """How long ago it told a position; 0 where its clock is ahead."""
        return max(0.0, (now - self.moved_at).total_seconds())

    def is_forgotten(self, last: int, now: datetime.datetime) -> bool:
        """Whether it has not told anything for long, though commits up to ``last`` wait for it."""
        return self.lsn < last and self.age_s(now) > FORGOTTEN_S


def read_positions(root: Location, application_id: str) -> list[ConsumerPosition]:
    """The positions of one slot's consumers, by name. Raises StorageFault."""
    with reading(f"Delta table {locations.CONSUMERS}"):
        writer = DeltaTableWriter.open(root.child(locations.CONSUMERS), locations.CONSUMERS)
        rows = [] if writer is None else _rows(writer)
    mine = [row for row in rows if row["slot"] == application_id]
    return sorted(
        (ConsumerPosition(row["name"], Lsn(row["lsn"]), row["moved_at"]) for row in mine),
        key=lambda each: each.name,
    )


class Consumer:
    """One consumer of a slot's log. Raises UsageError for a name that is none, StorageFault from every method."""

    def __init__(self, root: Location, application_id: str, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name of a consumer",
                remedy="give 1 to 63 of the characters A-Z a-z 0-9 _ . -",
            )
        self._root = root
        self._slot = application_id
        self.name = name

    def __repr__(self) -> str:
        return f"Consumer({self.name!r} of slot {self._slot!r})"

    def position(self) -> Lsn | None:
        """The position that was told last; None where none was, or the consumer was removed."""
        found = (each.lsn for each in read_positions(self._root, self._slot) if each.name == self.name)
        return next(found, None)

    def commit(self, lsn: Lsn | int | str) -> None:
        """All changes with a commit LSN up to ``lsn`` are processed: what lies after it is kept from now on. The first
        commit registers the consumer. Raises UsageError where ``lsn`` lies below the position that was told before.
        """
        wanted = Lsn.parse(lsn) if isinstance(lsn, str) else Lsn(lsn)

        def moved(rows: _Rows) -> _Rows:
            before = next((row["lsn"] for row in rows if self._is_mine(row)), 0)
            if wanted < before:
                raise UsageError(
                    f"consumer {self.name} is at {Lsn(before)} already, and cannot go back to {wanted}",
                    remedy="remove it first (Consumer.remove); what was cut meanwhile is gone",
                )
            now = datetime.datetime.now(datetime.timezone.utc)
            mine = {"slot": self._slot, "name": self.name, "lsn": int(wanted), "moved_at": now}
            return [*(row for row in rows if not self._is_mine(row)), mine]

        self._change(moved)

    def remove(self) -> bool:
        """Forget the consumer. Returns whether it was there."""
        if self.position() is None:
            return False
        self._change(lambda rows: [row for row in rows if not self._is_mine(row)])
        return True

    def _is_mine(self, row: dict[str, Any]) -> bool:
        return (row["slot"], row["name"]) == (self._slot, self.name)

    def _change(self, change: Callable[[_Rows], _Rows]) -> None:
        location = self._root.child(locations.CONSUMERS)
        columns = [TableColumn(field.name, field.type, field.name) for field in SCHEMA]
        with reading(f"Delta table {locations.CONSUMERS}"):
            for _ in range(ATTEMPTS):
                writer = DeltaTableWriter.open_or_create(location, locations.CONSUMERS, columns, _ABOUT)
                rows, replaced = change(_rows(writer)), writer.files()["path"].to_pylist()
                files = ParquetFiles(location, f"data-{uuid.uuid4().hex}-consumers", SCHEMA, "lsn")
                if rows:
                    files.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                try:
                    writer.commit(files.close(), {}, "lsn", removed=replaced, merges=False)
                except SnapshotOutdated:
                    continue
                if writer.version % _TIDY_EVERY == 0:
                    table = DeltaTable(location.uri, storage_options=location.storage_options)
                    table.vacuum(_KEPT_H, dry_run=False, enforce_retention_duration=False)
                return
        raise StorageFault(
            f"Delta table {locations.CONSUMERS} was changed by others during {ATTEMPTS} attempts"
        )


def _rows(writer: DeltaTableWriter) -> _Rows:
    found: _Rows = writer.read(SCHEMA.names, "lsn", 0, MAX_VERSION).to_pylist()
    return found
