"""Small files of an Iceberg table are merged after the commits: all rows stay, and no new one waits. SQLite."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from tests.unit.iceberg.test_commit_together import World
from tests.unit.iceberg.test_commit_together import world_of as world_of
from tests.unit.iceberg.test_iceberg_table import (
    SLOT,
    WIDER,
    commit,
    ids,
    metadata_files,
    named,
    raw,
    table_of,
    written,
)
from tests.waiting import wait_until
from xidstream.pipeline import faultpoints
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg import expiring, merging, staged_commits
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_types import RULES
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables import small_files
from xidstream.pipeline.log_tables.columns import map_columns
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES, SizeClass
from xidstream.pipeline.schema.rows import contract_schema

FEW = 4
CLASSES = (SizeClass(0, 16 << 10, FEW),)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small files become one."""
    monkeypatch.setattr(small_files, "SIZE_CLASSES", CLASSES)


def merged(table: IcebergTableWriter) -> set[str]:
    return {path for path in table_of_folder(table) if "-merged/" in path}


def table_of_folder(table: IcebergTableWriter) -> set[str]:
    root = Path(table.location.uri)
    return {str(path.relative_to(root)) for path in root.glob("data-*/*.parquet")}


def operations(root: Path) -> list[Operation]:
    return [each.summary.operation for each in raw(root).snapshots()]


def test_many_commits_leave_all_rows_in_few_files_and_bounds_of_them(tmp_path: Path) -> None:
    many = SIZE_CLASSES[0].many
    table = table_of(tmp_path)
    for lsn in range(1, many):
        commit(table, lsn, lsn)
    before = raw(tmp_path)
    assert len(table.paths()) == many - 1
    commit(table, many, many)
    commit(table, many + 1, many + 1)
    found = raw(tmp_path)
    for lsn in (1, many + 1):
        assert len(list(found.scan(row_filter=f"_commit_lsn = {lsn}").plan_files())) == 1
    assert len(table.paths()) == 2
    assert ids(tmp_path) == list(range(1, many + 2))
    assert found.scan().to_arrow().num_rows == many + 1
    assert operations(tmp_path)[-2:] == [Operation.REPLACE, Operation.APPEND]
    told = found.snapshots()[-2].summary.additional_properties
    assert told["xidstream.merged"] == "true"
    assert (told["total-records"], told["total-data-files"]) == (str(many), "1")
    assert table_of(tmp_path).watermark(SLOT) == many + 1
    # Who opened the table before reads on.
    assert before.scan().to_arrow().num_rows == many - 1
    assert named(tmp_path) <= metadata_files(tmp_path)


