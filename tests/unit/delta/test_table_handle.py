"""A handle knows the versions of application transactions without a search, and never those of another moment."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from xidstream.pipeline.delta.table_handle import TableHandle
from xidstream.pipeline.log_tables.locations import Location


@pytest.fixture
def location(tmp_path: Path) -> Location:
    found = Location.parse(str(tmp_path / "t"))
    commit(found, s=500)
    return found


def commit(location: Location, **versions: int) -> None:
    transactions = [Transaction(app, version) for app, version in versions.items()]
    write_deltalake(
        location.uri,
        pa.table({"n": [1]}),
        mode="append",
        commit_properties=CommitProperties(app_transactions=transactions),
    )


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids that deltalake was asked for, and the commits that were read."""
    done: list[str] = []
    ask, read = DeltaTable.transaction_version, TableHandle.commit_of
    monkeypatch.setattr(DeltaTable, "transaction_version", lambda t, id_: done.append(id_) or ask(t, id_))
    monkeypatch.setattr(TableHandle, "commit_of", lambda t, n: done.append(f"commit {n}") or read(t, n))
    return done


def test_the_example_of_the_module(location: Location, searches: list[str]) -> None:
    table = TableHandle(location)
    assert (table.transaction_version("s"), table.transaction_version("nobody")) == (500, None)
    before = table.version()
    commit(location, s=600)
    table.update_incremental()
    table.take_own(before, {"s": 600})
    assert (table.transaction_version("s"), table.transaction_version("nobody")) == (600, None)
    assert searches == ["s", "nobody"]
    commit(location, t=3)
    table.update_incremental()
    assert table.transaction_version("s") == 600
    assert searches[2:] == [f"commit {before + 2}"]
    assert table.transaction_version("t") == 3
    assert searches[3:] == ["t"]


def test_a_commit_of_others_that_was_not_read_yet_is_not_passed_over(location: Location) -> None:
    table = TableHandle(location)
    assert table.transaction_version("s") == 500
    commit(location, s=550)
    table.update_incremental()
    before = table.version()
    commit(location, t=3)
    table.update_incremental()
    table.take_own(before, {"t": 3})
    assert (table.transaction_version("s"), table.transaction_version("t")) == (550, 3)


def test_a_handle_that_did_not_move_takes_nothing_for_its_own(location: Location) -> None:
    table = TableHandle(location)
    assert table.transaction_version("s") == 500
    commit(location, s=550)
    before = table.version()
    table.update_incremental()
    table.take_own(before + 1, {})
    assert table.transaction_version("s") == 550


def test_a_commit_that_a_checkpoint_has_replaced_makes_it_search_again(
    location: Location, searches: list[str]
) -> None:
    table = TableHandle(location)
    assert table.transaction_version("s") == 500
    commit(location, s=550)
    commit(location, s=600)
    DeltaTable(location.uri).create_checkpoint()
    table.update_incremental()
    Path(location.uri, "_delta_log", f"{1:020d}.json").unlink()
    assert table.transaction_version("s") == 600
    assert searches == ["s", "commit 1", "s"]
