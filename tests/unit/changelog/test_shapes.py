"""Which columns a table has at an LSN, and which Delta columns hold their values."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.changelog.shapes import shape_at
from xidstream.pipeline.errors import PreconditionMissing, StorageFault
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

SLOT = "7/shop/orders"
COLUMNS = (
    TableColumn("id", pa.int64(), "id"),
    TableColumn("price", pa.decimal128(10, 2), "price"),
    TableColumn("_commit_lsn", pa.int64(), "_commit_lsn"),
    TableColumn("price__decimal_20_4", pa.decimal128(20, 4), "price"),
    TableColumn("note", pa.string(), "note"),
)


def version(since: int, slot: str = SLOT, **columns: str) -> dict[str, Any]:
    return {
        "slot": slot,
        "since": since,
        "relid": 1,
        "key": ["id"],
        "replica_identity": "default",
        "columns": {name: {"type": "text", "column": column} for name, column in columns.items()},
    }


def held(properties: dict[str, Any], lsn: int) -> dict[str, tuple[str, tuple[str, ...]]]:
    texts = {name: json.dumps(value) for name, value in properties.items()}
    shape = shape_at("public.t", COLUMNS, texts, ("id",), lsn, SLOT)
    return {name: (column.type.simpleString(), column.held_in) for name, column in shape.columns.items()}


VERSIONS = {
    "xidstream.versions": [
        version(100, id="id", price="price"),
        version(150, slot="7/shop/other", id="id"),
        version(200, id="id", price="price__decimal_20_4"),
        version(300, id="id", price="price__decimal_20_4", note="note"),
    ]
}


def test_the_layout_at_an_lsn_is_the_last_of_the_slot_that_began_before() -> None:
    first = {"id": ("bigint", ("id",)), "price": ("decimal(10,2)", ("price",))}
    widened = {**first, "price": ("decimal(20,4)", ("price__decimal_20_4", "price"))}
    assert held(VERSIONS, 50) == held(VERSIONS, 100) == held(VERSIONS, 199) == first
    assert held(VERSIONS, 200) == held(VERSIONS, 299) == widened
    assert held(VERSIONS, 300) == {**widened, "note": ("string", ("note",))}


def test_a_column_of_that_name_whose_values_mean_something_else_is_left_out() -> None:
    columns = (TableColumn("a", pa.list_(pa.int32()), "a"), TableColumn("a__boolean", pa.bool_(), "a"))
    texts = {"xidstream.versions": json.dumps([version(1, a="a"), version(2, a="a__boolean")])}
    assert shape_at("t", columns, texts, None, 2, SLOT).columns["a"].held_in == ("a__boolean",)


@pytest.mark.parametrize(
    "value",
    [
        "no json",
        "{}",
        "[]",
        '[{"since": 1}]',
        '[{"slot": "7/shop/orders", "since": 1, "columns": {"a": {"column": "b"}}}]',
    ],
)
def test_properties_that_somebody_changed_are_refused(value: str) -> None:
    with pytest.raises(StorageFault, match="do not say which columns"):
        shape_at("public.t", COLUMNS, {"xidstream.versions": value}, None, 1, SLOT)


def test_a_layout_of_before_that_comes_while_the_snapshot_is_taken_does_not_count() -> None:
    """Of a transaction that had begun before its publication was told to leave a column out."""
    versions = [
        version(50, id="id", note="note"),
        version(100, id="id"),
        version(120, id="id", note="note"),
    ]
    texts = {"xidstream.versions": json.dumps(versions)}
    bounds = SnapshotBounds(Lsn(100), Lsn(150), 1, 1, (), 0)
    for lsn, wanted in ((99, bounds), (150, bounds), (160, bounds)):
        names = [*shape_at("t", COLUMNS, texts, ("id",), lsn, SLOT, wanted).columns]
        assert names == (["id", "note"] if lsn < 100 else ["id"]), lsn
    later = SnapshotBounds(Lsn(100), Lsn(110), 1, 1, (), 0)
    assert [*shape_at("t", COLUMNS, texts, ("id",), 130, SLOT, later).columns] == ["id", "note"]


def test_a_state_has_no_columns_where_nobody_knows_whether_the_table_was_altered_by_then() -> None:
    versions = [version(40, id="id"), {**version(300, id="id", note="note"), "after": 200}]
    texts = {"xidstream.versions": json.dumps(versions)}

    def names(lsn: int, bounds: SnapshotBounds | None) -> list[str]:
        return [*shape_at("t", COLUMNS, texts, ("id",), lsn, SLOT, bounds).columns]

    bounds = SnapshotBounds(Lsn(40), Lsn(60), 1, 1, (), 0)
    assert names(200, bounds) == ["id"] and names(300, bounds) == ["id", "note"]
    for lsn in (201, 299):
        with pytest.raises(
            PreconditionMissing, match=r"its columns were altered .* after 0/C8 and up to 0/12C"
        ):
            names(lsn, bounds)
        assert names(lsn, None) == ["id"], "changes have the columns that came with them"
    locked = SnapshotBounds(Lsn(40), Lsn(250), 1, 1, (), 0)
    assert names(250, locked) == ["id"], "it was locked up to there"
    with pytest.raises(PreconditionMissing, match="after 0/FA"):
        names(251, locked)


def test_a_state_has_a_column_in_its_own_type_and_changes_in_the_wider_one_that_holds_it() -> None:
    columns = (TableColumn("n", pa.float64(), "n"), TableColumn("d", pa.decimal128(20, 4), "d"))
    second = version(200, n="n", d="d")
    second["columns"]["n"]["shown"] = "integer"
    texts = {"xidstream.versions": json.dumps([version(40, n="n", d="d"), second])}
    bounds = SnapshotBounds(Lsn(40), Lsn(60), 1, 1, (), 0)

    def types(lsn: int, bounds: SnapshotBounds | None) -> list[str]:
        shape = shape_at("t", columns, texts, None, lsn, SLOT, bounds)
        return [column.type.simpleString() for column in shape.columns.values()]

    assert types(199, bounds) == ["double", "decimal(20,4)"]
    assert types(200, bounds) == ["int", "decimal(20,4)"]
    assert types(200, None) == ["double", "decimal(20,4)"]
