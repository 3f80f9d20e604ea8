"""Small files of an Iceberg table become one behind the commits, and every row stays what it was."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from tests.spark.support import relation
from tests.unit.delta.test_small_files import COLUMNS, LSN, row
from tests.unit.iceberg.test_iceberg_table import (
    SLOT,
    commit,
    ids,
    opened,
    raw,
    set_theirs,
    table_of,
    written,
)
from tests.waiting import wait_until
from xidstream.pipeline.iceberg import iceberg_table, merging
from xidstream.pipeline.iceberg.iceberg_table import KEPT_SNAPSHOTS, IcebergTable
from xidstream.pipeline.iceberg.log_reading import TableSnapshot
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES, SizeClass

MANY = SIZE_CLASSES[0].many


def operations(root: Path) -> list[Operation]:
    return [each.summary.operation for each in raw(root).snapshots()]


def merged_folders(table: IcebergTable) -> set[str]:
    return {name for name in os.listdir(table.location.uri) if name.endswith("-merged")}


def test_a_hundred_commits_leave_all_rows_of_every_type_in_a_few_files(tmp_path: Path) -> None:
    columns = [LSN, *(column for column in COLUMNS[1:] if column.type != pa.int16())]  # Iceberg has none
    names = [column.name for column in columns]
    tables = opened(tmp_path)
    table = tables.open_or_create("public__v", "public.v", columns, tables.about(relation("public.v")))
    schema, most = pa.schema([column.field for column in columns]), 0
    for lsn in range(1, 101):
        files = ParquetFiles(table.location, f"data-{lsn:05d}", schema, "_commit_lsn")
        files.write(pa.RecordBatch.from_pylist([{name: row(lsn)[name] for name in names}], schema=schema))
        table.commit(files.close(), {SLOT: lsn})
        most = max(most, len(table.paths()))
    assert most == MANY - 1
    found = table.read(names, "_commit_lsn", 0, 1_000).sort_by("_commit_lsn").to_pylist()
    assert found == [{name: row(lsn)[name] for name in names} for lsn in range(1, 101)]
    # A reader that is bounded by an LSN still skips files.
    assert len({each.least["_commit_lsn"] for each in TableSnapshot(table).files}) == len(table.paths())
    again = opened(tmp_path).open("public__v", "public.v")
    assert again is not None and again.watermark(SLOT) == 100


def test_a_merge_is_a_snapshot_of_its_own_that_replaces_files_and_adds_no_row(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    for lsn in range(100, 100 + MANY):
        commit(table, lsn, lsn)
    *appends, last = raw(tmp_path).snapshots()
    assert {each.summary.operation for each in appends} == {Operation.APPEND}
    told = last.summary.additional_properties
    assert last.summary.operation is Operation.REPLACE
    assert (told["deleted-data-files"], told["added-data-files"]) == (str(MANY), "1")
    assert (told["deleted-records"], told["added-records"], told["total-records"]) == (str(MANY),) * 3
    assert ids(tmp_path) == list(range(100, 100 + MANY))
    assert len(table.paths()) == 1 and table.watermark(SLOT) == 99 + MANY
    commit(table, 500, 500)
    assert table_of(tmp_path).watermark(SLOT) == 500


def test_who_commits_meanwhile_keeps_the_small_files_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(tmp_path)

    def meanwhile(point: str) -> None:
        if point == "iceberg_merging":
            set_theirs(tmp_path)
            other = raw(tmp_path)
            other.append(other.scan(limit=1).to_arrow())

    monkeypatch.setattr(merging, "reach", meanwhile)
    for lsn in range(100, 100 + MANY):
        commit(table, lsn, lsn)
    assert Operation.REPLACE not in operations(tmp_path) and not merged_folders(table)
    monkeypatch.undo()
    commit(table, 500, 500)
    assert Operation.REPLACE in operations(tmp_path)
    assert sorted(set(ids(tmp_path))) == [*range(100, 100 + MANY), 500] and len(ids(tmp_path)) == MANY + 2


def test_a_run_that_was_taken_over_while_it_merged_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, later = table_of(tmp_path), {"done": False}

    def taken_over(point: str) -> None:
        if point == "iceberg_merging" and not later["done"]:
            later["done"] = True
            commit(table_of(tmp_path), 1_000, 1_000, owner=2)

    monkeypatch.setattr(merging, "reach", taken_over)
    with pytest.raises(SnapshotOutdated):
        for lsn in range(100, 100 + MANY):
            commit(table, lsn, lsn)
    assert ids(tmp_path) == [*range(100, 100 + MANY), 1_000]


def test_columns_that_a_user_renamed_and_those_that_came_later_are_merged_under_their_names(
    tmp_path: Path,
) -> None:
    table = table_of(tmp_path)
    for lsn in range(100, 100 + MANY - 4):
        table.commit(written(table, lsn, lsn, name=f"n{lsn}"), {SLOT: lsn})
    with raw(tmp_path).update_schema() as change:
        change.rename_column("name", "title")
    table = table_of(tmp_path)
    table.take_columns(
        [
            *(TableColumn("id", pa.int64(), "id") if c.name == "id" else c for c in table.columns),
            TableColumn("note", pa.string(), "note"),
        ]
    )
    for lsn in range(500, 504):
        table.commit(written(table, lsn, lsn, title=f"n{lsn}", note="x"), {SLOT: lsn})
    assert len(table.paths()) == 1
    rows = raw(tmp_path).scan(selected_fields=("id", "title", "note")).to_arrow().sort_by("id").to_pylist()
    assert rows == [
        {"id": lsn, "title": f"n{lsn}", "note": "x" if lsn >= 500 else None}
        for lsn in (*range(100, 100 + MANY - 4), *range(500, 504))
    ]


def test_files_that_cannot_be_read_hold_up_no_commit_and_are_tried_again_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "PAUSE_COMMITS", 3)
    table = table_of(tmp_path)
    for lsn in range(100, 99 + MANY):
        commit(table, lsn, lsn)
    hidden = Path(table.location.uri, table.paths()[0])
    shutil.move(hidden, tmp_path / "away")
    with caplog.at_level(logging.WARNING):
        commit(table, 300, 300)
        commit(table, 301, 301)
    assert [each.getMessage() for each in caplog.records] == [
        "Iceberg table public.a: small files could not be merged (FileNotFoundError)"
    ]
    assert table.watermark(SLOT) == 301 and not merged_folders(table)
    shutil.move(tmp_path / "away", hidden)
    commit(table, 302, 302)
    commit(table, 303, 303)
    assert Operation.REPLACE in operations(tmp_path)
    assert ids(tmp_path) == [*range(100, 99 + MANY), *range(300, 304)]


def test_files_of_other_programs_stay_as_they_are(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    for lsn in range(100, 104):
        commit(table, lsn, lsn)
    theirs = raw(tmp_path)
    for _ in range(MANY):
        theirs.append(theirs.scan(limit=1).to_arrow())
    table = table_of(tmp_path)
    for lsn in range(200, 200 + MANY - 4):
        commit(table, lsn, lsn)
    assert len(table.paths()) == MANY + 1, "ours are one"
    assert len(ids(tmp_path)) == 2 * MANY


def test_replaced_files_go_when_no_snapshot_names_them_and_the_merged_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_table, "EXPIRES_EVERY", 10)
    keeping = IcebergUpkeep(delay_s=0.0)
    table = table_of(tmp_path, keeping)
    n = 3 * MANY + KEPT_SNAPSHOTS
    for lsn in range(100, 100 + n):
        commit(table, lsn, lsn)

    def there() -> set[str]:
        return {
            str(p.relative_to(table.location.uri)) for p in Path(table.location.uri).rglob("data-*/*.parquet")
        }

    # The snapshots that are kept name some that are replaced.
    wait_until(lambda: len(there()) <= len(table.paths()) + MANY + 10)
    keeping.close()
    assert set(table.paths()) <= there()
    assert ids(tmp_path) == list(range(100, 100 + n))


def test_middling_files_become_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "CLASSES", (SizeClass(0, 1_000, 1_000), SizeClass(1_000, 1 << 20, 4)))
    table = table_of(tmp_path)
    for lsn in range(100, 104):
        commit(table, lsn, *range(lsn * 1_000, lsn * 1_000 + 300))
    assert len(table.paths()) == 1 and len(ids(tmp_path)) == 1_200


def test_a_table_without_many_files_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read all manifests for each commit would cost more as the table grows."""
    listed: list[Any] = []
    real = merging._live
    monkeypatch.setattr(merging, "_live", lambda table: listed.append(table) or real(table))
    table = table_of(tmp_path)
    for lsn in range(100, 99 + MANY):
        commit(table, lsn, lsn)
    assert len(listed) <= 4
