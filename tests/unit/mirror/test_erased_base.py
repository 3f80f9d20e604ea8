"""An erasure takes rows out of base tables and out of what the manifest names, beside a mirror that goes on."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.unit.mirror.bases import FIELDS, SLOT, TABLE, PlainMirror, files_below, lost_files, table_of
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.changelog.manifest import RETIRED, RETIRED_LSN, base_at, read_lines
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.log_tables.erased_keys import RowsOfKeys, StoredColumn, parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.mirror import erased_base
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.erased_base import (
    ErasedBase,
    copies_in_base,
    erase_base,
    has_row,
    keys_of_base,
)
from xidstream.pipeline.mirror.vacuum import vacuum

DAY = datetime.timedelta(days=1)
AT_ONCE = datetime.timedelta(0)
HELD = {
    "id": [StoredColumn("id", pa.int32(), "bigint")],
    "former": [StoredColumn("former", pa.int64(), "bigint")],
}


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


def erase(root: Location, key: str = "id = 1") -> ErasedBase | None:
    return erase_base(root, SLOT, TABLE, parse_keys([key, "former = 1"]), HELD)


def copies(root: Location) -> list[str]:
    location = current(root).child(TABLE)
    keys = keys_of_base(location, TABLE, parse_keys(["id = 1"]), HELD)
    assert keys is not None
    return copies_in_base(location, keys, TABLE)[0]


def rows(root: Location, version: int | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table_of(root, version=version).to_pyarrow_table().to_pylist()
    return found


def named(root: Location) -> list[tuple[str, int, int]]:
    return [(line.slot, line.lsn, line.version) for line in read_lines(DeltaBases(root))]


def test_a_file_whose_column_had_another_type_counts_as_one_with_the_row(tmp_path: Path) -> None:
    """Nobody could erase then, until a vacuum had removed the version."""
    keys = RowsOfKeys(parse_keys(["id = 1"]), HELD, ["id"], TABLE)
    for values, has in ((["1", "2"], True), (["2", "3"], False), (["b", "c"], True)):
        pq.write_table(pa.table({"id": values}), tmp_path / "a.parquet")
        assert has_row(Location.parse(str(tmp_path)), "a.parquet", keys) is has


def test_the_newest_version_is_named_without_the_rows_and_no_reader_finds_an_older_one(
    root: Location,
) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30):
        mirror.refresh(lsn)
    assert erase(root) == ErasedBase(2, 2, 4)
    assert {row["id"] for row in rows(root)} == {2}
    taken_back = [(RETIRED + SLOT, RETIRED_LSN, version) for version in (1, 2, 3)]
    assert sorted(named(root)) == [(SLOT, 30, 4), *taken_back]
    # As docs/mirror.md has people read it.
    lines = DeltaTable(current(root).child("_manifest").uri).to_pyarrow_table().to_pylist()
    last = max(line["lsn"] for line in lines)
    assert [line["version"] for line in lines if line["lsn"] == last] == [4]
    assert base_at(DeltaBases(root), SLOT, TABLE, 1, 29) is None, "a state there is folded from the log"
    base = base_at(DeltaBases(root), SLOT, TABLE, 1, 35)
    assert base is not None and (base.lsn, base.version) == (30, 4)
    mirror.refresh(40)
    assert not lost_files(root)


def test_who_opened_an_older_version_can_finish_and_after_the_retention_no_copy_is_left(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuums, "GRACE", -DAY)
    mirror = PlainMirror(root)
    for lsn in (10, 20):
        mirror.refresh(lsn)
    erase(root)
    left = copies(root)
    assert sorted({path.partition("/")[0] for path in left}) == ["_delta_log", "refresh-1-10", "refresh-1-20"]
    vacuum(root, SLOT, mirror.manifest, DAY)
    assert copies(root) == left and {row["id"] for row in rows(root, 2)} == {1, 2}
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert copies(root) == []
    assert {row["id"] for path in files_below(root) for row in pq.read_table(path).to_pylist()} == {2}
    assert named(root) == [(SLOT, 20, 3)] and not lost_files(root)


@pytest.mark.parametrize("key", ["id = 1", "id = 3"], ids=["with_rows", "without_rows"])
def test_a_refresh_that_has_read_the_log_of_before_commits_nothing(root: Location, key: str) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    _, n_erasures = mirror.manifest.look()
    lines = mirror.manifest.newest()
    attempt = mirror.begin(20)
    erase(root, key)
    with pytest.raises(SnapshotOutdated):
        attempt.commit()
    with pytest.raises(SnapshotOutdated):
        mirror.manifest.append([line.__class__(**{**line.__dict__, "lsn": 20}) for line in lines], n_erasures)
    mirror.refresh(30)
    assert mirror.manifest.owner == 1, "the mirror has its number still"


def test_a_first_refresh_in_hand_commits_nothing(root: Location) -> None:
    mirror = PlainMirror(root)
    attempt = mirror.begin(10)
    assert erase(root) == ErasedBase(0, 0, 1)
    with pytest.raises(SnapshotOutdated):
        attempt.commit()


def test_without_a_mirror_there_is_nothing_to_do(root: Location) -> None:
    assert erase(root) is None and not Path(current(root).uri).exists()


def test_a_crash_between_the_table_and_the_manifest_is_mended_by_the_next_time(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20):
        mirror.refresh(lsn)

    def die(point: str) -> None:
        if point == "base_erased":
            raise ComponentLost("killed")

    with monkeypatch.context() as patched:
        patched.setattr(erased_base, "reach", die)
        with pytest.raises(ComponentLost):
            erase(root)
    assert named(root) == [(SLOT, 10, 1), (SLOT, 20, 2)]
    assert erase(root) == ErasedBase(0, 0, 4)
    assert (SLOT, 20, 4) in named(root) and len(read_lines(DeltaBases(root), SLOT)) == 1
    # And what is named by now stays named.
    mirror.refresh(30)
    erase(root, "id = 3")
    assert {line.version for line in read_lines(DeltaBases(root), SLOT)} == {4, 5}


def test_a_file_that_has_no_other_row_goes_and_one_that_cannot_be_written_leaves_nothing(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlainMirror(root).refresh(10)

    def fails(*whatever: Any) -> Any:
        raise OSError("disk full")

    before = files_below(root)
    with monkeypatch.context() as patched:
        patched.setattr(erased_base.RangedKey, "facts_of", fails)
        with pytest.raises(OSError, match="disk full"):
            erase(root)
    assert files_below(root) == before
    assert erase(root, "id in (1, 2)") == ErasedBase(2, 1, 2)
    assert rows(root) == [] and table_of(root).schema().to_arrow() is not None
    writer = DeltaTableWriter.open(current(root).child(TABLE), TABLE)
    assert writer is not None and writer.watermark(f"mirror/{SLOT}") == 10
    assert [column.name for column in writer.columns] == [field.name for field in FIELDS]


def test_lines_that_were_taken_back_at_two_times_go_each_at_its_own(root: Location) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    erase(root)
    between = datetime.datetime.now(datetime.timezone.utc)
    erase(root, "id = 2")
    assert [line.version for line in mirror.manifest.retired_lines()] == [1, 2]
    mirror.manifest.forget(between)
    assert [line.version for line in mirror.manifest.retired_lines()] == [2]
    assert [line.version for line in mirror.manifest.lines()] == [3]
    mirror.manifest.forget(between + DAY)
    assert mirror.manifest.retired_lines() == [] and len(mirror.manifest.lines()) == 1


def test_lines_that_a_machine_took_back_whose_clock_is_behind_are_no_older_than_the_refresh_that_they_follow(
    root: Location,
) -> None:
    """Else they would go at once, with the files of who found them before."""
    mirror = PlainMirror(root)
    refreshed_at = datetime.datetime.now(datetime.timezone.utc) + 2 * DAY
    mirror.refresh(10, refreshed_at)
    erase(root)
    mirror.manifest.forget(refreshed_at)
    assert [line.version for line in mirror.manifest.retired_lines()] == [1]


def test_where_the_table_is_ahead_of_all_that_is_named_no_line_stays(root: Location) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    mirror.begin(20).commit()  # and the mirror dies
    erase(root)
    assert read_lines(DeltaBases(root)) == []
    mirror.refresh(30)
    assert [line.lsn for line in mirror.manifest.newest()] == [30]
