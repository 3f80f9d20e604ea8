"""Net rows in memory: their files and slots, held against the definitions, and the rows they take away."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.net_rows import NetRows, in_schema, is_comparable, without
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
    assert rows.keys_near(file(("a", 10), ("a", 12))).to_pylist() == [
        {"shop": "a", "n": n} for n in (10, 11, 12)
    ]


def test_null_keys_and_texts_are_counted() -> None:
    rows = net([{"n": None, "shop": "a"}, {"n": 1, "shop": "a", "_text": [("v", "x")]}], "shop", "n")
    counts = rows.counts([file(("a", 0), ("a", 9))])
    assert (counts.n_keys, counts.n_null_keys, counts.n_texts) == (2, 1, 1)


@pytest.mark.parametrize("key", [("n",), ("shop", "n")])
def test_rows_with_a_new_version_are_left_out_and_the_others_keep_their_order(key: tuple[str, ...]) -> None:
    rows = [{"shop": shop, "n": n, "v": f"{shop}{n}"} for n in (3, 1, 2) for shop in "ba"]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    taken = table.filter(pa.array([False, True, True, True, False, False]))
    found = without(table, taken.select(list(key)))
    gone = {tuple(row[name] for name in key) for row in taken.to_pylist()}
    assert found.to_pylist() == [row for row in rows if tuple(row[name] for name in key) not in gone]
    assert without(table, table.slice(0, 0).select(list(key))) is table


@pytest.mark.parametrize(
    "taken", [[], [0], [9_999], [0, 1, 5_000, 9_999], list(range(0, 10_000, 3)), list(range(10_000))]
)
def test_few_rows_or_many_are_left_out_alike(taken: list[int]) -> None:
    table = pa.table({"shop": ["s"] * 10_000, "n": pa.array(range(10_000), pa.int64())})
    for key in (["n"], ["shop", "n"]):
        found = without(table, table.select(key).take(pa.array(taken, pa.int64())))
        assert found["n"].to_pylist() == sorted(set(range(10_000)) - set(taken))


def test_a_column_that_a_file_lacks_is_null_and_floats_and_arrays_in_keys_are_not_compared_here() -> None:
    rows = in_schema(pa.table({"n": pa.array([1], pa.int32())}), SCHEMA)
    assert rows.to_pylist() == [{"shop": None, "n": 1, "v": None}]
    types = {"n": pa.int64(), "d": pa.decimal128(9, 2), "f": pa.float32(), "a": pa.list_(pa.int32())}
    assert is_comparable(["n", "d"], types)
    assert not is_comparable(["n", "f"], types) and not is_comparable(["a"], types)
