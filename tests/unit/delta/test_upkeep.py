"""What a Delta table does not need any more goes beside the commits: deltalake on a folder and on S3, no Spark."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from tests.snapshot_tables import commit_one
from tests.unit.delta.test_small_files import APP, COLUMNS, LSN, commit, paths, row, rows_of, written
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.log_tables.test_snapshot_log import generation_of
from tests.unit.log_tables.test_snapshot_log import written as snapshot_of
from tests.waiting import wait_until
from xidstream.pipeline.delta import delta_table, upkeep
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.delta.upkeep import Schedule, Upkeep, UpkeepPace, UpkeepStep
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables import attempt_files, small_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES, SizeClass
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.log_tables.watched_clock import WatchedClock
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.delta_retention import LOG, RECORDED, REMOVED_FILES, DeltaRetention

TENURE = Tenure(1, "epoch", 1, {}, Lsn(10**9))
NO_TIME = DeltaRetention(log_h=0, files_h=0)
HOUR_S = 3600
MANY = SIZE_CLASSES[0].many
NOTE = TableColumn("note", pa.string(), "note")
WIDE = [LSN, NOTE]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "public.t"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit makes both steps due."""
    monkeypatch.setattr(upkeep, "PACES", {step: UpkeepPace(1, 0) for step in UpkeepStep})


class Kept:
    """A writer of a table with this retention, and its upkeep."""

    def __init__(
        self, location: Location, retention: DeltaRetention, columns: list[TableColumn] = COLUMNS
    ) -> None:
        self.location = location
        self.upkeep = Upkeep(retention)
        about = TableMetadata("", {}, {}, retention)
        self.writer = DeltaTableWriter.open_or_create(location, "public.t", columns, about)
        self.writer.describe(about)
        self.writer.upkeep = self.upkeep

    def commit(self, first: int, last: int) -> None:
        for lsn in range(first, last + 1):
            commit(self.writer, self.location, lsn)


@pytest.fixture
def keeping(request: pytest.FixtureRequest) -> Iterator[list[Upkeep]]:
    kept: list[Upkeep] = []
    yield kept
    for each in kept:
        each.close()


def kept(
    keeping: list[Upkeep], location: Location, retention: DeltaRetention, columns: list[TableColumn] = COLUMNS
) -> Kept:
    made = Kept(location, retention, columns)
    keeping.append(made.upkeep)
    return made


def data_files(location: Location) -> set[str]:
    root = Path(location.uri)
    # ``os.walk`` passes over a folder that goes while it looks.
    paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return {
        str(path.relative_to(root))
        for path in paths
        if path.suffix == ".parquet" and "_delta_log" not in path.parts
    }


def log_versions(location: Location) -> list[int]:
    return sorted(int(path.stem) for path in (Path(location.uri) / "_delta_log").glob("*.json"))


def test_schedule_of_a_table_with_one_commit_a_second() -> None:
    """The worked example of the module's header."""
    schedule, took = Schedule(0), {}
    for second in range(1, 5_001):
        schedule.note(second)
        if steps := schedule.take(float(second)):
            took[second] = steps
    assert [second for second, steps in took.items() if UpkeepStep.LOG in steps] == list(
        range(50, 5_001, 100)
    )
    assert [second for second, steps in took.items() if UpkeepStep.FILES in steps] == [1_000, 4_600]


def test_schedule_of_a_table_that_catches_up_asks_once_a_minute() -> None:
    schedule, took_s = Schedule(7), []
    for commits in range(1, 20_001):
        now_s = commits / 100
        schedule.note(7 + commits)
        if UpkeepStep.LOG in schedule.take(now_s):
            took_s.append(now_s)
    assert len(took_s) == 4
    assert min(b - a for a, b in itertools.pairwise(took_s)) >= 60
    assert schedule.wait_s(200.0) is not None, "the last hundred is asked for, and waits"


