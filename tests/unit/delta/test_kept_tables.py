"""Handles that are kept from one look to the next: they go on with the log, and never with another table's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import TableNotFoundError

from tests.s3_server import CountedS3, counted_s3
from xidstream.pipeline.changelog.log_table import DeltaLogTable
from xidstream.pipeline.delta import kept_tables
from xidstream.pipeline.delta.kept_tables import KeptTables
from xidstream.pipeline.delta.table_handle import TableHandle
from xidstream.pipeline.log_tables.attempt_files import store_of
from xidstream.pipeline.log_tables.locations import Location

N_COMMITS = 12


@pytest.fixture(scope="module")
def s3() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


@pytest.fixture
def in_s3(s3: CountedS3) -> Location:
    found = Location.parse(f"{s3.uri}/{secrets.token_hex(4)}", s3.options)
    append(found, *range(N_COMMITS))
    return found


@pytest.fixture(params=["s3", "folder"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "s3":
        return request.getfixturevalue("in_s3")
    found = Location.parse(str(tmp_path / "t"))
    append(found, *range(N_COMMITS))
    return found


def append(location: Location, *numbers: int) -> None:
    for number in numbers:
        rows = pa.table({"n": [number]})
        write_deltalake(location.uri, rows, mode="append", storage_options=location.storage_options)


def remove(location: Location) -> None:
    table = DeltaTable(location.uri, storage_options=location.storage_options)
    store = store_of(location)
    for path in [f"_delta_log/{v:020d}.json" for v in range(table.version() + 1)]:
        store.delete_file(path)


def numbers(table: DeltaTable) -> list[int]:
    return sorted(pa.table(table.get_add_actions(flatten=True))["min.n"].to_pylist())


def test_a_look_that_finds_nothing_is_four_requests_and_one_that_does_reads_what_is_new(
    s3: CountedS3, in_s3: Location
) -> None:
    kept = KeptTables()
    assert numbers(kept.newest(in_s3)) == list(range(N_COMMITS))
    s3.asked()
    assert numbers(kept.newest(in_s3)) == list(range(N_COMMITS))
    assert len(s3.asked()) <= 4
    append(in_s3, N_COMMITS)
    s3.asked()
    assert numbers(kept.newest(in_s3)) == list(range(N_COMMITS + 1))
    assert len(s3.asked()) <= 9
    kept.forget()
    kept.newest(in_s3)
    assert len(s3.asked()) > N_COMMITS


@pytest.mark.parametrize("n_commits", [1, N_COMMITS, N_COMMITS + 3])
def test_another_table_in_the_same_place_is_opened_however_far_it_has_come(
    location: Location, n_commits: int
) -> None:
    kept = KeptTables()
    kept.newest(location)
    kept.notes(location)["a file"] = frozenset({"said"})
    kept.newest(location)
    assert kept.notes(location)
    remove(location)
    with pytest.raises(TableNotFoundError):
        kept.newest(location)
    append(location, *range(N_COMMITS))
    kept.newest(location)
    remove(location)
    others = list(range(100, 100 + n_commits))
    append(location, *others)
    assert numbers(kept.newest(location)) == others
    assert not kept.notes(location)
    append(location, 7)
    assert numbers(kept.newest(location)) == [7, *others]


def test_a_look_opens_the_table_once_in_a_thousand_versions(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_table = TableHandle.__init__

    def count(self: TableHandle, *arguments: Any) -> None:
        opened.append("")
        open_table(self, *arguments)

    monkeypatch.setattr(TableHandle, "__init__", count)
    kept = KeptTables()
    for number in range(N_COMMITS, N_COMMITS + 3):
        append(location, number)
        assert numbers(kept.newest(location)) == list(range(number + 1))
    assert len(opened) == 1
    monkeypatch.setattr(kept_tables, "_RENEWED_AFTER", 2)
    for _ in range(2):
        assert numbers(kept.newest(location)) == list(range(N_COMMITS + 3))
    assert len(opened) == 2


def test_a_handle_goes_on_where_the_commits_in_between_are_gone(location: Location) -> None:
    """It has slept for longer than the log is kept."""
    kept = KeptTables()
    kept.newest(location)
    append(location, *range(50, 60))
    table = DeltaTable(location.uri, storage_options=location.storage_options)
    table.create_checkpoint()
    for version in range(table.version()):
        store_of(location).delete_file(f"_delta_log/{version:020d}.json")
    assert numbers(kept.newest(location)) == [*range(N_COMMITS), *range(50, 60)]
    append(location, 70)
    assert numbers(kept.newest(location)) == [*range(N_COMMITS), *range(50, 60), 70]


def test_a_version_that_somebody_holds_stays_what_it_is_when_the_handle_goes_on(location: Location) -> None:
    kept = KeptTables()
    held = DeltaLogTable(location, kept=kept)
    append(location, 50, 51)
    later = DeltaLogTable(location, kept=kept)
    assert later.listed().num_rows == N_COMMITS + 2
    assert held.listed().num_rows == N_COMMITS
    assert later.listed().num_rows == N_COMMITS + 2


def test_a_look_at_a_hundred_tables_opens_none_of_them_anew(tmp_path: Path) -> None:
    """With 64 handles, a refresh of a hundred base tables opened each of them anew each time."""
    locations = [Location.parse(str(tmp_path / f"t{i}")) for i in range(100)]
    kept = KeptTables()
    for location in locations:
        append(location, 1)
    first = [kept.newest(location) for location in locations]
    append(locations[0], 2)
    again = [kept.newest(location) for location in locations]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert again[0].version() == 1
