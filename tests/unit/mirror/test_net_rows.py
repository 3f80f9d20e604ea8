"""Net rows in memory: their files and slots, held against the definitions, and the rows they take away."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.changelog.arrow_rows import is_comparable
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.net_rows import NearKeys, NetRows
from xidstream.pipeline.mirror.plan import BaseFile, KeyRange, in_key_order

TYPES = {"shop": pa.string(), "n": pa.int64(), "v": pa.string()}
SCHEMA = pa.schema(list(TYPES.items()))


def net(rows: list[dict[str, Any]], *key: str, types: dict[str, pa.DataType] = TYPES) -> NetRows:
    schema = pa.schema(
        [*types.items(), ("_text", pa.map_(pa.string(), pa.string())), ("_change_type", pa.string())]
    )
    rows = [{"_change_type": "update_postimage", **row} for row in rows]
    return NetRows(pa.Table.from_pylist(rows, schema=schema), key, RangedKey.of(key, types))


def file(low: tuple[Any, ...], high: tuple[Any, ...]) -> BaseFile:
    return BaseFile(f"{low}", 1_000, 10, KeyRange(low, high))


@pytest.mark.parametrize("key", [("n",), ("shop", "n"), ("n", "shop")])
def test_each_file_counts_the_keys_within_its_ranges_and_each_row_has_one_slot(key: tuple[str, ...]) -> None:
    dice = random.Random(18)
    values: dict[str, Any] = {"shop": lambda: f"é{dice.randrange(5)}", "n": lambda: dice.randrange(40)}
    for _ in range(60):
        found = {}
        for _ in range(dice.randrange(40)):
            row = {"shop": values["shop"](), "n": values["n"](), "v": "x"}
            row["_change_type"] = dice.choice(["delete", "update_postimage"])
            found[tuple(row[name] for name in key)] = row
        rows = list(found.values())
        dice.shuffle(rows)
        boxes = [
            [sorted((values[name](), values[name]())) for name in key] for _ in range(dice.randint(1, 9))
        ]
        files = in_key_order(file(tuple(b[0] for b in box), tuple(b[1] for b in box)) for box in boxes)
        assert files is not None
        counts = net(rows, *key).counts(files)
        keys = [tuple(row[name] for name in key) for row in rows]
        within = [sum(f.range is not None and f.range.meets(KeyRange(k, k)) for k in keys) for f in files]
        assert counts.touched == {i: n for i, n in enumerate(within) if n}
        set_rows = [(k, row) for k, row in zip(keys, rows, strict=True) if row["_change_type"] != "delete"]
        lows = [f.range.low for f in files if f.range is not None]
        slots = [max([0, *(i for i, low in enumerate(lows) if low <= k)]) for k, _ in set_rows]
        assert counts.arriving == {i: slots.count(i) for i in set(slots)}
        places = net(rows, *key)
        starts = places.slots(files)
        arriving = [places.arriving(starts, [i], SCHEMA).to_pylist() for i in range(len(files))]
        assert [len(some) for some in arriving] == [slots.count(i) for i in range(len(files))]
        assert all(
            row in arriving[slot]
            for slot, (_, r) in zip(slots, set_rows, strict=True)
            for row in [{name: r[name] for name in SCHEMA.names}]
        )


def test_dates_and_timestamps_are_found_in_the_ranges_that_the_log_has_as_numbers() -> None:
    day, at = pa.date32(), pa.timestamp("us", "UTC")
    rows = [{"day": datetime.date(1970, 1, 1 + i)} for i in range(5)]
    counts = net(rows, "day", types={"day": day}).counts([file((0,), (1,)), file((3,), (3,))])
    assert (counts.touched, counts.arriving) == ({0: 2, 1: 1}, {0: 3, 1: 2})
    utc = datetime.timezone.utc
    rows = [{"at": datetime.datetime(1970, 1, 1, 0, 0, i, tzinfo=utc)} for i in range(5)]
    counts = net(rows, "at", types={"at": at}).counts(
        [file((0,), (1_000_000,)), file((2_500_000,), (9_000_000,))]
    )
    assert (counts.touched, counts.arriving) == ({0: 2, 1: 2}, {0: 3, 1: 2})


def test_of_a_tenants_many_keys_only_those_within_a_file_are_looked_for_in_it() -> None:
    rows = net([{"shop": "a", "n": n} for n in range(100)], "shop", "n")
    assert rows.keys_near(file(("a", 10), ("a", 12))).keys.to_pylist() == [
        {"shop": "a", "n": n} for n in (10, 11, 12)
    ]


def test_null_keys_and_texts_are_counted() -> None:
    rows = net([{"n": None, "shop": "a"}, {"n": 1, "shop": "a", "_text": [("v", "x")]}], "shop", "n")
    counts = rows.counts([file(("a", 0), ("a", 9))])
    assert (counts.n_keys, counts.n_null_keys, counts.n_texts) == (2, 1, 1)


DAY = datetime.date(2026, 1, 1)
KEYED: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "n": (pa.int64(), lambda i: i - 5),
    "small": (pa.int16(), lambda i: i),
    "shop": (pa.string(), lambda i: f"é{i:05d}"),
    "day": (pa.date32(), lambda i: DAY + datetime.timedelta(days=i)),
    "at": (pa.timestamp("us", "UTC"), lambda i: datetime.datetime.fromtimestamp(i, datetime.timezone.utc)),
}


def near(rows: list[dict[str, Any]], *key: str) -> NearKeys:
    types = {name: type_ for name, (type_, _) in KEYED.items()}
    bounds = [(min(row[name] for row in rows), max(row[name] for row in rows)) for name in key]
    stored = [pa.array(pair, types[name]) for name, pair in zip(key, bounds, strict=True)]
    stored = [
        each if pa.types.is_string(each.type) else each.view(f"int{each.type.bit_width}") for each in stored
    ]
    low, high = (tuple(each[i].as_py() for each in stored) for i in (0, 1))
    return net(rows, *key, types=types).keys_near(file(low, high))


@pytest.mark.parametrize(
    "key", [("n",), ("small",), ("shop",), ("day",), ("at",), ("shop", "n"), ("n", "day")]
)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_rows_with_a_new_version_are_left_out_and_the_others_keep_their_order(
    key: tuple[str, ...], is_sorted: bool
) -> None:
    dice = random.Random(18)
    schema = pa.schema([(name, type_) for name, (type_, _) in KEYED.items()])
    for n_taken in (1, 2, 50, 1_000):
        numbers = dice.sample(range(5_000), 1_000)
        rows = [{name: value(i) for name, (_, value) in KEYED.items()} for i in numbers]
        there = sorted(rows, key=lambda row: row["n"]) if is_sorted else rows
        # Half of the keys are in no row.
        others = [
            {name: value(i) for name, (_, value) in KEYED.items()} for i in set(range(5_000)) - set(numbers)
        ]
        taken = dice.sample(rows, n_taken) + dice.sample(others, n_taken)
        gone = {tuple(row[name] for name in key) for row in taken}
        keys = near(taken, *key)
        for first in range(0, 1_000, 250):  # in chunks, as a file is read
            chunk = pa.Table.from_pylist(there[first : first + 250], schema=schema)
            expected = [r for r in there[first : first + 250] if tuple(r[name] for name in key) not in gone]
            assert keys.without(chunk).to_pylist() == expected
    nothing = pa.Table.from_pylist(there[:9], schema=schema)
    assert (
        net([], *key, types=dict(zip(schema.names, schema.types, strict=True)))
        .keys_near(file((0,) * len(key), (9,) * len(key)) if "shop" not in key else file(("a", 0), ("b", 9)))
        .without(nothing)
        is nothing
    )


@pytest.mark.parametrize(
    "taken", [[0], [9_999], [0, 1, 5_000, 9_999], list(range(0, 10_000, 3)), list(range(10_000))]
)
def test_few_rows_or_many_are_left_out_alike(taken: list[int]) -> None:
    table = pa.table({"shop": ["s"] * 10_000, "n": pa.array(range(10_000), pa.int64())})
    for key in (["n"], ["shop", "n"]):
        keys = near([{"shop": "s", "n": n} for n in taken], *key)
        assert keys.without(table)["n"].to_pylist() == sorted(set(range(10_000)) - set(taken))


def test_a_column_that_a_file_lacks_is_null_and_floats_and_arrays_in_keys_are_not_compared_here() -> None:
    rows = in_schema(pa.table({"n": pa.array([1], pa.int32())}), SCHEMA)
    assert rows.to_pylist() == [{"shop": None, "n": 1, "v": None}]
    types = {"n": pa.int64(), "d": pa.decimal128(9, 2), "f": pa.float32(), "a": pa.list_(pa.int32())}
    assert is_comparable(["n", "d"], types)
    assert not is_comparable(["n", "f"], types) and not is_comparable(["a"], types)


@pytest.mark.parametrize("numbers", [[3, 4, 5, 6], [6, 5, 4, 3], [3, 9, 4, 5], [4]])
def test_new_rows_come_by_key_whatever_order_they_were_committed_in(numbers: list[int]) -> None:
    rows = net([{"shop": "a", "n": n, "v": f"{n}"} for n in [1, *numbers, 50]], "n")
    files = [file((0,), (2,)), file((3,), (9,)), file((40,), (60,))]
    found = rows.arriving(rows.slots(files), [1], SCHEMA)
    assert [row["v"] for row in found.to_pylist()] == [f"{n}" for n in sorted(numbers)]
