"""Cuts the change logs of a Delta root: removes what ``log_retention`` does not ask for, and nobody needs.

``pipeline.changelog.shortening`` decides how far, and has the promise. This asks the root what it decides by, and
commits. For each table of the slot, by itself:

1. W, the LSN from which on everything stays. For an age it is the last commit before that age, counted back from the
   newest commit. So a clock that is set wrong here, or a source that rests, removes nothing. For a size it follows from
   the table's files, and for ``base`` it is the LSN of the table's oldest base table. It is never later than an hour
   before the newest commit (``LEAST_AGE_S``), and never beyond what is proven.
2. From where on others need the changes: the lowest position of all consumers, and the table's newest base table,
   from which the mirror goes on.
3. One Delta commit removes the files, and carries the cut. It carries the owner's mark, too, so a run that was taken
   over commits nothing here. It is made on the snapshot that was looked at: with any other commit in between it
   fails, and is tried again.

A table waits as a whole while a snapshot of it is being taken, or has rows without a line in ``_snapshots`` (a crash
came between). A snapshot that began in an earlier process, and needs what was cut meanwhile, is refused when it is
named (``SnapshotLog.commit``). Tables with rows of another slot are left alone.

``_transactions`` comes last, and goes no further than the cut of every table of the log. The greatest timestamp of what
goes is told with the cut: times up to there have no answer any more. ``_messages`` stays: a message's file says its own
LSN, and not that of its commit.

A crash anywhere leaves each table cut or not, and each says itself which. Removed files stay on the disk for
``delta_file_retention``, so who has opened a table before reads on (``delta.upkeep`` removes them then).

Not done here: to make a start where a table has none, by folding its state at the cut into a new generation. A table
with one snapshot and no mirror is therefore not cut, until somebody asks for a snapshot of it.

In the driver's process, on the thread of ``upkeep``. deltalake and pyarrow, no Spark.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from xidstream.pipeline.changelog.change_log import ChangeLog
from xidstream.pipeline.changelog.consumers import read_positions
from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_table import MAX_LSN, LogFile, LogTable
from xidstream.pipeline.changelog.manifest import ManifestLine, base_of, read_lines
from xidstream.pipeline.changelog.shortening import (
    Stretch,
    best_starts,
    cut_for,
    lsn_for_bytes,
    removable,
    stretches_of,
)
from xidstream.pipeline.changelog.slots import application_ids
from xidstream.pipeline.changelog.transactions_table import TransactionsTable
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.settings.log_retention import LEAST_AGE_S, LogRetention, TableRetention

ATTEMPTS: Final = 8
_TIME: Final = "commit_timestamp"


class LogShortening:
    """``is_being_taken``: whether a snapshot of the table in this directory is under way.

    Raises Superseded, SinkDiverged, StorageFault from ``shorten``."""

    def __init__(
        self,
        root: Location,
        application_id: str,
        ownership: Ownership,
        retention: LogRetention,
        is_being_taken: Callable[[str], bool] = lambda directory: False,
    ) -> None:
        self._root = root
        self._slot = application_id
        self._ownership = ownership
        self._retention = retention
        self._is_being_taken = is_being_taken

    def shorten(self) -> None:
        """Cut each table as far as it goes, and then ``_transactions``."""
        if self._retention.keeps_all:
            return
        log = ChangeLog(self._root.uri, self._slot, self._root.storage_options)
        latest = self._latest(log)
        if not latest:
            return
        needed = [int(each.lsn) for each in read_positions(self._root, self._slot)]
        names = {table_label(*name): locations.encode_table(*name) for name in log.table_names()}
        cuts = [
            self._shorten_table(log, name, directory, latest, needed) for name, directory in names.items()
        ]
        self._shorten_transactions(min(cuts, default=0))

    def _latest(self, log: ChangeLog) -> int:
        """No cut goes beyond this; 0 where none can be made."""
        return min(self._before(LEAST_AGE_S), int(log.readable_lsn))

    def _before(self, age_s: float) -> int:
        """The LSN up to which all had committed so long before the newest commit; 0 where that is not known."""
        transactions = TransactionsTable(self._root)
        newest = transactions.newest_timestamp
        if newest is None:
            return 0
        later = transactions.first_later(newest - datetime.timedelta(seconds=age_s), MAX_LSN)
        return 0 if later is None else later - 1

    def _shorten_table(
        self, log: ChangeLog, name: str, directory: str, latest: int, needed: Sequence[int]
    ) -> int:
        """Returns how far the table is cut then. ``needed``: the positions of the consumers."""
        retention = self._retention.of(name)
        location = self._root.child(directory)
        for _ in range(ATTEMPTS):
            writer = DeltaTableWriter.open(location, name)
            if writer is None:
                return 0
            self._ownership.check(writer)
            before = writer.watermark(locations.cut_id(self._slot))
            if retention.keeps_all or self._is_being_taken(directory):
                return before
            try:
                log.log_table(name)
                writer.check_plain()
            except Unsupported:
                return before
            # Behind the table: a snapshot's line that is read is of rows that the table has.
            generations, lines = log.generations(), self._lines(name)
            if not self._knows_its_snapshot(writer, generations.get(name, [])):
                return before
            files = _files(writer, "_commit_lsn")
            cut = self._cut(retention, files, generations.get(name, []), lines, latest, needed)
            stretches = stretches_of(generations.get(name, []), ((line.place, line.lsn) for line in lines))
            gone = removable(files, stretches, cut) if cut > before else []
            if not gone:
                return before
            reach("shortening_log")
            try:
                versions = {locations.cut_id(self._slot): cut}
                paths = [file.path for file in gone]
                writer.commit([], versions, marks=self._ownership.marks, removed=paths)
            except SnapshotOutdated:
                continue
            reach("log_shortened")
            return cut
        return before  # a busy table: the next turn

    def _cut(
        self,
        retention: TableRetention,
        files: list[LogFile],
        generations: list[TableGeneration],
        lines: list[ManifestLine],
        latest: int,
        consumed: Sequence[int],
    ) -> int:
        wanted = min(latest, self._wanted(retention, files, lines))
        needed = [*consumed, *([max(line.lsn for line in lines)] if lines else [])]
        there = list(lines)
        while True:
            stretches = stretches_of(generations, ((line.place, line.lsn) for line in there))
            missing = self._missing_base(wanted, stretches, there)
            if missing is None:
                return cut_for(wanted, stretches, needed)
            there.remove(missing)

    def _wanted(self, retention: TableRetention, files: list[LogFile], lines: list[ManifestLine]) -> int:
        if retention.age_s is not None:
            return self._before(retention.age_s)
        if retention.n_bytes is not None:
            return lsn_for_bytes(files, retention.n_bytes)
        there = (line.lsn for line in lines if base_of(self._root, line) is not None)
        return next(there, 0)

    def _missing_base(
        self, wanted: int, stretches: list[Stretch], lines: list[ManifestLine]
    ) -> ManifestLine | None:
        """A line that the cut would rely on, and whose base table is gone."""
        relied = {(stretch.place, start.needs) for stretch, start in best_starts(wanted, stretches)}
        for line in lines:
            if (line.place, line.lsn) in relied and base_of(self._root, line) is None:
                return line
        return None

    def _lines(self, name: str) -> list[ManifestLine]:
        return [line for line in read_lines(self._root, self._slot) if line.table == name]

    def _knows_its_snapshot(self, writer: DeltaTableWriter, generations: list[TableGeneration]) -> bool:
        """Whether the snapshot whose rows were committed last has its line."""
        place = writer.watermark(f"{self._slot}/snapshot")
        return not place or any(int(each.bounds.place) == place for each in generations)

    def _shorten_transactions(self, cut: int) -> None:
        """``cut``: the lowest of all tables."""
        location = self._root.child(locations.TRANSACTIONS)
        if not cut or len(application_ids(location)) > 1:
            return  # it does not say whose a transaction is
        for _ in range(ATTEMPTS):
            writer = DeltaTableWriter.open(location, locations.TRANSACTIONS)
            assert writer is not None, "the log is there"
            self._ownership.check(writer)
            if writer.watermark(locations.cut_id(self._slot)) >= cut:
                return
            times = LogTable(location, writer.version).greatest(_TIME)
            gone = [
                file.path
                for file in removable(_files(writer, "commit_lsn"), (), cut)
                if times[file.path] is not None
            ]
            if not gone:
                return
            time_id = locations.cut_time_id(self._slot)
            time_us = max(_microseconds(times[path]) for path in gone)
            marks: Mapping[str, int] = {
                **self._ownership.marks,
                time_id: max(time_us, writer.watermark(time_id)),
            }
            try:
                writer.commit(
                    [], {locations.cut_id(self._slot): cut}, "commit_lsn", marks=marks, removed=gone
                )
            except SnapshotOutdated:
                continue
            return


def _files(writer: DeltaTableWriter, column: str) -> list[LogFile]:
    listed = writer.files()
    names = ("path", "size_bytes", f"min.{column}", f"max.{column}")
    if not listed.num_rows or not set(names) <= set(listed.column_names):
        return []
    values = zip(*(listed[name].to_pylist() for name in names), strict=True)
    return [
        LogFile(path, n_bytes or 0, 0 if least is None else least, MAX_LSN if most is None else most)
        for path, n_bytes, least, most in values
    ]


def _microseconds(time: datetime.datetime) -> int:
    """One millisecond later: other tools cut the greatest of a file to whole milliseconds."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return (time - epoch) // datetime.timedelta(microseconds=1) + 1000
