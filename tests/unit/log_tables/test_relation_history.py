"""Relation versions of a table: which ones are recorded, from where on, over replays, snapshots and two slots."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.log_tables.columns import TableColumn, type_named
from xidstream.pipeline.log_tables.relation_history import VersionSince, recorded_with
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity

ID, NAME = Column("id", 20, -1, True), Column("name", 25, -1, False)
A = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (ID, NAME))
B = dataclasses.replace(A, columns=(ID, NAME, Column("more", 1700, (10 << 16 | 2) + 4, False)))
C = dataclasses.replace(A, replica_identity=ReplicaIdentity.FULL)


def at(since: int, relation: RelationVersion, slot: str = "7/shop/s") -> VersionSince:
    return VersionSince(
        slot, since, relation, [TableColumn(c.name, c.type.arrow, c.name) for c in relation.columns]
    )


def recorded(*batches: list[VersionSince]) -> str:
    """What a table has after these batches."""
    found: str | None = None
    for batch in batches:
        found = recorded_with(found, batch, "public.t")
    assert found is not None
    return found


def sinces(value: str) -> list[tuple[int, Any]]:
    """Each version's ``since`` with its layout's letter."""
    letters = {
        json.dumps(_layout(at(0, r).to_json())): letter for letter, r in zip("abc", (A, B, C), strict=True)
    }
    return [(entry["since"], letters[json.dumps(_layout(entry))]) for entry in json.loads(value)]


def _layout(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("relid", "key", "replica_identity", "columns")}


def test_a_version_tells_its_key_identity_types_and_the_columns_that_take_it() -> None:
    targets = [
        TableColumn("id", pa.float64(), "id"),
        TableColumn("name__string", pa.string(), "name"),
        TableColumn("more", pa.decimal128(10, 2), "more"),
        TableColumn("_change_type", pa.string(), "_change_type"),
    ]
    version = VersionSince("7/shop/s", 20, B, targets)
    assert json.loads(recorded([version])) == [
        {
            "slot": "7/shop/s",
            "since": 20,
            "relid": 1,
            "key": ["id"],
            "replica_identity": "default",
            "columns": {
                "id": {"type": "bigint", "column": "id"},
                "name": {"type": "text", "column": "name__string"},
                "more": {"type": "numeric(10,2)", "column": "more"},
            },
        }
    ]


@pytest.mark.parametrize(
    ("identity", "is_key", "key"),
    [
        (ReplicaIdentity.DEFAULT, True, ["id"]),
        (ReplicaIdentity.INDEX, True, ["id"]),
        (ReplicaIdentity.DEFAULT, False, None),
        (ReplicaIdentity.FULL, True, None),
        (ReplicaIdentity.NOTHING, False, None),
    ],
)
def test_what_names_a_row_is_the_replica_identitys_columns_and_nothing_where_whole_rows_do(
    identity: ReplicaIdentity, is_key: bool, key: list[str] | None
) -> None:
    columns = (dataclasses.replace(ID, is_key=is_key), NAME)
    relation = dataclasses.replace(A, replica_identity=identity, columns=columns)
    (entry,) = json.loads(recorded([at(20, relation)]))
    assert entry["key"] == key


def test_versions_stand_in_order_and_a_batch_under_the_newest_changes_nothing() -> None:
    value = recorded([at(5, A)], [at(20, B)])
    assert sinces(value) == [(5, "a"), (20, "b")]
    assert recorded_with(value, [at(30, B)], "t") is value
    assert sinces(recorded([at(5, A)], [at(20, B)], [at(30, A)])) == [(5, "a"), (20, "b"), (30, "a")]


def test_however_batches_are_cut_and_repeated_the_same_versions_are_recorded() -> None:
    """A at 5 and 10, B from 20 on, A again from 40 on; the run may die after any batch, and begin anywhere before."""
    rows = [(5, A), (10, A), (20, B), (30, B), (40, A)]
    for cuts in itertools.product((False, True), repeat=len(rows) - 1):
        batches: list[list[VersionSince]] = [[at(*rows[0])]]
        for row, begins in zip(rows[1:], cuts, strict=True):
            if begins:
                batches.append([])
            batches[-1].append(at(*row))
        for died in range(len(batches)):
            for again in range(died + 1):
                value = recorded(*batches[: died + 1], *batches[again:])
                assert sinces(value) == [(5, "a"), (20, "b"), (40, "a")]


@pytest.mark.parametrize("order", [(A, B), (B, A)], ids=["as written", "the later one spilled first"])
def test_a_transaction_that_alters_the_table_midway_has_both_versions_and_repeats_neither(
    order: tuple[RelationVersion, ...],
) -> None:
    midway = [at(20, relation) for relation in order]
    value = recorded([at(5, A)], midway, [at(30, B)], midway, [at(30, B)])
    assert sinces(value) == [(5, "a"), (20, "b")]
    alone = recorded(midway, [at(30, B)], list(reversed(midway)))
    assert sorted(sinces(alone)[:2]) == [(20, "a"), (20, "b")]


def test_the_stream_behind_a_snapshot_puts_what_was_before_it_in_front() -> None:
    """The snapshot has C. The stream is still at A, then has B, and comes to C before the snapshot's place, or not."""
    value = recorded([at(60, A)], [at(1000, C)], [at(70, A)], [at(300, B)])
    assert sinces(value) == [(60, "a"), (300, "b"), (1000, "c")]
    assert sinces(recorded_with(value, [at(720, C)], "t") or "") == [(60, "a"), (300, "b"), (720, "c")]
    assert recorded_with(value, [at(1200, C)], "t") is value