def test_log_is_shortened_beside_the_commits_and_the_table_is_what_it_was(
    keeping: list[Upkeep], location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PACES", {UpkeepStep.LOG: UpkeepPace(100, 0, offset=50)})
    table = kept(keeping, location, NO_TIME)
    table.commit(1, 120)
    assert log_versions(location)[0] == 0, "a reader may be at what the checkpoint of version 99 replaced"
    table.commit(121, 150)
    wait_until(lambda: log_versions(location)[0] == 99)
    assert rows_of(location) == [row(lsn) for lsn in range(1, 151)]
    assert DeltaTable(location.uri, version=100).version() == 100
    with pytest.raises(Exception, match=r"(?i)version|log"):
        DeltaTable(location.uri, version=98)
    # A writer that begins anew reads the watermark from what is left.
    again = DeltaTableWriter.open(location, "public.t")
    assert again is not None and again.watermark(APP) == 150
    commit(again, location, 151)


def test_commits_of_others_below_the_root_leave_the_log_to_the_upkeep(location: Location) -> None:
    """A proof a second, or a snapshot's line, would remove commits that a reader has just listed."""
    Kept(location, NO_TIME)
    writer = DeltaTableWriter.open(location, "public.t")
    assert writer is not None
    for lsn in range(1, 131):
        commit(writer, location, lsn)
    assert log_versions(location)[0] == 0


def test_log_stays_where_its_table_says_so(
    keeping: list[Upkeep], location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PACES", {step: UpkeepPace(100, 0) for step in UpkeepStep})
    table = kept(keeping, location, NO_TIME)
    DeltaTable(location.uri).alter.set_table_properties(
        {"delta.enableExpiredLogCleanup": "false", REMOVED_FILES: "interval 1 days"}
    )
    table.writer.refresh()
    table.commit(1, 150)
    (location_of_replaced,) = {path for path in data_files(location) if path.startswith("data-00001")}
    table.upkeep.close()
    assert log_versions(location)[0] == 0
    assert location_of_replaced not in paths(location), "a merge has replaced it"


@pytest.mark.usefixtures("at_once")
def test_files_that_merges_replaced_go_with_their_folders_and_the_newest_stay(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, NO_TIME)
    table.commit(1, MANY + 3)
    wait_until(lambda: data_files(location) == set(paths(location)))
    assert len(paths(location)) == 4
    named = {"_delta_log", *(path.partition("/")[0] for path in paths(location))}
    # A folder goes after its last file.
    wait_until(lambda: {path.name for path in Path(location.uri).iterdir() if path.is_dir()} == named)
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 4)]


@pytest.mark.usefixtures("at_once")
def test_reader_that_opened_the_table_before_the_merge_reads_on(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, DeltaRetention())
    table.commit(1, MANY - 1)
    before = DeltaTable(location.uri)
    table.commit(MANY, 3 * MANY)
    table.upkeep.close()
    assert before.to_pyarrow_table().num_rows == MANY - 1
    assert len(data_files(location)) > 3 * MANY


@pytest.mark.usefixtures("at_once")
def test_leftovers_of_writers_that_died_go_when_no_commit_can_name_them_any_more(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, DeltaRetention())
    table.commit(1, 2)
    ages_h = {
        "data-dead/part-0.parquet": 8 * 24,
        "data-slow/part-0.parquet": 6 * 24,
        "snapshot-slow/part-0.parquet": 29 * 24,
        "snapshot-dead/part-0.parquet": 31 * 24,
        "mine.parquet": 400 * 24,
    }
    for path, age_h in {**ages_h, **dict.fromkeys(paths(location), 400 * 24)}.items():
        file = Path(location.uri, path)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (time.time() - age_h * HOUR_S,) * 2)
    table.commit(3, 3)
    wait_until(lambda: "data-dead/part-0.parquet" not in data_files(location))
    wait_until(lambda: "snapshot-dead/part-0.parquet" not in data_files(location))
    table.upkeep.close()
    assert data_files(location) == {
        "data-slow/part-0.parquet",
        "snapshot-slow/part-0.parquet",
        "mine.parquet",
        *paths(location),
    }
    assert rows_of(location) == [row(lsn) for lsn in range(1, 4)]


