"""The fold as Spark's plan: random logs against what the table held, and each rule by itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.fold import folded
from tests.random_log import COLUMNS, CONTRACT, Change, RandomLog, Row, values_of
from xidstream.pipeline.changelog.fold import base_alone, fold, net_changes
from xidstream.pipeline.changelog.shape import ColumnShape, TableShape
from xidstream.pipeline.errors import UsageError

pytestmark = pytest.mark.spark


def shape_of(key: tuple[str, ...] | None, columns: dict[str, str] | None = None) -> TableShape:
    from pyspark.sql.types import _parse_datatype_string

    types = (columns or COLUMNS).items()
    return TableShape("public.t", {n: ColumnShape(_parse_datatype_string(t), (n,)) for n, t in types}, key)


def frame(spark: Any, rows: list[Change], columns: dict[str, str]) -> Any:
    schema = ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())
    return spark.createDataFrame([tuple(row.get(name) for name in columns) for row in rows], schema)


def base_frame(spark: Any, rows: list[Change]) -> Any:
    return frame(spark, rows, {**COLUMNS, "_text": CONTRACT["_text"]})


def tail_frame(spark: Any, rows: list[Change]) -> Any:
    return frame(spark, rows, {**CONTRACT, **COLUMNS})


def in_files(spark: Any, rows: Any, path: Path) -> Any:
    """The same rows, of a size that the planner knows: it takes others for too large to be sent about."""
    rows.write.parquet(str(path))
    return spark.read.schema(rows.schema).parquet(str(path))


def dicts(found: Any) -> list[Change]:
    batches = found._collect_as_arrow()
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def counted(found: Any) -> Counter[Row]:
    return Counter(values_of(row) for row in dicts(found))


LOGS = [
    {"seed": seed, "key": key, "is_full": full, "truncates": seed % 4 == 0, "n_keys": n_keys}
    for seed, (key, full, n_keys) in enumerate(
        [
            (("id",), False, 12),
            (("id",), False, 6),
            (("Part", "id"), False, 8),
            (("id",), False, 12),
            (("id",), False, 4),
            (("id",), False, 40),
            (("id",), True, 8),
            (("id", "Part"), True, 8),
            (None, True, 8),
            (None, True, 8),
            (None, True, 3),
        ]
    )
] + [
    {"seed": seed, "truncates": False, "n_keys": n_keys, "row_filter": True}
    for seed, n_keys in ((41, 12), (42, 12), (43, 6), (44, 20))
]


BOTH_PLANS = pytest.mark.parametrize(
    "is_in_files",
    [pytest.param(False, id="two scans", marks=pytest.mark.nightly), pytest.param(True, id="one scan")],
)
EACH_TIME = (0, 2, 6, 8, 41, 44)
"""One log of each kind of key and identity, with and without truncates, and two of a table with a row filter, one for
each plan: the others are more of the same."""


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(a, marks=() if a["seed"] in EACH_TIME else pytest.mark.nightly) for a in LOGS],
    ids=lambda a: f"seed{a['seed']}",
)
def test_a_random_log_folds_to_what_the_table_held(
    spark: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    log = RandomLog(**arguments)
    shape = shape_of(log.key)
    state = log.states[-1][1]
    key = None if log.key is None else list(log.key)
    oracle = folded([*COLUMNS, "_text"], key, map(frozen, log.base), map(frozen, log.changes))
    assert Counter(row[:-1] for row in oracle.elements()) == Counter(
        tuple(None if isinstance(v, tuple) and v[:1] == ("text",) else v for v in row)
        for row in state.elements()
    ), "the generator and the oracle agree"
    # In another order than the log's: order is what the columns say.
    tail = tail_frame(spark, log.changes[::-1])
    if log.seed % 2:
        tail = in_files(spark, tail, tmp_path / "tail")
    found = fold(base_frame(spark, log.base), tail, shape)
    assert found.columns == [*COLUMNS, "_text"]
    assert counted(found) == state, arguments


def frozen(row: Change) -> Change:
    """As the oracle wants values: hashable, and NaN equal to itself."""
    texts = row.get("_text")
    return {
        **dict(zip(COLUMNS, values_of({**row, "_text": None}), strict=True)),
        **{name: row.get(name) for name in CONTRACT},
        "_text": None if texts is None else tuple(sorted(texts.items())),
    }


@pytest.mark.parametrize(
    "seed", [pytest.param(20, marks=pytest.mark.nightly), 21, pytest.param(22, marks=pytest.mark.nightly), 25]
)
def test_net_changes_of_a_random_log_take_a_base_to_the_tables_state(spark: Any, seed: int) -> None:
    log = RandomLog(seed, truncates=seed == 21, n_keys=10, row_filter=seed == 25)
    state = {values_of(row)[0]: values_of(row) for row in log.base}
    changes = dicts(
        net_changes(base_frame(spark, log.base), tail_frame(spark, log.changes), shape_of(log.key))
    )
    touched = [row["id"] for row in changes]
    assert len(touched) == len(set(touched)), "one row for each key"
    for row in changes:
        state.pop(row["id"], None)
        if row["_change_type"] != "delete":
            state[row["id"]] = values_of(row)
    assert Counter(state.values()) == log.states[-1][1], f"seed {seed}"


def test_a_row_keeps_an_unchanged_value_along_ten_keys_and_takes_none_from_a_former_life(spark: Any) -> None:
    columns = {"id": "int", "body": "string", "n": "int"}
    shape = shape_of(("id",), columns)
    base = frame(
        spark, [{"id": 1, "body": "of the base", "n": 0}, {"id": 50, "body": "kept", "n": 0}], columns
    )
    log: list[Change] = []

    def add(kind: str, row_id: int, **values: Any) -> None:
        change = {"_change_type": kind, "_commit_lsn": 100, "_xid": 1, "_seq": len(log)}
        log.append({**change, "id": row_id, **values})

    def move(old: int, new: int, **values: Any) -> None:
        add("update_preimage", old)
        add("update_postimage", new, **(values or {"_unchanged": ["body"], "n": new}))

    for key in range(1, 11):
        move(key, key + 1)
    add("insert", 1, body="another life", n=1)
    move(1, 20, body="set on the way", n=20)
    add("insert", 1, body="a third life", n=1)
    add("delete", 1)
    move(20, 1)
    # Its key is stored outside of the row, and is sent though it is the same.
    add("update_preimage", 50)
    add("update_postimage", 50, _unchanged=["body"], n=51)
    tail = frame(spark, log, {**CONTRACT, **columns})
    rows = {row["id"]: (row["body"], row["n"]) for row in dicts(fold(base, tail, shape))}
    assert rows == {11: ("of the base", 11), 1: ("set on the way", 1), 50: ("kept", 51)}


def test_a_key_is_its_text_where_its_type_cannot_hold_it_and_floats_are_equal_as_in_an_index(
    spark: Any,
) -> None:
    columns = {"at": "date", "x": "double", "v": "int"}
    infinite = {"at": "infinity"}
    base = frame(
        spark,
        [
            {"at": None, "x": 0.0, "v": 1, "_text": infinite},
            {"at": None, "x": 0.0, "v": 2, "_text": {"at": "-infinity"}},
            {"at": None, "x": float("nan"), "v": 3, "_text": infinite},
        ],
        {**columns, "_text": CONTRACT["_text"]},
    )
    contract = {"_xid": 1, "_commit_lsn": 100}
    log = [
        {**contract, "_change_type": "update_postimage", "_seq": 0, "x": -0.0, "v": 10, "_text": infinite},
        {**contract, "_change_type": "delete", "_seq": 1, "x": float("nan"), "_text": infinite},
        {**contract, "_change_type": "insert", "_seq": 2, "x": 1.0, "v": 4, "_text": infinite},
    ]
    rows = dicts(fold(base, frame(spark, log, {**CONTRACT, **columns}), shape_of(("at", "x"), columns)))
    assert sorted((dict(row["_text"])["at"], repr(row["x"]), row["v"]) for row in rows) == [
        ("-infinity", "0.0", 2),
        ("infinity", "-0.0", 10),
        ("infinity", "1.0", 4),
    ]


def test_a_row_without_a_key_goes_though_it_has_a_text_of_a_column_that_was_dropped(spark: Any) -> None:
    columns = {"id": "int", "at": "date"}
    infinite = {"at": "infinity"}
    rows: list[Change] = [{"id": 1, "_text": infinite}, {"id": 2, "_text": infinite}]
    base = frame(spark, rows, {**columns, "_text": CONTRACT["_text"]})
    contract = {"_xid": 1, "_commit_lsn": 100}
    log = [
        # Before the column was dropped, and after it.
        {**contract, "_change_type": "insert", "_seq": 0, "id": 3, "_text": infinite},
        {**contract, "_change_type": "delete", "_seq": 1, "id": 1},
        {**contract, "_change_type": "update_preimage", "_seq": 2, "id": 3},
        {**contract, "_change_type": "update_postimage", "_seq": 3, "id": 4},
    ]
    columns = {"id": "int"}
    found = dicts(fold(base, frame(spark, log, {**CONTRACT, **columns}), shape_of(None, columns)))
    assert sorted((row["id"], row["_text"]) for row in found) == [(2, None), (4, None)]


def test_a_column_that_is_added_again_has_no_text_of_the_one_that_was_dropped(spark: Any) -> None:
    texts = {"at": "infinity", "day": "infinity"}
    columns = {"id": "int", "at": "timestamp", "day": "date"}
    base = frame(spark, [{"id": 1, "_text": texts}], {**columns, "_text": CONTRACT["_text"]})
    (row,) = dicts(base_alone(base, shape_of(("id",), {**columns, "at": "bigint"})))
    assert row == {"id": 1, "at": None, "day": None, "_text": [("day", "infinity")]}
    (row,) = dicts(base_alone(base, shape_of(("id",), {"id": "int", "at": "bigint"})))
    assert row == {"id": 1, "at": None, "_text": None}


def test_columns_may_be_called_as_the_plan_calls_its_own(spark: Any) -> None:
    columns = {"c0": "int", "k0": "string", "place": "string", "a.b": "string", "x`y": "int", "n1": "int"}
    shape = shape_of(("k0",), columns)
    row = {"c0": 1, "k0": "one", "place": "here", "a.b": "dotted", "x`y": 2, "n1": 3}
    base = frame_of(spark, [row, {**row, "k0": "two"}], columns)
    change = {"_change_type": "update_postimage", "_commit_lsn": 100, "_seq": 0, "_xid": 1}
    tail = frame_of(
        spark, [{**row, **change, "c0": 7, "a.b": None, "_unchanged": ["a.b"]}], {**CONTRACT, **columns}
    )
    found = fold(base, tail, shape)
    assert found.columns == [*columns, "_text"]
    assert sorted(tuple(row[name] for name in columns) for row in dicts(found)) == [
        (1, "two", "here", "dotted", 2, 3),
        (7, "one", "here", "dotted", 2, 3),
    ]


def frame_of(spark: Any, rows: list[Change], columns: dict[str, str]) -> Any:
    from pyspark.sql.types import StructType, _parse_datatype_string

    schema = StructType()
    for name, type_ in columns.items():
        schema.add(name, _parse_datatype_string(type_))
    return spark.createDataFrame([tuple(row.get(name) for name in columns) for row in rows], schema)


def test_net_changes_need_a_key_and_name_every_row_that_a_truncate_took(spark: Any) -> None:
    columns = {"id": "int", "v": "string"}
    base = frame(spark, [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}], columns)
    log = [
        {
            "_change_type": "insert",
            "_commit_lsn": 100,
            "_seq": 0,
            "_xid": 1,
            "id": 3,
            "v": "gone with the rest",
        },
        {"_change_type": "truncate", "_commit_lsn": 100, "_seq": 1, "_xid": 1},
        {"_change_type": "insert", "_commit_lsn": 100, "_seq": 2, "_xid": 1, "id": 2, "v": "new"},
    ]
    tail = frame(spark, log, {**CONTRACT, **columns})
    rows = {
        row["id"]: (row["v"], row["_change_type"] == "delete")
        for row in dicts(net_changes(base, tail, shape_of(("id",), columns)))
    }
    assert rows[2] == ("new", False)
    assert rows[1][1] is True and set(rows) == {1, 2}
    with pytest.raises(UsageError, match="has no key"):
        net_changes(base, tail, shape_of(None, columns))


def test_a_table_that_is_only_inserted_into_is_its_base_and_the_inserts(spark: Any) -> None:
    log = RandomLog(30, None, only_inserts=True, truncates=False)
    found = fold(base_frame(spark, log.base), tail_frame(spark, log.changes), shape_of(None))
    assert "Join" not in found._jdf.queryExecution().optimizedPlan().toString(), "no row is compared"
    assert counted(found) == log.states[-1][1]


@BOTH_PLANS
def test_an_insert_that_lacks_a_value_is_there_and_takes_none_from_a_former_life(
    spark: Any, tmp_path: Path, is_in_files: bool
) -> None:
    """An update that brings a row into a row filter is sent as an insert, without its unchanged large values."""
    columns = {"id": "int", "body": "string", "n": "int"}
    shape = shape_of(("id",), columns)
    base = frame(spark, [{"id": i, "body": f"of the base {i}", "n": 0} for i in (1, 2, 5)], columns)
    changes = [
        {"_change_type": "delete", "id": 1},
        {"_change_type": "insert", "id": 1, "n": 1, "_unchanged": ["body"]},
        {"_change_type": "insert", "id": 3, "n": 3, "_unchanged": ["body"]},
        {"_change_type": "insert", "id": 8, "n": 8, "_unchanged": ["body"]},
        {"_change_type": "update_preimage", "id": 8},
        {"_change_type": "update_postimage", "id": 9, "n": 9, "_unchanged": ["body"]},
        {"_change_type": "delete", "id": 2},
        {"_change_type": "update_preimage", "id": 9},
        {"_change_type": "update_postimage", "id": 2, "n": 10, "_unchanged": ["body"]},
        {"_change_type": "update_postimage", "id": 5, "n": 5, "_unchanged": ["body"]},
    ]
    log = [{**change, "_commit_lsn": 100, "_xid": 1, "_seq": i} for i, change in enumerate(changes)]
    tail = frame(spark, log, {**CONTRACT, **columns})
    if is_in_files:
        tail = in_files(spark, tail, tmp_path / "tail")
    expected = {1: (None, 1), 3: (None, 3), 2: (None, 10), 5: ("of the base 5", 5)}
    found = dicts(fold(base, tail, shape))
    assert len(found) == 4 and {row["id"]: (row["body"], row["n"]) for row in found} == expected
    net = {row["id"]: row for row in dicts(net_changes(base, tail, shape))}
    there = {i: row for i, row in net.items() if row["_change_type"] != "delete"}
    assert {i: (row["body"], row["n"]) for i, row in there.items()} == expected


@BOTH_PLANS
def test_a_row_from_an_insert_that_lacks_a_value_is_there_with_null_beside_chains_of_keys(
    spark: Any, tmp_path: Path, is_in_files: bool
) -> None:
    """However far its key has moved, and whether or not the base has a former life of the key that it began with."""
    columns = {"id": "int", "body": "string", "n": "int"}
    shape = shape_of(("id",), columns)
    base = frame(spark, [{"id": i, "body": f"of the base {i}", "n": 0} for i in (1, 10, 40)], columns)
    log: list[Change] = []

    def add(kind: str, row_id: int, **values: Any) -> None:
        change = {"_change_type": kind, "_commit_lsn": 100, "_xid": 1, "_seq": len(log)}
        log.append({**change, "id": row_id, **values})

    def move(*keys: int) -> None:
        for old, new in pairwise(keys):
            add("update_preimage", old)
            add("update_postimage", new, _unchanged=["body"], n=new)

    for began in (10, 40):
        add("delete", began)
    for began in (10, 20, 30, 40):
        add("insert", began, n=began, _unchanged=["body"])
    move(10, 11)
    move(20, 21)
    move(30, 31, 32, 33, 34, 35)
    move(40, 41, 42, 43)
    move(1, 2, 3)
    tail = frame(spark, log, {**CONTRACT, **columns})
    if is_in_files:
        tail = in_files(spark, tail, tmp_path / "tail")
    expected = {11: (None, 11), 21: (None, 21), 35: (None, 35), 43: (None, 43), 3: ("of the base 1", 3)}
    found = dicts(fold(base, tail, shape))
    assert {row["id"]: (row["body"], row["n"]) for row in found} == expected and len(found) == len(expected)
    net = dicts(net_changes(base, tail, shape))
    there = {row["id"]: (row["body"], row["n"]) for row in net if row["_change_type"] != "delete"}
    assert there == expected


@pytest.mark.parametrize("key", [("id",), ("Part", "id"), ("id", "n")])
@pytest.mark.parametrize("unchanged", [None, ["body"]])
def test_rows_that_no_bit_of_the_sieve_stands_for_stay_and_all_others_are_compared(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: tuple[str, ...],
    unchanged: list[str] | None,
) -> None:
    from xidstream.pipeline.changelog import sieve

    monkeypatch.setattr(sieve, "LEAST_ROWS", 1)
    shape = shape_of(key, COLUMNS)
    ids = [*range(-300, 300), -(2**31), 2**31 - 1]
    rows = [{"id": i, "Part": f"p{i % 3}", "n": -0.0, "body": f"{i}"} for i in ids]
    changed = [row for row in rows if row["id"] % 7 == 0]
    log = [
        {
            **row,
            "n": 0.0,
            "tags": [1],
            "_change_type": "delete" if row["id"] % 2 else "update_postimage",
            "body": None if unchanged else row["body"],
            "_unchanged": None if row["id"] % 2 else unchanged,
            "_commit_lsn": 100,
            "_xid": 1,
            "_seq": seq,
        }
        for seq, row in enumerate(changed)
    ]
    tail = in_files(spark, tail_frame(spark, log), tmp_path / "tail")
    state = fold(base_frame(spark, rows), tail, shape)
    if unchanged:
        plan = state._jdf.queryExecution().executedPlan().toString()
        assert "ReusedExchange" in plan, "the tail is sorted out by its keys once"
    found = dicts(state)
    expected = {i: None if i % 7 else [1] for i in ids if i % 7 or i % 2 == 0}
    assert len(found) == len(expected)
    assert {row["id"]: row["tags"] for row in found} == expected
    assert all(row["body"] == str(row["id"]) for row in found)
