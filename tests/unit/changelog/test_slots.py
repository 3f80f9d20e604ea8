"""Whose log a root is: the slots that its commits name, also when a checkpoint has replaced the commits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from xidstream.pipeline.changelog.slots import (
    application_ids,
    chosen_slot,
    table_directories,
    table_of,
)
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location


def commit(path: Path, slot: str, lsn: int) -> None:
    ids = {slot: lsn, f"{slot}/owner": 1, f"{slot}/timeline": 1}
    properties = CommitProperties(
        app_transactions=[Transaction(name, version) for name, version in ids.items()]
    )
    write_deltalake(str(path), pa.table({"commit_lsn": [lsn]}), mode="append", commit_properties=properties)


def test_slots_are_found_in_commits_and_behind_a_checkpoint(tmp_path: Path) -> None:
    path, location = tmp_path / "_transactions", Location.parse(str(tmp_path / "_transactions"))
    commit(path, "7/shop/a", 100)
    assert application_ids(location) == ["7/shop/a"]
    commit(path, "7/my/odd/name/b", 110)
    DeltaTable(str(path)).create_checkpoint()
    (path / "_delta_log" / f"{0:020d}.json").unlink()
    commit(path, "8/shop/a", 120)
    assert application_ids(location) == ["7/my/odd/name/b", "7/shop/a", "8/shop/a"]


def test_a_slot_is_named_where_there_are_several_and_by_its_whole_id_where_two_have_one_name() -> None:
    found = ["7/shop/a", "7/shop/b", "8/shop/a"]
    assert chosen_slot(["7/shop/a"], None) == "7/shop/a"
    assert chosen_slot(found, "b") == "7/shop/b"
    assert chosen_slot(found, "8/shop/a") == "8/shop/a"
    for slot, message in ((None, "no common order"), ("a", "more than one slot a"), ("c", "no slot c")):
        with pytest.raises(UsageError, match=message) as raised:
            chosen_slot(found, slot)
        assert "7/shop/a, 7/shop/b, 8/shop/a" in raised.value.remedy
    with pytest.raises(UsageError, match="no slot has written"):
        chosen_slot([], None)


def test_the_tables_of_a_root_are_its_delta_tables_but_for_the_logs_own(tmp_path: Path) -> None:
    for name in ("_transactions", "_snapshots", "current", "public.orders", "public.order~20lines"):
        write_deltalake(str(tmp_path / name), pa.table({"id": [1]}))
    directories = table_directories(Location.parse(str(tmp_path)))
    assert directories == ["public.orders", "public.order~20lines"]
    assert [table_of(each, lambda: None) for each in directories] == [
        ("public", "orders"),
        ("public", "order lines"),
    ]


def test_what_else_stands_below_a_root_is_no_table(tmp_path: Path) -> None:
    for folder in (".snapshot", "backup.2024", "v1.2.3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").touch()
    for file in (".DS_Store", "notes.txt"):
        (tmp_path / file).touch()
    assert table_directories(Location.parse(str(tmp_path))) == []


def test_a_directory_whose_name_is_cut_or_nobodys_is_known_by_what_its_table_says() -> None:
    schema, table = "sales.eu", "o" * 300
    directory = locations.encode_table(schema, table)
    assert table_of(directory, lambda: f"{schema}.{table}") == (schema, table)
    assert table_of(directory, lambda: None) is None
    assert table_of("public.orders.bak", lambda: "public.orders") is None
