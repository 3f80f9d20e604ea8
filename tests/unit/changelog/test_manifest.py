"""The manifest of base tables: what belongs together, who may write it, and what is forgotten when."""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction

from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.manifest import ManifestLine, ManifestWriter, base_at, newest, read_lines
from xidstream.pipeline.delta import delta_table
from xidstream.pipeline.errors import Superseded, UsageError
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES

MANY = SIZE_CLASSES[0].many
SLOT = "7/shop/orders"
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.timezone.utc)
HOUR = datetime.timedelta(hours=1)


def line(lsn: int, table: str = "public.a", *, at: datetime.datetime = NOON, **more: object) -> ManifestLine:
    values = {
        "slot": SLOT,
        "directory": table,
        "generation": 1,
        "snapshot_lsn": 99,
        "version": lsn // 10,
        **more,
    }
    return ManifestLine(lsn=lsn, refreshed_at=at, table=table, **values)  # type: ignore[arg-type]


def claimed(root: Location, slot: str = SLOT) -> ManifestWriter:
    writer = ManifestWriter(DeltaBases(root), slot)
    writer.claim()
    return writer


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


def test_the_lines_of_a_refresh_come_together_and_the_newest_count(root: Location) -> None:
    assert read_lines(DeltaBases(root)) == [] and newest([]) == []
    writer = claimed(root)
    writer.append([line(10), line(10, "public.b")])
    writer.append([line(20, "public.b"), line(20)])
    assert newest(read_lines(DeltaBases(root), SLOT)) == [line(20), line(20, "public.b")]
    assert writer.look() == (20, 0) and writer.newest() == newest(read_lines(DeltaBases(root), SLOT))
    assert [each.lsn for each in read_lines(DeltaBases(root), SLOT)] == [10, 10, 20, 20]


def test_an_lsn_is_named_once_and_none_falls(root: Location) -> None:
    writer = claimed(root)
    writer.append([line(20)])
    for lsn in (20, 10):
        with pytest.raises(UsageError):
            writer.append([line(lsn)])


def test_a_mirror_that_was_overtaken_names_nothing_more(root: Location) -> None:
    older, newer = claimed(root), claimed(root)
    assert (older.owner, newer.owner) == (1, 2)
    with pytest.raises(Superseded, match="this is mirror 1"):
        older.append([line(10)])
    with pytest.raises(Superseded):
        older.forget(NOON)
    newer.append([line(10)])
    assert read_lines(DeltaBases(root)) == [line(10)]


def test_two_slots_below_one_root_have_mirrors_of_their_own(root: Location) -> None:
    ours, theirs = claimed(root), claimed(root, "7/shop/other")
    ours.append([line(20)])
    theirs.append([line(10, slot="7/shop/other")])
    ours.append([line(30)])
    assert [each.lsn for each in read_lines(DeltaBases(root), SLOT)] == [20, 30]
    assert [each.lsn for each in read_lines(DeltaBases(root), "7/shop/other")] == [10]


def test_a_refresh_is_forgotten_when_the_one_behind_it_is_old_enough(root: Location) -> None:
    writer = claimed(root)
    for i in range(4):
        writer.append([line(10 * (i + 1), at=NOON + i * HOUR)])
    writer.forget(NOON - HOUR)
    assert len(read_lines(DeltaBases(root))) == 4
    # At 13:30 the refresh of 13:00 was the newest one: who began then still reads it.
    writer.forget(NOON + 1.5 * HOUR)
    assert [each.lsn for each in read_lines(DeltaBases(root))] == [20, 30, 40]
    writer.forget(NOON + 100 * HOUR)
    assert [each.lsn for each in read_lines(DeltaBases(root))] == [40]


def n_files(root: Location) -> int:
    return len(DeltaTable(f"{root.uri}/current/_manifest").file_uris())


def test_a_hundred_refreshes_of_two_slots_leave_all_their_lines_in_a_few_files(root: Location) -> None:
    slots = {SLOT: claimed(root), "7/shop/other": claimed(root, "7/shop/other")}
    most = 0
    for i in range(1, 51):
        for slot, writer in slots.items():
            # The other slot's LSNs are of another server, far behind these.
            writer.append([line(i + 1_000 * (slot == SLOT), table, slot=slot) for table in ("a", "b")])
        most = max(most, n_files(root))
    assert most < MANY + 4
    for slot, first in ((SLOT, 1_001), ("7/shop/other", 1)):
        found = [(each.lsn, each.table) for each in read_lines(DeltaBases(root), slot)]
        assert found == [(lsn, table) for lsn in range(first, first + 50) for table in ("a", "b")]
        assert [each.lsn for each in slots[slot].newest()] == [first + 49] * 2