def test_retention_is_told_to_the_table_and_what_a_person_set_stays(location: Location) -> None:
    def properties() -> dict[str, str]:
        return dict(DeltaTable(location.uri).metadata().configuration)

    Kept(location, DeltaRetention(1, 12), WIDE)
    assert (properties()[LOG], properties()[REMOVED_FILES]) == ("interval 1 hours", "interval 24 hours")
    Kept(location, DeltaRetention(3, 12), WIDE)
    assert (properties()[LOG], properties()[REMOVED_FILES]) == ("interval 3 hours", "interval 24 hours")
    DeltaTable(location.uri).alter.set_table_properties({LOG: "interval 30 days"})
    version = DeltaTable(location.uri).version()
    Kept(location, DeltaRetention(3, 12), WIDE)
    assert DeltaTable(location.uri).version() == version
    Kept(location, DeltaRetention(2, 6), WIDE)
    assert (properties()[LOG], properties()[REMOVED_FILES]) == ("interval 30 days", "interval 12 hours")
    ours = DeltaRetention(2, 6)
    assert (ours.files_s_of(properties()), ours.log_s_of(properties())) == (6 * HOUR_S, 30 * 24 * HOUR_S)
    assert ours.files_s_of({**properties(), REMOVED_FILES: "interval 1 weeks"}) == 7 * 24 * HOUR_S
    assert ours.files_s_of({**properties(), REMOVED_FILES: "a while"}) is None


def test_table_of_before_gets_the_retention_with_its_next_batch(location: Location) -> None:
    DeltaTableWriter.open_or_create(location, "public.t", WIDE)
    assert RECORDED not in DeltaTable(location.uri).metadata().configuration
    Kept(location, DeltaRetention(), WIDE)
    assert DeltaTable(location.uri).metadata().configuration[LOG] == "interval 1 hours"


def test_table_that_lists_features_gets_no_more_of_them_for_the_retention_alone(location: Location) -> None:
    """deltalake 1.6.6 adds ``variantType`` with any change of a property, and older readers refuse the table then."""
    DeltaTableWriter.open_or_create(location, "public.t", COLUMNS)
    before = DeltaTable(location.uri).protocol()
    assert before.reader_features == ["timestampNtz"]
    Kept(location, DeltaRetention())
    assert DeltaTable(location.uri).protocol() == before


# -- middling files --------------------------------------------------------------------------------------


