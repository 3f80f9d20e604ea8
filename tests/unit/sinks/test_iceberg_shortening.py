"""``log_retention`` on real Iceberg tables: the rule is Delta's, so Delta tables of the same history are the oracle.

What may go, and what is told, ``test_log_shortening`` says. Here: that both formats keep the same rows and answer
alike, what a cut's snapshot is, and what happens between its steps."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import LongType

from tests.spark.support import IDENTITY, LocalSegments, batch_of, memory_frame, put_memory, read_memory
from tests.unit.iceberg.test_commit_together import transaction
from tests.unit.iceberg.test_iceberg_table import grown, table_of
from tests.unit.sinks.test_log_shortening import RELATION, SCHEMA, SLOT, TABLE, Root, truth
from tests.waiting import wait_until
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.errors import ComponentLost, PreconditionMissing, StorageFault, Superseded
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.iceberg import expiring, upkeep
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.iceberg_types import RULES
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.settings.log_retention import LogRetention
from xidstream.pipeline.sinks import log_shortening
from xidstream.pipeline.sinks.iceberg_shortening import IcebergShortenedRoot
from xidstream.pipeline.sinks.iceberg_sink import IcebergSink
from xidstream.pipeline.sinks.shortened_tables import ShortenedRoot
from xidstream.pipeline.spark.frames import SinkBatch

KEY = "public__a"
LAST = 1900


class IcebergLog(Root):
    """The same root, in Iceberg tables of a folder's catalog."""

    def __init__(self, root: Location, tenure: int = 1) -> None:
        self.root = root
        self.merges = False
        self.address = IcebergAddress.parse(f"{root.uri}/lake/shop")
        self.tables = IcebergTables(self.address, makes=True)
        hold = Tenure(tenure, "epoch", 1, {}, Lsn(10**9))
        self.ownership = Ownership(SLOT, f"{SLOT}/messages", "root", hold)
        self.snapshots = SnapshotLog(self.tables, SLOT, self.ownership)
        key = locations.TRANSACTIONS
        columns = map_columns((), TRANSACTIONS_SCHEMA, RULES).columns
        self.transactions: Any = self.tables.open_or_create(key, key, columns, self.tables.about_own(key))
        targets = map_columns((), SCHEMA, RULES).columns
        source = [column for column in targets if column.name in ("id", "v")]
        brought = [VersionSince(SLOT, Lsn(1), RELATION, source)]
        self.table: Any = self.tables.open_or_create(
            KEY, TABLE, targets, self.tables.about(RELATION), brought
        )

    @property
    def shortened(self) -> ShortenedRoot:
        return IcebergShortenedRoot(self.address, self.tables)

    @property
    def log(self) -> LogFrames:
        return LogFrames(f"iceberg:{self.address.argument}", SLOT)

    def loaded(self, key: str = KEY) -> Any:
        catalog = self.address.open(makes=False)
        assert catalog is not None
        return catalog.load_table(f"shop.{key}")

    def lsns(self, directory: str = TABLE, column: str = "_commit_lsn") -> list[int]:
        rows = self.loaded(KEY if directory == TABLE else directory).scan(selected_fields=(column,))
        return sorted(rows.to_arrow()[column].to_pylist())

    @property
    def last_operation(self) -> Operation:
        operation: Operation = self.loaded().current_snapshot().summary.operation
        return operation


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "iceberg"))


def filled(made: Root, *, again: bool = True) -> Root:
    """19 hours, a snapshot valid from 51 and, ``again``, one from 1,051; commits by fours, so that files straddle."""
    made.snapshot(1, 51, 40, truth(0))
    for lsn in range(100, 1001, 400):
        made.commit(*range(lsn, min(lsn + 400, 1001), 100))
    if again:
        made.snapshot(2, 1051, 1040, truth(1000))
    for lsn in range(1100, LAST, 300):
        made.commit(*range(lsn, lsn + 300, 100))
    made.prove(LAST)
    return made


def filled_log(root: Location, *, again: bool = True) -> IcebergLog:
    made = IcebergLog(root)
    filled(made, again=again)
    return made


