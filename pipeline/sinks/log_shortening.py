"""Cuts the change logs of a sink's tables: removes what ``log_retention`` does not ask for, and nobody needs.

``pipeline.changelog.shortening`` decides how far, and has the promise. This asks the tables what it decides by,
and commits. For each table of the slot, by itself:

1. W, the LSN from which on everything stays. For an age it is the last commit before that age, counted back from the
   newest commit, or from now where that is earlier. So a clock that is set wrong here, or on the server alone, removes
   nothing, and neither does a source that rests: one commit that is stamped a month ahead is no month. For a size it
   follows from the table's files, and for ``base`` it is the LSN of the table's oldest base table. It is never later
   than an hour before the newest commit (``LEAST_AGE_S``), and never beyond what is proven.
2. From where on others need the changes: the lowest position of all consumers, and the table's newest base table,
   from which the mirror goes on.
3. Where it is worth it, the table's rows at W are written to files: a start for what stays (``log_fold``). That may
   take a while, and the table goes on meanwhile. Of what lies up to W an erasure alone changes anything, and then the
   fold is given up.
4. One commit removes the files, adds those of the fold, and carries the cut. It carries the owner's mark, too, so
   a run that was taken over commits nothing here. It is made on the snapshot that was looked at: with any other commit
   in between it fails, and is tried again.

A table waits as a whole while a snapshot of it is being taken, or has rows without a line in ``_snapshots`` (a crash
came between). A snapshot that began in an earlier process, and needs what was cut meanwhile, is refused when it is
named (``SnapshotLog.commit``). Tables with rows of another slot are left alone.

``_transactions`` comes last, and goes no further than the cut of every table of the log. The greatest timestamp of what
goes is told with the cut: times up to there have no answer any more. ``_messages`` goes as far. The table says the
LSNs of a file's messages, and not those of their commits, which may lie after the cut: so these are read from the
file.

A crash anywhere leaves each table cut or not, and each says itself which. Removed files stay on the disk for a while
(``delta_file_retention``; an hour behind the last snapshot of an Iceberg table that names them), so who has opened a
table before reads on. The format's ``upkeep`` removes them then.

A table that cannot be folded (``folding``) is cut as far as its later starts allow, and an event says why, once.

What the tables are, ``shortened_tables`` says. In the driver's process, on a thread that the format's ``upkeep``
starts. pyarrow; Spark for a large fold alone.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from xidstream.pipeline import events
from xidstream.pipeline.changelog.consumers import ConsumerPosition
from xidstream.pipeline.changelog.folding import new_directory, write_fold
from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_fold import LogFold, fold_marks, fold_of
from xidstream.pipeline.changelog.log_table import MAX_LSN, LogFile, reading
from xidstream.pipeline.changelog.manifest import ManifestLine
from xidstream.pipeline.changelog.shortening import (
    Stretch,
    best_starts,
    cut_for,
    fold_for,
    held_back,
    lsn_for_bytes,
    removable,
    stretches_of,
    with_fold,
)
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.transactions_table import TransactionsTable
from xidstream.pipeline.errors import Unsupported, XidstreamError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import attempt_files, locations
from xidstream.pipeline.log_tables.erased_marks import ERASURES
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.quantities import human_s
from xidstream.pipeline.settings.log_retention import LEAST_AGE_S, LogRetention, TableRetention
from xidstream.pipeline.sinks.shortened_tables import ShortenedRoot, ShortenedTable
from xidstream.pipeline.spark.session import GetSession
from xidstream.pipeline.spark_errors import fault_of

ATTEMPTS: Final = 8
_TIME: Final = "commit_timestamp"
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Folded:
    """A fold whose files no commit names yet. ``n_erasures``: of the table when it was read."""

    fold: LogFold
    directory: str
    files: tuple[WrittenFile, ...]
    n_erasures: int

    def holds(self, writer: ShortenedTable, plan: _Plan) -> bool:
        """Whether it still is the table's state, and a start that the cut may rely on."""
        lsn, snapshot_lsn = self.fold.lsn, self.fold.snapshot_lsn
        folded = [
            with_fold(each, lsn) if each.snapshot_lsn == snapshot_lsn else each for each in plan.stretches
        ]
        is_start = any(
            each.snapshot_lsn == snapshot_lsn and each.first <= lsn <= each.last for each in plan.stretches
        )
        is_same = writer.watermark(ERASURES) == self.n_erasures
        return is_same and is_start and lsn <= plan.upto and cut_for(lsn, folded) == lsn


