"""The files that some versions need, from one pass over the log: as if each version had been opened."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.kept_files import commit_name, files_of_versions

SCHEMA = pa.schema([("id", pa.int64())])
N_VERSIONS = 40


def add(path: str) -> AddAction:
    return AddAction(path, 1, {}, 0, True, '{"numRecords": 1}')


@pytest.fixture
def table(tmp_path: Path) -> Location:
    """Versions that add and remove files, replace all, add none, and change the metadata alone."""
    dice = random.Random(18)
    location = Location.parse(str(tmp_path / "t"))
    table = DeltaTable.create(
        location.uri,
        schema=SCHEMA,
        configuration={"delta.checkpointInterval": "7", "delta.enableExpiredLogCleanup": "false"},
    )
    there: list[str] = []
    for n in range(N_VERSIONS):
        if dice.random() < 0.15:
            table.alter.set_table_properties({"x.n": str(n)}, raise_if_not_exists=False)
        elif dice.random() < 0.15:
            there = [f"all-{n}/ä {i}%.parquet" for i in range(3)]
            table.create_write_transaction([add(path) for path in there], "overwrite", table.schema())
        else:
            gone = [path for path in there if dice.random() < 0.4]
            new = [f"some-{n}/{i}.parquet" for i in range(dice.randint(0, 3))]
            there = [*new, *(path for path in there if path not in gone)]
            actions: list[Any] = [*map(add, new), *(RemoveAction(path, True, 0) for path in gone)]
            table.create_write_transaction(actions, "append", table.schema())
        table.update_incremental()
    return location


def opened(table: Location, versions: list[int]) -> set[str]:
    found = set()
    for version in versions:
        files = pa.table(DeltaTable(table.uri, version=version).get_add_actions(flatten=True))
        found |= {os.path.join(table.uri, unquote(path)) for path in files["path"].to_pylist()}
    return found


def test_any_versions_need_the_files_that_each_of_them_shows_when_it_is_opened(table: Location) -> None:
    dice = random.Random(18)
    last = DeltaTable(table.uri).version()
    assert last >= N_VERSIONS and os.path.exists(f"{table.uri}/{commit_name(last)}")
    for n in [0, 1, 2, 3, 5, 10, 20, last]:
        versions = dice.sample(range(last + 1), n)
        assert files_of_versions(table, versions) == opened(table, versions), sorted(versions)


def test_a_file_that_came_and_went_between_two_versions_is_needed_by_neither(tmp_path: Path) -> None:
    location = Location.parse(str(tmp_path / "t"))
    table = DeltaTable.create(location.uri, schema=SCHEMA)
    for actions in (
        [add("a")],
        [add("b")],
        [RemoveAction("b", True, 0), add("c")],
        [RemoveAction("a", True, 0)],
    ):
        table.create_write_transaction(list(actions), "append", table.schema())
        table.update_incremental()
    assert files_of_versions(location, [1, 3]) == {f"{location.uri}/a", f"{location.uri}/c"}
    assert files_of_versions(location, [4]) == {f"{location.uri}/c"}


def test_versions_behind_a_checkpoint_are_read_after_the_log_ahead_of_it_was_removed(table: Location) -> None:
    versions = [21, 24, 30, 33, 38]
    wanted = opened(table, versions)
    assert os.path.exists(f"{table.uri}/_delta_log/{27:020d}.checkpoint.parquet")
    for version in range(20):
        os.unlink(f"{table.uri}/{commit_name(version)}")
    assert files_of_versions(table, versions) == wanted
    for version in range(20, 27):
        os.unlink(f"{table.uri}/{commit_name(version)}")
    assert files_of_versions(table, [28, 30, 33]) == opened(table, [28, 30, 33])


def test_a_gap_in_the_log_ahead_of_a_checkpoint_costs_one_more_table_that_is_opened(
    table: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [21, 24, 30, 33, 38]
    wanted = opened(table, versions)
    os.unlink(f"{table.uri}/{commit_name(27)}")
    real, found = DeltaTable.__init__, []

    def counted(self: DeltaTable, *args: Any, **more: Any) -> None:
        found.append(more.get("version"))
        real(self, *args, **more)

    monkeypatch.setattr(DeltaTable, "__init__", counted)
    assert files_of_versions(table, versions) == wanted
    assert found == [21, 30]