def seen(made: Root, lsns: range = range(51, LAST + 1, 150)) -> list[object]:
    """All that the log has, and all that it answers."""
    states: list[object] = []
    for lsn in lsns:
        try:
            states.append(made.state(lsn))
        except PreconditionMissing:
            states.append("not known")
    log = made.log
    return [
        log.cut_lsn(TABLE),
        log.oldest_lsn(TABLE),
        made.lsns(),
        made.lsns("_transactions", "commit_lsn"),
        states,
    ]


@pytest.mark.parametrize(
    ("retention", "folds", "again"), [("5h", False, True), ("1 KB", False, True), ("5h", True, False)]
)
def test_a_log_in_iceberg_tables_is_cut_as_the_delta_log_of_the_same_history(
    tmp_path: Path, root: Location, retention: str, folds: bool, again: bool
) -> None:
    oracle = filled(Root(Location.parse(str(tmp_path / "delta"))), again=again)
    made = filled_log(root, again=again)
    assert seen(made) == seen(oracle)
    early = made.log.table_at(TABLE, Lsn(300))
    whole = made.loaded().scan().to_arrow().num_rows
    opened = made.loaded()
    oracle.shorten(retention, folds=folds)
    made.shorten(retention, folds=folds)
    assert seen(made) == seen(oracle)
    assert int(made.log.cut_lsn(TABLE)) > 1000
    assert made.state(LAST) == truth(LAST)
    assert made.last_operation is (Operation.OVERWRITE if folds else Operation.DELETE)
    # Who has opened the log before reads on.
    assert opened.scan().to_arrow().num_rows == whole
    assert len(early.snapshot_files()) == 1
    before = made.loaded().current_snapshot().snapshot_id
    made.shorten(retention, folds=folds)
    assert made.loaded().current_snapshot().snapshot_id == before, "nothing more goes: nothing is committed"
    made.commit(LAST + 200)
    assert made.lsns()[-1] == LAST + 200


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_histories_are_cut_alike_in_both_formats(tmp_path: Path, root: Location, seed: int) -> None:
    logs = [Root(Location.parse(str(tmp_path / "delta"))), IcebergLog(root)]
    dice = random.Random(seed)
    lsn, number = 100, 0
    for _ in range(10):
        step = dice.random()
        if step < 0.25 or not number:
            number += 1
            for log in logs:
                log.snapshot(number, lsn + 51, lsn + 40, truth(lsn))
            lsn += 100
            continue
        n = dice.randint(1, 4)
        changes = {
            lsn + i * 100: (dice.choice(["insert", "update_postimage", "delete"]), dice.randint(0, 9), lsn)
            for i in range(n)
        }
        for log in logs:
            log.put(changes)
        lsn += n * 100
        if step > 0.8:
            hours, folds = dice.randint(1, 12), dice.random() < 0.5
            for log in logs:
                log.prove(lsn)
                log.shorten(f"{hours}h", folds=folds)
            assert seen(logs[1], range(100, lsn, 130)) == seen(logs[0], range(100, lsn, 130))
    for log in logs:
        log.prove(lsn)
        log.shorten("2h", folds=True)
    assert seen(logs[1], range(100, lsn, 70)) == seen(logs[0], range(100, lsn, 70))


