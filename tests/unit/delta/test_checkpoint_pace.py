"""When a table in a folder gets a checkpoint of its log between deltalake's own."""

from __future__ import annotations

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
def test_a_dear_checkpoint_leaves_the_next_ones_to_deltalake(took_s: float, n_bytes: int) -> None:
    pace = CheckpointPace(0, 100)
    pace.made(10, took_s, n_bytes)
    assert not any(pace.is_due(version) for version in range(11, 1_000))


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
    for lsn in range(1, LEAST):
        commit(writer, location, lsn)
    opened(location).commit([], {"of another slot": 1})
    commit(writer, location, LEAST)
    assert not checkpoints(location)
    commit(writer, location, LEAST + 1)
    assert checkpoints(location) == [LEAST + 2]
    assert rows_of(location) == [row(lsn) for lsn in range(1, LEAST + 2)]


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
