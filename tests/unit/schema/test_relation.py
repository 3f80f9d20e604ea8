"""A relation version as a value: what travels, what is shared, and what is a key."""

from __future__ import annotations

import pickle
import random

from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, WeightedLru


def version(relid: int, table: str, columns: tuple[Column, ...]) -> RelationVersion:
    return RelationVersion(relid, "public", table, ReplicaIdentity.DEFAULT, columns)


def columns(n: int, prefix: str = "c") -> tuple[Column, ...]:
    return tuple(Column(f"{prefix}{i}", 1700, 655366, i == 0, None) for i in range(n))


def test_what_was_pickled_is_equal_and_shares_its_columns_with_its_equals() -> None:
    partitions = [version(n, f"p{n}", columns(5)) for n in range(50)]
    for partition in partitions:
        _ = partition.arrow_fields
    again = [*pickle.loads(pickle.dumps(partitions)), pickle.loads(pickle.dumps(partitions[0]))]
    assert again == [*partitions, partitions[0]]
    assert len({id(partition.columns) for partition in again}) == 1
    assert again[7].arrow_fields == partitions[7].arrow_fields


def test_a_pickle_holds_what_the_server_said_and_no_arrow_types() -> None:
    made = version(1, "t", columns(30))
    before = pickle.dumps(made)
    _ = made.arrow_fields
    assert pickle.dumps(made) == before
    assert b"pyarrow" not in before
    partitions = [version(n, f"p{n}", made.columns) for n in range(1_000)]
    assert len(pickle.dumps(partitions)) < 1_000 * 60


def test_versions_that_differ_in_one_column_are_different_keys() -> None:
    wide = columns(100)
    other = (*wide[:50], Column("other", 23, -1, False), *wide[51:])
    keys = {version(1, "t", wide): "first", version(1, "t", other): "second"}
    assert keys[version(1, "t", columns(100))] == "first" and len(keys) == 2


def test_two_that_remember_forget_the_same_whatever_is_used() -> None:
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    both: list[WeightedLru[int, str]] = [WeightedLru(100), WeightedLru(100)]
    for _ in range(2_000):
        keys = [chosen.randrange(60) for _ in range(chosen.randrange(1, 8))]
        for remembered in both:
            remembered.shrink()
            assert remembered.weight <= 100
            for key in keys:
                if remembered.use(key) is None:
                    remembered.add(key, str(key), 1 + key)
            assert all(remembered[key] == str(key) for key in keys), "nothing goes within a call"
        assert list(both[0]._values) == list(both[1]._values), f"seed {seed}"


def test_what_was_used_last_is_kept_and_one_too_heavy_for_the_limit_goes_at_the_next_call() -> None:
    remembered: WeightedLru[str, int] = WeightedLru(10)
    for key in "abc":
        remembered.add(key, 0, 4)
    assert remembered.use("a") == 0
    remembered.shrink()
    assert "a" in remembered and "c" in remembered and "b" not in remembered
    remembered.add("heavy", 1, 100)
    assert remembered["heavy"] == 1
    remembered.shrink()
    assert len(remembered) == 0 and remembered.weight == 0