@pytest.mark.parametrize("point", ["shortening_log", "iceberg_committing", "log_shortened"])
def test_a_crash_between_the_steps_leaves_a_log_that_answers_rightly_and_the_next_run_goes_on(
    root: Location, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    made = filled_log(root)
    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", faultpoints.FaultPlan(f"{point}:error", None))
        with pytest.raises(ComponentLost):
            made.shorten("5h")
    cut = int(made.log.cut_lsn(TABLE))
    assert cut == (1040 if point == "log_shortened" else 0)
    assert made.lsns("_transactions", "commit_lsn")[0] == 100
    for lsn in (60, 700, 1_051, 1_800):
        if lsn >= (made.log.oldest_lsn(TABLE) or 0):
            assert made.state(lsn) == truth(lsn)
        else:
            with pytest.raises(PreconditionMissing, match="shortened"):
                made.state(lsn)
    later = IcebergLog(root, tenure=2)
    later.commit(LAST + 200)
    later.shorten("5h")
    assert made.lsns("_transactions", "commit_lsn")[0] == 1100
    assert made.state(1_800) == truth(1_800)


def test_a_run_that_was_taken_over_cuts_nothing(root: Location) -> None:
    made = filled_log(root)
    IcebergLog(root, tenure=2).commit(LAST + 200)
    with pytest.raises(Superseded):
        made.shorten("5h")
    assert made.log.cut_lsn(TABLE) == 0 and made.state(60) == truth(60)


def test_a_batch_that_comes_between_the_look_and_the_cut_loses_nothing(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filled_log(root)
    come: list[str] = []

    def reach(point: str) -> None:
        if not come:
            come.append(point)
            made.commit(LAST + 200)

    monkeypatch.setattr(log_shortening, "reach", reach)
    made.shorten("5h")
    assert len(come) == 1
    assert int(made.log.cut_lsn(TABLE)) == 1040
    assert made.lsns()[-1] == LAST + 200
    # And the run's own handle goes on after a cut that it has not seen.
    made.shorten("5h")
    made.commit(LAST + 300)
    table = made.tables.open(KEY, TABLE)
    assert table is not None and table.watermark(SLOT) == LAST + 300


def test_a_table_whose_column_was_renamed_is_not_folded_from_names_that_files_do_not_have(
    root: Location, caplog: pytest.LogCaptureFixture
) -> None:
    made = filled_log(root, again=False)
    with made.loaded().update_schema() as change:
        change.rename_column("v", "called")
    rows = made.lsns()
    with caplog.at_level(logging.WARNING):
        made.shorten("5h", folds=True)
    assert (made.log.cut_lsn(TABLE), made.lsns()) == (0, rows)
    assert "log_not_folded" in [getattr(each.msg, "name", "") for each in caplog.records]


def test_a_table_with_a_name_that_has_meant_two_columns_is_left_alone_until_it_has_not(
    root: Location,
) -> None:
    made = filled_log(root)
    with made.loaded().update_schema() as change:
        change.rename_column("v", "called")
    with made.loaded().update_schema() as change:
        change.add_column("v", LongType())
    rows = made.lsns()
    made.shorten("5h")
    assert made.lsns() == rows
    with made.loaded().update_schema() as change:
        change.delete_column("v")
    made.shorten("5h")
    assert made.lsns()[0] > rows[0]


def test_a_cut_whose_answer_was_lost_may_be_made_later_and_has_the_files_of_its_fold(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filled_log(root, again=False)
    sent: list[Callable[[], None]] = []
    real = IcebergTableWriter._send

    def send(table: Any, transaction: Any) -> None:
        sent.append(lambda: real(table, transaction))
        raise StorageFault("the catalog has not answered in time")

    with monkeypatch.context() as slow:
        slow.setattr(IcebergTableWriter, "_send", send)
        with pytest.raises(StorageFault):
            made.shorten("5h", folds=True)
    (commit,) = sent
    commit()
    assert int(made.log.cut_lsn(TABLE)) > 1000
    assert made.state(LAST) == truth(LAST)


def test_the_upkeep_has_the_logs_cut_when_files_of_transactions_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", 2)
    monkeypatch.setattr(expiring, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(upkeep, "SWEEP_COMMITS", 1)
    calls: list[int] = []

    def shorten() -> None:
        calls.append(1)
        raise Superseded("another run has the slot")

    keeping = IcebergUpkeep(shorten=shorten)
    try:
        table = table_of(tmp_path, keeping)
        grown(tmp_path, table, range(100, 106))
        wait_until(lambda: bool(keeping._due))
        assert calls == [], "another table's turn is none"
        table.label = locations.TRANSACTIONS
        keeping._swept_s.clear()
        grown(tmp_path, table, range(110, 116))
        wait_until(lambda: calls == [1])
    finally:
        keeping.close()


def test_the_sink_has_its_log_cut_by_its_retention_and_tells_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = LocalSegments(str(tmp_path / "segments"))

    def no_spark() -> Any:
        raise AssertionError("nothing here needs Spark")

    asked: list[str] = []
    monkeypatch.setattr(log_shortening.LogShortening, "_before", lambda self, age_s: asked.append("age") or 0)
    for retention in ("", "1 KB"):
        address = IcebergAddress.parse(f"{tmp_path}/lake/shop{len(retention)}")
        sink = IcebergSink(address, IDENTITY, 0, LogRetention.parse(retention))
        try:
            sink.open(no_spark)
            sink.claim(Tenure(1, "epoch-1", 1, {}, Lsn(10_000)))
            content = batch_of([transaction(10_100)], segments, 0)
            store = segments.storage
            sink.write(SinkBatch(content, no_spark, memory_frame, segments, read_memory, put_memory, store))
            upkeep_of = sink._tables._upkeep  # type: ignore[attr-defined]
            upkeep_of._begin_to_shorten(locations.TRANSACTIONS)
            upkeep_of._shortening.join(60)
            if not retention:
                assert (asked, sink.log_part()) == ([], None)
                continue
            assert asked, "the run's log was looked at"
            wait_until(lambda sink=sink: sink.log_part() is not None)  # type: ignore[misc]
            part = sink.log_part()
            assert part is not None
            assert (part.error, part.n_tables, part.n_cut_tables) == (None, 2, 0)
        finally:
            sink.close()


def test_whoever_looks_at_the_log_again_and_again_opens_no_catalog_again_and_all_are_closed(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look left a pool of connections behind."""
    made = IcebergLog(root)
    made.snapshot(1, 51, 40, truth(0))
    made.commit(100)
    made.prove(100)
    assert BaseTables(f"iceberg:{made.address.argument}", None, 1 << 20).refresh(no_session) is not None
    opened: list[Any] = []
    closed: list[Any] = []
    opens, closes = IcebergAddress.open, SqlCatalog.close

    def counted(address: IcebergAddress, *, makes: bool) -> Any:
        opened.append(opens(address, makes=makes))
        return opened[-1]

    def noted(catalog: SqlCatalog) -> None:
        closed.append(catalog)
        closes(catalog)

    monkeypatch.setattr(IcebergAddress, "open", counted)
    monkeypatch.setattr(SqlCatalog, "close", noted)
    sink = IcebergSink(made.address, IDENTITY, 0, LogRetention.parse("30d"))
    for _ in range(3):
        assert sink._root.slots() and sink._root.log_root.open(locations.TRANSACTIONS) is not None
        (line,) = sink._root.base_lines(SLOT)
        assert sink._root.has_base(line)
    assert len(opened) == 2
    sink.close()
    assert closed == opened


def test_base_goes_as_far_as_the_oldest_base_table_and_the_mirror_goes_on(root: Location) -> None:
    made = IcebergLog(root)
    made.snapshot(1, 51, 40, truth(0))
    mirror = BaseTables(f"iceberg:{made.address.argument}", None, 1 << 20)
    for first in (100, 500, 900):
        for lsn in range(first, first + 400, 100):
            made.commit(lsn)
        made.prove(first + 300)
        if first > 100:
            assert mirror.refresh(no_session) is not None
    made.shorten("base")
    assert made.log.cut_lsn(TABLE) == 800 == made.log.oldest_lsn(TABLE) and min(made.lsns()) == 900
    at = made.log.table_at(TABLE, Lsn(900))
    base = at.find_base()
    assert base is not None and base.lsn == 800 and at.tail_files(base.lsn)
    with pytest.raises(PreconditionMissing, match="shortened"):
        at.snapshot_files()
    made.commit(1300)
    made.prove(1300)
    assert mirror.refresh(no_session) is not None, "it needs nothing of what is gone"


def no_session() -> Any:
    raise AssertionError("nothing here is for Spark")