def test_two_slots_that_see_two_layouts_do_not_grow_the_record_with_each_batch() -> None:
    batches = [[at(lsn, A, "7/shop/x"), at(lsn + 1, B, "7/shop/y")] for lsn in range(10, 100, 10)]
    entries = json.loads(recorded(*batches))
    assert [(entry["slot"], entry["since"]) for entry in entries] == [("7/shop/x", 10), ("7/shop/y", 11)]


@pytest.mark.parametrize("value", ["{", "[1]", '[{"since": 3}]', "null"])
def test_a_record_that_somebody_changed_is_an_error_that_says_what_to_do(value: str) -> None:
    with pytest.raises(SinkFailed, match=r"public\.t: the property xidstream\.versions") as caught:
        recorded_with(value, [at(20, A)], "public.t")
    assert "remove it" in (caught.value.remedy or "")


def seen(since: int, after: int | None, relation: RelationVersion) -> VersionSince:
    """By a look at the catalog, when up to ``after`` the layout of before was proven."""
    return dataclasses.replace(at(since, relation), after=after)


def bounds(value: str) -> list[tuple[int | None, int]]:
    return [(entry.get("after"), entry["since"]) for entry in json.loads(value)]


def test_a_layout_that_a_look_at_the_catalog_found_says_since_when_it_may_have_been_there() -> None:
    value = recorded([at(5, A)], [seen(40, 20, B)])
    assert sinces(value) == [(5, "a"), (40, "b")] and bounds(value) == [(None, 5), (20, 40)]
    assert recorded_with(value, [seen(40, 20, B)], "t") is value, "the same look, told again"
    assert recorded_with(value, [at(60, B)], "t") is value, "its first row"
    assert bounds(recorded([at(5, A)], [seen(40, None, B)])) == [(None, 5), (None, 40)], "its DDL is known"


def test_what_the_stream_brought_behind_what_is_proven_was_altered_somewhere_before_it() -> None:
    """The first row is of 30, and another layout's of 35. Up to 20 the first one is proven."""
    assert bounds(recorded([at(5, A)], [at(30, B)], [seen(40, 20, B)])) == [(None, 5), (20, 30)]
    value = recorded([at(5, A)], [at(30, B), at(35, C)], [seen(40, 20, C)])
    assert bounds(value) == [(None, 5), (20, 30), (30, 35)]
    assert recorded_with(value, [seen(40, 20, C)], "t") is value
    value = recorded([at(5, A), at(10, B)], [seen(40, 20, B)])
    assert bounds(value) == [(None, 5), (None, 10)], "what is proven by then is known"


def test_a_row_that_comes_before_where_a_look_found_its_layout_takes_its_place() -> None:
    value = recorded([at(5, A)], [seen(40, 20, B)], [at(30, B)])
    assert sinces(value) == [(5, "a"), (30, "b")] and bounds(value) == [(None, 5), (20, 30)]


def test_a_column_that_an_earlier_ones_wider_column_takes_says_what_its_own_type_is() -> None:
    numbers = (
        Column("i", 23, -1, False),
        Column("n", 1700, (6 << 16 | 2) + 4, False),
        Column("l", 1007, -1, False),
    )
    wide = [pa.float64(), pa.decimal128(20, 4), pa.list_(pa.int64())]
    targets = [TableColumn(c.name, type_, c.name) for c, type_ in zip(numbers, wide, strict=True)]
    (entry,) = json.loads(
        recorded([VersionSince("7/shop/s", 5, dataclasses.replace(A, columns=numbers), targets)])
    )
    shown = {name: column["shown"] for name, column in entry["columns"].items()}
    assert shown == {"i": "integer", "n": "decimal(6,2)", "l": "array<integer>"}
    assert [type_named(name) for name in shown.values()] == [
        pa.int32(),
        pa.decimal128(6, 2),
        pa.list_(pa.int32()),
    ]
    with pytest.raises(ValueError, match="timestamp"):
        type_named("timestamp")