@pytest.mark.usefixtures("few")
def test_values_stay_where_a_column_was_renamed_widened_and_added_meanwhile(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    with raw(tmp_path).update_schema() as change:
        change.rename_column("name", "called")
    table = table_of(tmp_path)
    commit(table, 110, 2)
    table.take_columns(map_columns(table.columns, contract_schema(WIDER), RULES).columns)
    table.commit(written(table, 120, 1 << 40, note="new", called="three"), {SLOT: 120})
    first = raw(tmp_path).scan().to_arrow().to_pylist()
    table.commit(written(table, 130, 4, note="newer"), {SLOT: 130})
    assert len(table.paths()) == 1
    rows = raw(tmp_path).scan().to_arrow().to_pylist()
    by_id = {row["id"]: row for row in rows}
    assert [by_id[row["id"]] for row in first] == first
    assert (by_id[4]["note"], by_id[1 << 40]["called"], len(rows)) == ("newer", "three", 4)


@pytest.mark.usefixtures("few")
def test_names_in_files_from_before_a_renaming_are_found(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    table.commit(written(table, 100, 1, name="one"), {SLOT: 100})
    with raw(tmp_path).update_schema() as change:
        change.rename_column("name", "called")
    table = table_of(tmp_path)
    for lsn in range(101, 100 + FEW):
        table.commit(written(table, lsn, lsn, called="later"), {SLOT: lsn})
    assert len(table.paths()) == 1
    rows = raw(tmp_path).scan(selected_fields=("id", "called")).to_arrow().to_pylist()
    assert {row["id"]: row["called"] for row in rows}[1] == "one"


def hooked(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Somebody does this while a merge's file is being written."""
    real = merging.merge

    def merge(*args: Any, **kwargs: Any) -> Any:
        done = real(*args, **kwargs)
        meanwhile()
        return done

    monkeypatch.setattr(merging, "merge", merge)


@pytest.mark.usefixtures("few")
def test_a_merge_that_loses_to_another_program_is_given_up_and_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(tmp_path)
    theirs: list[int] = []

    def delete() -> None:
        if not theirs:
            theirs.append(1)
            raw(tmp_path).delete("id = 2")

    hooked(monkeypatch, delete)
    for lsn in range(1, FEW + 1):
        commit(table, lsn, lsn)
    assert theirs and ids(tmp_path) == [1, 3, 4], "a row that was deleted does not come back"
    assert merged(table) == set()
    assert metadata_files(tmp_path) == named(tmp_path)
    for lsn in range(FEW + 1, 2 * FEW):
        commit(table, lsn, lsn)
    assert ids(tmp_path) == [1, *range(3, 2 * FEW)]
    assert len(merged(table)) == 1


@pytest.mark.usefixtures("few")
def test_who_commits_all_the_time_does_not_have_each_commit_write_a_merge_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(tmp_path)
    tries: list[int] = []

    def append() -> None:
        tries.append(1)
        theirs = raw(tmp_path)
        theirs.append(theirs.scan().to_arrow().slice(0, 0))

    hooked(monkeypatch, append)
    for lsn in range(1, FEW + merging.LOSSES + 3):
        commit(table, lsn, lsn)
    assert len(tries) == merging.LOSSES
    assert merged(table) == set()
    assert ids(tmp_path) == list(range(1, FEW + merging.LOSSES + 3))


@pytest.mark.usefixtures("few")
def test_a_table_that_says_no_keeps_its_files(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    with raw(tmp_path).transaction() as change:
        change.set_properties({merging.SETTING: "false"})
    table.refresh()
    for lsn in range(1, FEW + 2):
        commit(table, lsn, lsn)
    assert len(table.paths()) == FEW + 1


@pytest.mark.usefixtures("few")
def test_files_that_cannot_be_read_hold_up_no_commit_and_are_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merging, "RESTS", 2)
    table = table_of(tmp_path)
    for lsn in range(1, FEW):
        commit(table, lsn, lsn)
    hidden = Path(table.location.uri, table.paths()[0])
    hidden.rename(hidden.with_suffix(".away"))
    with caplog.at_level(logging.WARNING):
        commit(table, FEW, FEW)
    (told,) = (
        each.msg for each in caplog.records if getattr(each.msg, "name", "") == "small_files_not_merged"
    )
    assert "public.a" in str(told)
    assert merged(table) == set()
    hidden.with_suffix(".away").rename(hidden)
    for lsn in range(FEW + 1, FEW + 3):
        commit(table, lsn, lsn)
        assert len(table.paths()) == lsn
    commit(table, FEW + 3, FEW + 3)
    assert len(merged(table)) == 1
    assert ids(tmp_path) == list(range(1, FEW + 4))


@pytest.mark.usefixtures("few")
def test_manifests_of_a_merge_that_cannot_be_written_hold_up_no_commit_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(tmp_path)

    def full(producer: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staged_commits.Replacement, "_existing_manifests", full)
    for lsn in range(1, FEW + 2):
        commit(table, lsn, lsn)
    assert ids(tmp_path) == list(range(1, FEW + 2))
    assert (len(table.paths()), merged(table)) == (FEW + 1, set())
    assert metadata_files(tmp_path) == named(tmp_path)


@pytest.mark.usefixtures("few")
def test_what_was_replaced_goes_when_no_snapshot_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", 2)
    monkeypatch.setattr(expiring, "KEPT_SNAPSHOTS", 2)
    upkeep = IcebergUpkeep(delay_s=0.0)
    try:
        table = table_of(tmp_path, upkeep)
        for lsn in range(1, FEW + 1):
            commit(table, lsn, lsn)
        for lsn in range(FEW + 1, FEW + 8):
            table.commit([], {SLOT: lsn})
        wait_until(lambda: table_of_folder(table) == set(table.paths()))
    finally:
        upkeep.close()
    assert len(table.paths()) == 1
    assert ids(tmp_path) == list(range(1, FEW + 1))


def _write(root: str, plan: str) -> None:
    faultpoints._plan = FaultPlan(plan, None) if plan else None
    small_files.SIZE_CLASSES = CLASSES  # type: ignore[misc]
    table = table_of(Path(root))
    for lsn in range(table.watermark(SLOT) + 1, 2 * FEW + 2):
        commit(table, lsn, lsn)


def test_a_kill_before_a_merge_is_committed_loses_nothing_and_the_next_run_merges(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    writer = multiprocessing.get_context("spawn").Process(
        target=_write, args=(str(tmp_path), f"iceberg_committing:kill@{FEW + 1}")
    )
    writer.start()
    writer.join(120)
    assert writer.exitcode == -signal.SIGKILL
    assert len(merged(table)) == 1, "its file is written"
    assert ids(tmp_path) == list(range(1, FEW + 1))
    assert len(table_of(tmp_path).paths()) == FEW
    kept = small_files.SIZE_CLASSES
    try:
        _write(str(tmp_path), "")
    finally:
        small_files.SIZE_CLASSES = kept  # type: ignore[misc]
    assert ids(tmp_path) == list(range(1, 2 * FEW + 2))
    assert len(table_of(tmp_path).paths()) <= FEW


@pytest.mark.usefixtures("few")
def test_tables_that_are_committed_together_are_merged_behind_it(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of()
    run = world.run()
    for lsn in range(10_100, 10_100 + FEW):
        run.write(world.batch(lsn))
    assert world.seen() == [list(range(10_100, 10_100 + FEW))] * 3
    for key in ("public__a", "public__b", "_transactions"):
        (task,) = world.server.catalog.load_table(f"shop.{key}").scan().plan_files()
        assert "-merged/" in task.file.file_path
    run.write(world.batch(10_200))
    assert world.seen() == [[*range(10_100, 10_100 + FEW), 10_200]] * 3
    assert world.orphans() == set()


def test_columns_that_are_gone_and_former_names_are_told_apart() -> None:
    from xidstream.pipeline.iceberg.log_reading import FileColumn, todays_names

    columns = [FileColumn(1, ("id",), False), FileColumn(2, ("called", "name"), False)]
    assert todays_names(columns, ["name", "id", "old"]) == ["called", "id", ""]
    assert todays_names(columns, ["called", "name"]) == ["called", ""]