@dataclass(frozen=True)
class _Plan:
    """The cut of one table's log. ``cut``: without a new fold. ``upto``: no cut goes further. ``known_fold``: the
    fold that the log has. ``wanted``: what the retention asks for. ``base``: of the newest base table; None without
    one."""

    files: list[LogFile]
    stretches: list[Stretch]
    has_base: bool
    cut: int
    upto: int
    known_fold: LogFold | None
    wanted: int
    base: int | None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


class LogShortening:
    """``is_being_taken``: whether a snapshot of the table with this key is under way. ``get_session``: for folds of
    large tables; None where there is no Spark. ``tell_held`` gets the bytes that each consumer holds back, by name,
    after each turn.

    Raises Superseded, SinkDiverged, StorageFault from ``shorten``."""

    def __init__(
        self,
        root: ShortenedRoot,
        application_id: str,
        ownership: Ownership,
        retention: LogRetention,
        is_being_taken: Callable[[str], bool] = lambda key: False,
        get_session: GetSession | None = None,
        tell_held: Callable[[Mapping[str, int]], None] = lambda held: None,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        self._now = now
        self._tell_held = tell_held
        self._root = root
        self._slot = application_id
        self._ownership = ownership
        self._retention = retention
        self._is_being_taken = is_being_taken
        self._get_session = get_session
        self._announced: set[tuple[str, str]] = set()

    def shorten(self) -> None:
        """Cut each table as far as it goes, and then ``_transactions``."""
        if self._retention.keeps_all:
            return
        log = SlotLog(self._root.log_root, self._slot)
        latest = self._latest(log)
        if not latest:
            return
        consumers = self._root.positions(self._slot)
        self._tell_forgotten(consumers, latest)
        needed = {each.name: int(each.lsn) for each in consumers}
        held: dict[str, Mapping[str, int]] = {}
        key_of = self._root.log_root.key_of
        keys = {table_label(*name): key_of(*name) for name in log.table_names()}
        cuts = [self._shorten_table(log, name, key, latest, needed, held) for name, key in keys.items()]
        lowest = min(cuts, default=0)
        self._shorten_transactions(lowest)
        self._shorten_messages(lowest)
        self._tell_held({name: sum(of_table.get(name, 0) for of_table in held.values()) for name in needed})

    def _latest(self, log: SlotLog) -> int:
        """No cut goes beyond this; 0 where none can be made."""
        return min(self._before(LEAST_AGE_S), int(log.readable_lsn))

    def _before(self, age_s: float) -> int:
        """The LSN up to which all had committed so long before the newest commit; 0 where that is not known."""
        transactions = TransactionsTable(self._root.log_root)
        newest = transactions.newest_timestamp
        if newest is None:
            return 0
        later = transactions.first_later(
            min(newest, self._now()) - datetime.timedelta(seconds=age_s), MAX_LSN
        )
        return 0 if later is None else later - 1

    def _shorten_table(
        self,
        log: SlotLog,
        name: str,
        key: str,
        latest: int,
        needed: Mapping[str, int],
        held: dict[str, Mapping[str, int]],
    ) -> int:
        """Returns how far the table is cut then. ``needed``: the positions of the consumers, by name. ``held`` gets
        what they hold back of this table."""
        folded, is_looked_at = None, False
        try:
            for _ in range(ATTEMPTS):
                writer = self._root.open(key, name)
                if writer is None:
                    return 0
                self._ownership.check(writer.writer)
                before = writer.watermark(locations.cut_id(self._slot))
                plan = self._plan(log, writer, name, key, latest, needed)
                if plan is None or (folded is not None and not folded.holds(writer, plan)):
                    return before
                if not is_looked_at:
                    is_looked_at, folded = True, self._fold(log, writer, name, key, plan)
                    if folded is not None:
                        continue  # the table went on meanwhile
                cut = plan.cut if folded is None else folded.fold.lsn
                fold_at = 0 if plan.known_fold is None else plan.known_fold.lsn
                held[name] = self._held(name, plan, needed, fold_at)
                gone = removable(plan.files, plan.stretches, cut, fold_at) if cut > before else []
                if not gone:
                    return before
                reach("shortening_log")
                # A commit whose answer is lost may be made later still, and would name files that are gone.
                sent, folded = folded, None
                try:
                    self._commit(writer, cut, gone, sent)
                except SnapshotOutdated:
                    folded = sent
                    continue
                reach("log_shortened")
                return cut
            return before  # a busy table: the next turn
        finally:
            if folded is not None:
                self._discard(key, name, folded.directory)

    def _held(self, name: str, plan: _Plan, consumers: Mapping[str, int], fold: int) -> Mapping[str, int]:
        could_not = any(table == name for table, _ in self._announced)
        return held_back(
            plan.files, plan.stretches, plan.wanted, plan.base, consumers, fold, may_fold=not could_not
        )

    def _commit(
        self, writer: ShortenedTable, cut: int, gone: Sequence[LogFile], folded: _Folded | None
    ) -> None:
        versions = {locations.cut_id(self._slot): cut}
        marks, paths = self._ownership.marks, [file.path for file in gone]
        if folded is None:
            writer.commit([], versions, marks=marks, removed=paths)
            return
        marks = {**marks, **fold_marks(folded.fold, writer.watermark, self._slot)}
        writer.commit(folded.files, versions, marks=marks, removed=paths)

    def _plan(
        self,
        log: SlotLog,
        writer: ShortenedTable,
        name: str,
        key: str,
        latest: int,
        consumed: Mapping[str, int],
    ) -> _Plan | None:
        """The plan of one table; None where it waits, or is left alone."""
        retention = self._retention.of(name)
        if retention.keeps_all or self._is_being_taken(key):
            return None
        try:
            log.log_table(name)
            writer.check_plain()
        except Unsupported:
            return None
        # After the table: a snapshot's line that is read is of rows that the table has.
        generations, lines = log.generations().get(name, []), self._lines(name)
        if not self._knows_its_snapshot(writer, generations):
            return None
        files, known_fold = _files(writer, "_commit_lsn"), fold_of(writer.watermark, self._slot)
        wanted = min(latest, self._wanted(retention, files, lines))
        base = max((line.lsn for line in lines), default=None)
        needed = [*consumed.values(), *([] if base is None else [base])]
        there = list(lines)
        while True:
            stretches = stretches_of(
                generations, [(line.snapshot_lsn, line.lsn) for line in there], known_fold
            )
            missing = self._missing_base(wanted, stretches, there)
            if missing is None:
                cut = cut_for(wanted, stretches, needed)
                return _Plan(
                    files, stretches, bool(lines), cut, min([wanted, *needed]), known_fold, wanted, base
                )
            there.remove(missing)

    def _fold(self, log: SlotLog, writer: ShortenedTable, name: str, key: str, plan: _Plan) -> _Folded | None:
        """A new fold, where it is worth it and possible."""
        before = writer.watermark(locations.cut_id(self._slot))
        if plan.has_base:
            return None
        found = fold_for(plan.files, plan.stretches, max(before, plan.cut), plan.upto)
        if found is None:
            return None
        stretch, lsn = found
        directory = new_directory()
        reach("folding_log")
        try:
            at = log.table_at(name, Lsn(lsn))
            n_erasures = at.log_table.watermark(ERASURES) or 0
            files = write_fold(at, directory, writer.ranged, self._get_session)
        except Exception as error:  # noqa: BLE001 - one table that cannot be folded holds up no other
            self._discard(key, name, directory)
            self._tell(name, type(error).__name__, fault_of(error, f"folding table {name}").message)
            return None
        if files is None:
            reason = "it is large, or its keys are compared by Spark alone, and there is no Spark here"
            self._tell(name, "", reason)
            return None
        reach("log_folded")
        fold = LogFold(stretch.snapshot_lsn, lsn, sum(file.n_rows for file in files))
        return _Folded(fold, directory, files, n_erasures)

    def _discard(self, key: str, name: str, directory: str) -> None:
        """Remove the files of a fold that no commit can name any more, unless the table names them."""
        with suppress(OSError, DeltaError, XidstreamError):  # they go like those of a failed snapshot
            writer = self._root.open(key, name)
            if writer is not None and not any(path.startswith(directory) for path in writer.paths()):
                attempt_files.remove(writer.location, directory)

    def _tell_forgotten(self, consumers: Sequence[ConsumerPosition], latest: int) -> None:
        now = _now()
        for each in consumers:
            if each.is_forgotten(latest, now) and ("", each.name) not in self._announced:
                self._announced.add(("", each.name))
                text = (
                    f"the change log is kept behind {each.lsn} for consumer {each.name}, which has told nothing for "
                    f"{human_s(each.age_s(now))}: `xidstream consumer remove --name {each.name}` if it is gone"
                )
                _LOGGER.warning(events.Event("log_held_back", text, consumer=each.name))

    def _tell(self, name: str, kind: str, reason: str) -> None:
        """Once for each kind of failure. It is tried again at each turn."""
        if (name, kind) in self._announced:
            return
        self._announced.add((name, kind))
        text = (
            f"the change log of table {name} is cut at its snapshots and base tables alone, for its rows at the cut "
            f"could not be folded: {reason}"
        )
        _LOGGER.warning(events.Event("log_not_folded", text, table=name))

    def _wanted(self, retention: TableRetention, files: list[LogFile], lines: list[ManifestLine]) -> int:
        if retention.age_s is not None:
            return self._before(retention.age_s)
        if retention.n_bytes is not None:
            return lsn_for_bytes(files, retention.n_bytes)
        there = (line.lsn for line in lines if self._root.has_base(line))
        return next(there, 0)

    def _missing_base(
        self, wanted: int, stretches: list[Stretch], lines: list[ManifestLine]
    ) -> ManifestLine | None:
        """A line that the cut would rely on, and whose base table is gone."""
        relied = {(stretch.snapshot_lsn, start.needs) for stretch, start in best_starts(wanted, stretches)}
        for line in lines:
            if (line.snapshot_lsn, line.lsn) in relied and not self._root.has_base(line):
                return line
        return None

    def _lines(self, name: str) -> list[ManifestLine]:
        return [line for line in self._root.base_lines(self._slot) if line.table == name]

    def _knows_its_snapshot(self, writer: ShortenedTable, generations: list[TableGeneration]) -> bool:
        """Whether the snapshot whose rows were committed last has its line."""
        snapshot_lsn = writer.watermark(f"{self._slot}/snapshot")
        return not snapshot_lsn or any(int(each.bounds.snapshot_lsn) == snapshot_lsn for each in generations)

    def _shorten_transactions(self, cut: int) -> None:
        """``cut``: the lowest of all tables."""
        if not cut or len(self._root.slots()) > 1:
            return  # it does not say whose a transaction is
        for _ in range(ATTEMPTS):
            writer = self._root.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
            assert writer is not None, "the log is there"
            self._ownership.check(writer.writer)
            if writer.watermark(locations.cut_id(self._slot)) >= cut:
                return
            times = _greatest(writer, _TIME)
            gone = [
                file.path
                for file in removable(_files(writer, "commit_lsn"), (), cut)
                if times[file.path] is not None
            ]
            if not gone:
                return
            time_id = locations.cut_time_id(self._slot)
            time_us = max(_microseconds(time) for path in gone if (time := times[path]) is not None)
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

    def _shorten_messages(self, cut: int) -> None:
        """``cut``: the lowest of all tables."""
        if not cut or len(self._root.slots()) > 1:
            return
        for _ in range(ATTEMPTS):
            writer = self._root.open(locations.MESSAGES, locations.MESSAGES)
            if writer is None:
                return
            self._ownership.check(writer.writer)
            if writer.watermark(locations.cut_id(self._slot)) >= cut:
                return
            files = removable(_files(writer, "lsn"), (), cut)
            gone = [file.path for file in files if _last_commit(writer, file) <= cut]
            if not gone:
                return
            try:
                versions = {locations.cut_id(self._slot): cut}
                writer.commit([], versions, "lsn", marks=self._ownership.marks, removed=gone)
            except SnapshotOutdated:
                continue
            return


def _last_commit(table: ShortenedTable, file: LogFile) -> int:
    """The greatest commit LSN of the messages in a file; 0 where none has one."""
    with reading(table.writer.title), table.location.open(file.path) as source:
        found = pc.max(pq.ParquetFile(source).read(["commit_lsn"])["commit_lsn"]).as_py()
    return found or 0


def _files(writer: ShortenedTable, column: str) -> list[LogFile]:
    listed = writer.files()
    names = ("path", "size_bytes", f"min.{column}", f"max.{column}")
    if not listed.num_rows or not set(names) <= set(listed.column_names):
        return []
    values = zip(*(listed[name].to_pylist() for name in names), strict=True)
    return [
        LogFile(path, n_bytes or 0, 0 if least is None else least, MAX_LSN if most is None else most)
        for path, n_bytes, least, most in values
    ]


def _greatest(table: ShortenedTable, column: str) -> dict[str, datetime.datetime | None]:
    """By the path of each file, the greatest value of a column; None where it is not told."""
    listed, name = table.files(), f"max.{column}"
    values = listed[name].to_pylist() if name in listed.column_names else [None] * listed.num_rows
    return dict(zip(listed["path"].to_pylist(), values, strict=True))


def _microseconds(time: datetime.datetime) -> int:
    """One millisecond later: other tools cut the greatest of a file to whole milliseconds."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return (time - epoch) // datetime.timedelta(microseconds=1) + 1000