@pytest.fixture
def middling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kilobytes are middling, and four of them become one."""
    monkeypatch.setattr(small_files, "MIDDLING", (SizeClass(2_000, 1 << 20, 4),))
    monkeypatch.setattr(upkeep, "MIDDLING", (SizeClass(2_000, 1 << 20, 4),))
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (SizeClass(0, 1_000, 1_000),))
    monkeypatch.setattr(upkeep, "PACES", {UpkeepStep.LOG: UpkeepPace(1, 0)})


def large_row(lsn: int) -> dict[str, object]:
    return {"_commit_lsn": lsn, "note": random.Random(lsn).randbytes(2_000).hex()}


def commit_large(table: Kept, lsn: int) -> None:
    table.writer.commit(written(table.location, [large_row(lsn)], WIDE), {APP: lsn})


def wait_for_merge(table: Kept) -> None:
    """Until one is prepared, or was taken in already. Its file is there a moment before."""

    def is_prepared() -> bool:
        is_waiting = table.upkeep._tables[table.location.uri].merge is not None
        return is_waiting or any("-merged" in path for path in paths(table.location))

    wait_until(is_prepared)


def merged(location: Location) -> set[str]:
    return {path for path in data_files(location) if "-merged" in path}


@pytest.mark.usefixtures("middling")
def test_middling_files_are_merged_beside_the_commits_and_taken_in_behind_one(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, DeltaRetention(), WIDE)
    for lsn in range(1, 5):
        commit_large(table, lsn)
    wait_for_merge(table)
    assert len(paths(location)) == 4, "nobody names it yet"
    commit_large(table, 5)
    # The upkeep may have looked at the version from before, and prepared the same once more: nobody takes that in.
    taken_in, newest = sorted(paths(location), key=lambda path: path.startswith("data-00005"))
    assert taken_in in merged(location) and newest.startswith("data-00005")
    assert rows_of(location) == [large_row(lsn) for lsn in range(1, 6)]


@pytest.mark.usefixtures("middling")
def test_merge_of_middling_files_is_dropped_where_others_have_removed_one(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, DeltaRetention(), WIDE)
    for lsn in range(1, 5):
        commit_large(table, lsn)
    wait_for_merge(table)
    DeltaTable(location.uri).delete("_commit_lsn = 2")
    table.writer.refresh()
    commit_large(table, 5)
    assert [each["_commit_lsn"] for each in rows_of(location)] == [1, 3, 4, 5]


@pytest.mark.usefixtures("middling")
def test_merge_that_nobody_took_goes_with_its_run(keeping: list[Upkeep], location: Location) -> None:
    table = kept(keeping, location, DeltaRetention(), WIDE)
    for lsn in range(1, 5):
        commit_large(table, lsn)
    wait_for_merge(table)
    assert merged(location)
    table.upkeep.close()
    assert not merged(location)
    assert rows_of(location) == [large_row(lsn) for lsn in range(1, 5)]


@pytest.mark.usefixtures("middling")
def test_merge_has_the_columns_that_the_table_got_meanwhile(
    keeping: list[Upkeep], location: Location
) -> None:
    table = kept(keeping, location, DeltaRetention(), WIDE)
    commit_large(table, 1)
    later = TableColumn("later", pa.int64(), "later")
    table.writer.add_columns([later])
    for lsn in range(2, 6):
        rows = [{**large_row(lsn), "later": lsn}]
        table.writer.commit(written(location, rows, [*WIDE, later]), {APP: lsn})
    wait_for_merge(table)
    table.writer.commit(written(location, [{**large_row(6), "later": 6}], [*WIDE, later]), {APP: 6})
    assert len(paths(location)) < 6
    expected = [{**large_row(lsn), "later": lsn if lsn > 1 else None} for lsn in range(1, 7)]
    assert rows_of(location) == expected


# -- a clock that is wrong -------------------------------------------------------------------------------


class SetForward:
    """A wall clock that was right, ``behind_s`` after the machine's, until somebody ``sets`` it to that. So deltalake,
    which asks the machine, sees the jump, too. No time passes."""

    def __init__(self, behind_s: float) -> None:
        self.behind_s = behind_s

    def wall_s(self) -> float:
        return time.time() - self.behind_s

    def sets(self) -> None:
        self.behind_s = 0.0

    def stamped(self, location: Location) -> None:
        """Have the commits and files of a table say when they were made by this clock. A checkpoint would say what the
        commits said before: whether there is one already is a matter of how fast the machine was."""
        log = Path(location.uri, "_delta_log")
        for path in (*log.glob("*.checkpoint.parquet"), *log.glob("_last_checkpoint")):
            path.unlink()
        for path in Path(location.uri).rglob("*.*"):
            os.utime(path, (self.wall_s(), self.wall_s()))
            if path.suffix == ".json":
                actions = [json.loads(line) for line in path.read_text().splitlines()]
                for action in actions:
                    if "commitInfo" in action:
                        action["commitInfo"]["timestamp"] = int(self.wall_s() * 1000)
                    if "remove" in action:
                        action["remove"]["deletionTimestamp"] = int(self.wall_s() * 1000)
                path.write_text("\n".join(json.dumps(action) for action in actions))
                os.utime(path, (self.wall_s(), self.wall_s()))


def written_before(location: Location, clock: SetForward) -> set[str]:
    """A table in which a merge has replaced files a moment ago. Returns all its files."""
    writer = DeltaTableWriter.open_or_create(location, "public.t", COLUMNS)
    for lsn in range(1, MANY + 3):
        commit(writer, location, lsn)
    writer.checkpoint()
    clock.stamped(location)
    assert len(paths(location)) == 3
    return data_files(location)


def kept_once(keeping: list[Upkeep], location: Location, ages: WatchedClock) -> None:
    """Two commits, and the upkeep after each, whose steps are due. When the second begin, the first are done."""
    beside = Upkeep(DeltaRetention(), ages=ages)
    keeping.append(beside)
    writer = DeltaTableWriter.open(location, "public.t")
    assert writer is not None
    writer.upkeep = beside
    for lsn in (1_000, 1_001):
        commit(writer, location, lsn)
        wait_until(lambda: beside._tables[location.uri].schedule.wait_s(0.0) is None)
    beside.close()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("jump_h", [13, 40 * 24])
def test_clock_that_is_set_forward_removes_neither_files_nor_leftovers_nor_log(
    keeping: list[Upkeep], location: Location, jump_h: int
) -> None:
    """Half a day, and more than any time for which something stays."""
    clock = SetForward(jump_h * HOUR_S)
    before = written_before(location, clock)
    ages = WatchedClock(clock.wall_s)
    in_work = Path(location.uri, "data-in-work/part-0.parquet")
    in_work.parent.mkdir()
    in_work.touch()
    os.utime(in_work, (clock.wall_s(), clock.wall_s()))
    clock.sets()
    kept_once(keeping, location, ages)
    assert data_files(location) >= before | {"data-in-work/part-0.parquet"}
    assert log_versions(location)[0] == 0


@pytest.mark.usefixtures("at_once")
def test_run_that_begins_with_a_clock_half_a_day_ahead_removes_nothing_for_now(
    keeping: list[Upkeep], location: Location
) -> None:
    before = written_before(location, SetForward(13 * HOUR_S))
    kept_once(keeping, location, WatchedClock())
    assert data_files(location) >= before
    assert log_versions(location)[0] == 0


@pytest.mark.usefixtures("at_once")
def test_run_that_begins_behind_a_short_pause_removes_what_is_old(
    keeping: list[Upkeep], location: Location
) -> None:
    before = written_before(location, SetForward(13 * HOUR_S))
    again = DeltaTableWriter.open(location, "public.t")
    assert again is not None
    commit(again, location, 999)
    kept_once(keeping, location, WatchedClock())
    assert len(before - data_files(location)) == MANY
    assert rows_of(location) == [row(lsn) for lsn in (*range(1, MANY + 3), 999, 1_000, 1_001)]


# -- failures, and a store -------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_failure_is_told_once_and_tried_again(
    keeping: list[Upkeep],
    location: Location,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = []

    def fails(*_: object) -> int:
        tried.append(1)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(upkeep, "remove_files", fails)
    table = kept(keeping, location, NO_TIME)
    with caplog.at_level(logging.WARNING):
        for lsn in range(1, 4):
            n_tried = len(tried)
            table.commit(lsn, lsn)
            wait_until(lambda n_tried=n_tried: len(tried) > n_tried)  # type: ignore[misc]
        table.upkeep.close()
    told = [record for record in caplog.records if "public.t" in record.getMessage()]
    assert len(told) == 1 and "tried again" in told[0].getMessage()


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_files_that_merges_replaced_go_from_a_store(
    keeping: list[Upkeep], s3: tuple[Location, Connection]
) -> None:
    location, _ = s3
    table = kept(keeping, location, NO_TIME)
    table.commit(1, MANY + 2)
    store = attempt_files.store_of(location)

    def stored() -> set[str]:
        infos = store.get_file_info_selector(fs.FileSelector("", recursive=True))
        return {i.path for i in infos if i.path.startswith("data-") and i.path.endswith(".parquet")}

    def named() -> set[str]:
        opened = DeltaTable(location.uri, storage_options=location.storage_options)
        return set(pa.table(opened.get_add_actions())["path"].to_pylist())

    wait_until(lambda: stored() == named())
    assert len(named()) == 3
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 3)]


def test_the_lines_of_snapshots_have_the_upkeep_of_the_batches_tables(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that an earlier xidstream has left, whose log it kept for thirty days."""
    root, owner = Location.parse(str(tmp_path)), Ownership(APP, f"{APP}/messages", "root", TENURE)
    monkeypatch.setattr(delta_table, "CHECKPOINT_EVERY", 10)
    before = SnapshotLog(DeltaTables(root), APP, owner)
    n = MANY + 20

    def take(log: SnapshotLog, number: int) -> None:
        snapshot_lsn = 98 + number
        bounds = dataclasses.replace(
            generation_of(1).bounds, snapshot_lsn=Lsn(snapshot_lsn), valid_from=Lsn(snapshot_lsn + 1)
        )
        generation = dataclasses.replace(generation_of(1), number=number, bounds=bounds)
        assert commit_one(log, generation, snapshot_of(log, range(1), snapshot_lsn=snapshot_lsn))

    take(before, 1)
    snapshots = root.child("_snapshots")
    assert LOG not in DeltaTable(snapshots.uri).metadata().configuration
    tables = DeltaTables(root, NO_TIME)
    log = SnapshotLog(DeltaTables(root, beside=tables), APP, owner)
    for number in range(2, n + 1):
        take(log, number)
    assert DeltaTable(snapshots.uri).metadata().configuration[LOG] == "interval 0 hours"
    take(log, n + 1)
    wait_until(lambda: log_versions(snapshots)[0] > 0)
    wait_until(lambda: len(data_files(snapshots)) == len(paths(snapshots)) < MANY)
    tables.close()
    assert [line.number for line in log.lines(False)] == list(range(1, n + 2))