def test_a_refresh_is_forgotten_though_its_lines_are_in_a_file_with_others(root: Location) -> None:
    writer = claimed(root)
    for i in range(MANY + 1):
        writer.append([line(i + 1, at=NOON + i * HOUR)])
    assert n_files(root) == 2
    writer.forget(NOON + 9.5 * HOUR)
    assert [each.lsn for each in read_lines(DeltaBases(root))] == list(range(10, MANY + 2))
    assert writer.look() == (MANY + 1, 0)


def test_two_mirrors_that_merge_the_same_files_name_each_line_once(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = claimed(root), claimed(root, "7/shop/other")
    for i in range(MANY - 1):
        ours.append([line(i + 1)])
    merge = delta_table.merge
    theirs_committed = []

    def merge_while_theirs_merge(*arguments: Any) -> list[WrittenFile]:
        if not theirs_committed:
            theirs_committed.append(True)
            theirs.append([line(5, slot="7/shop/other")])
        return merge(*arguments)

    monkeypatch.setattr(delta_table, "merge", merge_while_theirs_merge)
    ours.append([line(MANY)])
    assert theirs_committed and [each.lsn for each in read_lines(DeltaBases(root), SLOT)] == list(
        range(1, MANY + 1)
    )
    assert [each.lsn for each in read_lines(DeltaBases(root), "7/shop/other")] == [5]
    assert n_files(root) < 4


def brought(table: DeltaTable, path: Path, lsn: int, snapshot_lsn: int = 99) -> None:
    """Commit a file of one row to a base table, as a mirror does."""
    action = AddAction(path.name, os.path.getsize(path), {}, 0, True, '{"numRecords": 1}')
    marks = [Transaction(f"mirror/{SLOT}", lsn), Transaction(f"mirror/{SLOT}/place", snapshot_lsn)]
    properties = CommitProperties(app_transactions=marks)
    table.create_write_transaction([action], "append", table.schema(), commit_properties=properties)
    table.update_incremental()


def test_a_base_table_that_was_removed_and_made_anew_is_none_of_an_earlier_lsn(
    root: Location, tmp_path: Path
) -> None:
    folder = tmp_path / "current" / "public.a"
    schema = pa.schema([("id", pa.int64())])
    writer = claimed(root)
    for lsn in (10, 20):
        table = DeltaTable.create(str(folder), schema=schema)
        pq.write_table(pa.table({"id": [lsn]}, schema=schema), folder / "one")
        brought(table, folder / "one", lsn)
        writer.append([line(lsn, version=1)])
        if lsn == 10:
            shutil.rmtree(folder)
            assert base_at(DeltaBases(root), SLOT, "public.a", 1, 10) is None
    assert base_at(DeltaBases(root), SLOT, "public.a", 1, 10) is None, (
        "version 1 has the rows of a later commit by now"
    )
    writer.append([line(30, version=7)])
    found = base_at(DeltaBases(root), SLOT, "public.a", 1, 20)
    assert found is not None and found.lsn == 20
    assert base_at(DeltaBases(root), SLOT, "public.a", 1, 30) is None, "there is no such version any more"


def test_the_base_of_a_generation_is_found_with_the_files_of_its_version(
    root: Location, tmp_path: Path
) -> None:
    folder = tmp_path / "current" / "public.a"
    schema = pa.schema([("id", pa.int64())])
    table = DeltaTable.create(str(folder), schema=schema)
    for name in ("one", "two"):
        pq.write_table(pa.table({"id": [1]}, schema=schema), folder / name)
        brought(table, folder / name, 10 if name == "one" else 20)
    writer = claimed(root)
    writer.append([line(10, version=1)])
    writer.append([line(20, version=2)])

    def found(lsn: int, generation: int = 1, snapshot_lsn: int | None = None) -> tuple[int, list[str]] | None:
        base = base_at(DeltaBases(root), SLOT, "public.a", generation, lsn, snapshot_lsn)
        return None if base is None else (base.lsn, sorted(os.path.basename(file) for file in base.at.files))

    assert found(19) == (10, ["one"])
    assert found(20) == found(500, snapshot_lsn=99) == (20, ["one", "two"])
    assert found(9) is None and found(20, generation=2) is None and found(20, snapshot_lsn=98) is None
    for lsn in range(30, 30 + MANY):
        writer.append([line(lsn, version=2)])
    assert n_files(root) < MANY
    assert found(19) == (10, ["one"]) and found(31) == (31, ["one", "two"])
    assert found(500) == (29 + MANY, ["one", "two"])
