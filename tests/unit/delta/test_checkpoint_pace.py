"""When a table in a folder gets a checkpoint of its log between deltalake's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.unit.delta.test_small_files import APP, commit, opened, row, rows_of
from xidstream.pipeline.delta.checkpoint_pace import COMMIT_BYTES, FILE_S, LEAST, CheckpointPace
from xidstream.pipeline.log_tables.locations import Location


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "public.t"))


def checkpoints(location: Location) -> list[int]:
    return sorted(int(path.name[:20]) for path in (Path(location.uri) / "_delta_log").glob("*.checkpoint.*"))


def due_after(pace: CheckpointPace, version: int) -> int:
    return next(n for n in range(1, 1_000) if pace.is_due(version + n))


@pytest.mark.parametrize(
    ("took_s", "n_bytes", "commits"),
    [
        (0.0, 0, LEAST),
        (FILE_S * LEAST**2 / 2, LEAST * COMMIT_BYTES, LEAST),
        (FILE_S * 40**2 / 2, 0, 40),
        (0.0, 40 * COMMIT_BYTES + 1, 41),
        (FILE_S * 20**2 / 2, 30 * COMMIT_BYTES, 30),
    ],
)
def test_next_checkpoint_is_due_when_the_listings_and_the_commits_cost_as_much_as_it_does(
    took_s: float, n_bytes: int, commits: int
) -> None:
    pace = CheckpointPace(5, 100)
    assert due_after(pace, 5) == LEAST
    pace.made(15, took_s, n_bytes)
    assert due_after(pace, 15) == commits


@pytest.mark.parametrize(("took_s", "n_bytes"), [(1.0, 0), (0.0, 100 * COMMIT_BYTES)])
def test_a_dear_checkpoint_has_the_next_ones_with_every_hundredth_commit(took_s: float, n_bytes: int) -> None:
    pace = CheckpointPace(0, 100)
    pace.made(10, took_s, n_bytes)
    assert not any(pace.is_due(version) for version in range(11, 99)) and pace.is_due(99)
    pace.made(99, took_s, n_bytes)
    assert not any(pace.is_due(version) for version in range(100, 199))
    assert pace.is_due(199) and pace.is_due(250), "where version 199 was another's commit"


def test_one_that_failed_is_due_again_some_commits_later() -> None:
    pace = CheckpointPace(90, 100, may_more=False)
    assert not pace.is_due(98) and pace.is_due(99)
    pace.failed(99)
    assert not any(pace.is_due(version) for version in range(99, 99 + LEAST)) and pace.is_due(99 + LEAST)
    pace.made(99 + LEAST, 0.0, 0)
    assert not pace.is_due(198) and pace.is_due(199)


@pytest.mark.parametrize(
    ("n_bytes", "commits"), [(0, LEAST), (40 * COMMIT_BYTES + 1, 41)], ids=["small", "by_its_bytes"]
)
def test_a_writer_goes_on_from_the_checkpoint_that_it_finds(n_bytes: int, commits: int) -> None:
    pace = CheckpointPace(25, 1_000)
    pace.found(20, n_bytes)
    assert due_after(pace, 20) == commits


def test_writers_that_live_for_one_commit_each_leave_a_checkpoint_every_ten(location: Location) -> None:
    opened(location)
    for lsn in range(1, 4 * LEAST):
        opened(location).commit([], {APP: lsn})
    assert checkpoints(location) == [LEAST, 2 * LEAST, 3 * LEAST]


@pytest.mark.parametrize("version", [LEAST, 99], ids=["ours", "the_hundredth"])
@pytest.mark.parametrize("obstacle", ["{:020d}.checkpoint.parquet", "_last_checkpoint"])
def test_a_checkpoint_that_cannot_be_written_fails_no_commit_is_told_once_and_tried_again(
    location: Location, caplog: pytest.LogCaptureFixture, version: int, obstacle: str
) -> None:
    opened(location)
    if version == 99:
        DeltaTable(location.uri).alter.set_table_properties({"delta.checkpointInterval": "100"})
    writer = opened(location)
    for lsn in range(writer.version + 1, version):
        writer.commit([], {APP: lsn})
    log = Path(location.uri) / "_delta_log"
    # No file can be written in the place of a folder that has something, whoever this process is.
    names = [obstacle.format(each) for each in (version, version + LEAST)]
    for name in names:
        (log / name / "in the way").mkdir(parents=True, exist_ok=True)
    for lsn in range(version, version + LEAST + 1):
        writer.commit([], {APP: lsn})
        assert writer.watermark(APP) == lsn
    (told,) = [record.getMessage() for record in caplog.records]
    assert "no checkpoint of its log could be written" in told and "its commits stand" in told
    assert opened(location).watermark(APP) == version + LEAST
    for name in set(names):
        shutil.rmtree(log / name)
    for lsn in range(version + LEAST + 1, version + 2 * LEAST + 1):
        writer.commit([], {APP: lsn})
    assert version + 2 * LEAST in checkpoints(location) and (log / "_last_checkpoint").is_file()
    assert opened(location).watermark(APP) == version + 2 * LEAST


def test_a_writer_goes_on_from_its_checkpoints_with_each_row_and_watermark(location: Location) -> None:
    writer = opened(location)
    for lsn in range(1, 3 * LEAST + 2):
        commit(writer, location, lsn)
        assert writer.watermark(APP) == lsn
    assert checkpoints(location)[0] == LEAST
    assert opened(location).watermark(APP) == 3 * LEAST + 1
    assert rows_of(location) == [row(lsn) for lsn in range(1, 3 * LEAST + 2)]


def test_a_writer_that_others_overtake_makes_no_checkpoint_of_their_commit(location: Location) -> None:
    """Its own is not the newest version then, and the watermark is looked at anew."""
    writer = opened(location)
    for lsn in range(1, LEAST - 1):
        commit(writer, location, lsn)
    opened(location).commit([], {"of another slot": 1})
    commit(writer, location, LEAST - 1)
    assert writer.version == LEAST and not checkpoints(location)
    commit(writer, location, LEAST)
    assert checkpoints(location) == [LEAST + 1]
    assert rows_of(location) == [row(lsn) for lsn in range(1, LEAST + 1)]


def test_a_table_with_an_interval_of_its_own_keeps_it(location: Location) -> None:
    opened(location)
    DeltaTable(location.uri).alter.set_table_properties({"delta.checkpointInterval": "1000"})
    writer = opened(location)
    for lsn in range(1, 2 * LEAST):
        commit(writer, location, lsn)
    assert not checkpoints(location)


def test_files_are_listed_when_there_may_be_many_small_ones_and_not_for_each_commit(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(location)
    listed: list[int] = []
    files = writer.files

    def noted() -> pa.Table:
        listed.append(writer.version)
        return files()

    monkeypatch.setattr(writer, "files", noted)
    for lsn in range(1, 33):
        commit(writer, location, lsn)
    assert listed == [1, 32]
    assert len(DeltaTable(location.uri).file_uris()) == 1


def test_slots_whose_commits_overtake_each_other_all_the_time_have_checkpoints_of_their_table(
    location: Location,
) -> None:
    """In _transactions of several slots no commit of one need follow its last one. No checkpoint was made then."""
    opened(location)
    DeltaTable(location.uri).alter.set_table_properties({"delta.checkpointInterval": "10"})
    writers = {app: opened(location) for app in (APP, "of another slot", "of a third one")}
    for lsn in range(1, 21):
        for app, writer in writers.items():
            writer.commit([], {app: lsn})
    assert [(version + 1) // 10 for version in checkpoints(location)] == [1, 2, 3, 4, 5, 6]
    assert {opened(location).watermark(app) for app in writers} == {20}
