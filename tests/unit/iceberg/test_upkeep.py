"""What no snapshot of an Iceberg table names goes beside the commits, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.iceberg.test_iceberg_table import (
    SLOT,
    commit,
    grown,
    ids,
    metadata_files,
    named,
    raw,
    table_of,
    written,
)
from tests.waiting import wait_until
from xidstream.pipeline.iceberg import expiring, upkeep
from xidstream.pipeline.iceberg.expiring import KEPT_SNAPSHOTS
from xidstream.pipeline.iceberg.upkeep import LEFTOVER_H, IcebergUpkeep, leftovers
from xidstream.pipeline.log_tables.watched_clock import WatchedClock

EVERY = 10
MANY = KEPT_SNAPSHOTS + EVERY


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten commits lie between two that expire snapshots."""
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", EVERY)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def made() -> Iterator[list[IcebergUpkeep]]:
    found: list[IcebergUpkeep] = []
    yield found
    for each in found:
        each.close()


def kept(made: list[IcebergUpkeep], **more: Any) -> IcebergUpkeep:
    made.append(IcebergUpkeep(**more))
    return made[-1]


def test_what_expired_snapshots_named_alone_goes(tmp_path: Path, made: list[IcebergUpkeep]) -> None:
    table = table_of(tmp_path, kept(made, delay_s=0.0))
    grown(tmp_path, table, range(100, 100 + 4 * MANY))
    wait_until(lambda: metadata_files(tmp_path) == named(tmp_path))
    assert len(table.paths()) == 4 * MANY


def test_it_stays_for_a_readers_time(tmp_path: Path, made: list[IcebergUpkeep]) -> None:
    clock = Clock()
    keeping = kept(made, delay_s=3600.0, clock=clock)
    table = table_of(tmp_path, keeping)
    grown(tmp_path, table, range(100, 101 + MANY))
    wait_until(lambda: bool(keeping._due))
    stale = metadata_files(tmp_path) - named(tmp_path)
    assert len(stale) >= EVERY
    clock.now_s = 3599.0
    with keeping._changed:
        keeping._changed.notify_all()
    assert stale <= metadata_files(tmp_path)
    clock.now_s = 3600.0
    with keeping._changed:
        keeping._changed.notify_all()
    wait_until(lambda: not stale & metadata_files(tmp_path))


def test_files_that_a_compaction_has_replaced_go_and_its_own_stay(
    tmp_path: Path, made: list[IcebergUpkeep]
) -> None:
    table = table_of(tmp_path)
    for lsn in (100, 110):
        commit(table, lsn, lsn)
    replaced = [Path(table.location.uri, path) for path in table.paths()]
    theirs = raw(tmp_path)
    theirs.overwrite(theirs.scan().to_arrow())
    assert all(path.exists() for path in replaced)
    table = table_of(tmp_path, kept(made, delay_s=0.0))
    for lsn in range(200, 200 + MANY):
        table.commit(written(table, lsn, lsn) if lsn == 200 else [], {SLOT: lsn})
    wait_until(lambda: not any(path.parent.exists() for path in replaced))
    assert ids(tmp_path) == [100, 110, 200]


def test_files_stay_where_the_table_was_set_back_to_before_their_compaction(
    tmp_path: Path, made: list[IcebergUpkeep]
) -> None:
    table = table_of(tmp_path)
    for lsn in (100, 110):
        commit(table, lsn, lsn)
    theirs = raw(tmp_path)
    before = theirs.current_snapshot().snapshot_id
    theirs.overwrite(theirs.scan().to_arrow())
    theirs.manage_snapshots().set_current_snapshot(before).commit()
    table = table_of(tmp_path, kept(made, delay_s=0.0))
    for lsn in range(200, 200 + MANY):
        table.commit([], {SLOT: lsn})
    wait_until(lambda: metadata_files(tmp_path) == named(tmp_path))
    assert ids(tmp_path) == [100, 110]


def test_where_a_user_has_a_tag_no_data_file_goes(tmp_path: Path, made: list[IcebergUpkeep]) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 100)
    found = raw(tmp_path)
    found.manage_snapshots().create_tag(found.current_snapshot().snapshot_id, "audit").commit()
    replaced = [Path(table.location.uri, path) for path in table.paths()]
    theirs = raw(tmp_path)
    theirs.overwrite(theirs.scan().to_arrow())
    keeping = kept(made, delay_s=0.0)
    table = table_of(tmp_path, keeping)
    grown(tmp_path, table, range(200, 200 + MANY))
    wait_until(lambda: metadata_files(tmp_path) == named(tmp_path))
    assert all(path.exists() for path in replaced)
    tagged = raw(tmp_path).scan(snapshot_id=raw(tmp_path).metadata.refs["audit"].snapshot_id)
    assert tagged.to_arrow()["id"].to_pylist() == [100]


def aged(path: Path, hours: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    then = os.stat(path).st_mtime - hours * 3600
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("kind", LEFTOVER_H)
def test_leftovers_of_dead_writers_go_when_they_are_old_and_nothing_else_does(
    tmp_path: Path, kind: str
) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    root = Path(table.location.uri)
    folder = root / kind if kind == "metadata" else root / f"{kind}dead"
    suffix = ".avro" if kind == "metadata" else ".parquet"
    old = aged(folder / f"old{suffix}", LEFTOVER_H[kind] + 1)
    aged(folder / f"young{suffix}", LEFTOVER_H[kind] - 1)
    aged(root / "theirs" / "x.parquet", 10_000)
    aged(root / "metadata" / "version-hint.text", 10_000)
    for path in (*root.rglob("data-100*/*"), *(root / "metadata" / name for name in named(tmp_path))):
        os.utime(path, (0, 0))
    ages = WatchedClock()
    found = leftovers(raw(tmp_path), table.location, ages, ages.began_at_s)
    assert found == [f"file://{old}"]


def test_a_clock_that_was_set_forward_makes_nothing_old(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    aged(Path(table.location.uri) / "data-dead" / "x.parquet", 24 * 8)
    ages = WatchedClock()
    assert leftovers(raw(tmp_path), table.location, ages, None) == [], "nobody knows when the last commit was"
    week_ago_s = ages.began_at_s - 7 * 24 * 3600
    assert leftovers(raw(tmp_path), table.location, ages, week_ago_s) == []


def test_leftovers_are_looked_for_after_a_thousand_commits(
    tmp_path: Path, made: list[IcebergUpkeep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SWEEP_COMMITS", EVERY)
    table = table_of(tmp_path)
    commit(table, 90, 1)
    old = aged(Path(table.location.uri) / "data-dead" / "x.parquet", 24 * 40)
    # The process has lived for two months: it need not believe any time from before.
    steady_s = Clock()
    ages = WatchedClock(steady=steady_s)
    steady_s.now_s = 60 * 24 * 3600.0
    table = table_of(tmp_path, kept(made, ages=ages))
    grown(tmp_path, table, range(100, 100 + MANY))
    wait_until(lambda: not old.exists())
    assert len(table.paths()) == MANY + 1
