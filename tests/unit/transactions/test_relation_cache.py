"""The pool's account of what a buffer remembers, beside the buffer's own."""

from __future__ import annotations

import pickle
import random

import pytest

from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.transactions.relation_cache import RelationCache


def version(number: int) -> RelationVersion:
    columns = tuple(Column(f"c{i}", 23, -1, i == 0) for i in range(1 + number % 7))
    return RelationVersion(1000 + number, "public", f"t{number}", ReplicaIdentity.DEFAULT, columns)


@pytest.mark.parametrize("limit", [0, 50, 200, 1 << 20])
def test_a_buffer_has_each_version_that_a_call_needs_whatever_was_forgotten(limit: int) -> None:
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    pool, buffer = RelationCache(limit), RelationCache(limit)
    n_told = n_used = 0
    for _ in range(2_000):
        blocks = [chosen.sample(range(40), chosen.randrange(4)) for _ in range(chosen.randrange(1, 4))]
        numbers = [number for block in blocks for number in block]
        new_versions = pool.exchange(numbers, {number: version(number) for number in numbers})
        n_told, n_used = n_told + len(new_versions), n_used + len(set(numbers))
        assert (
            buffer.exchange(numbers, pickle.loads(pickle.dumps(new_versions))).keys() == new_versions.keys()
        ), seed
        for block in blocks:
            assert buffer.relations(block) == {1000 + n: version(n) for n in block}, f"seed {seed}"
    if limit == 1 << 20:
        assert n_told == 40, "each once"
    else:
        assert 40 < n_told < n_used or limit == 0


def test_ten_thousand_tables_in_one_call_are_all_there_for_it_and_not_kept_beyond_the_limit() -> None:
    pool, buffer = RelationCache(), RelationCache()
    versions = {n: version(n) for n in range(10_000)}
    new_versions = pool.exchange(versions, versions)
    buffer.exchange(versions, new_versions)
    assert len(new_versions) == len(buffer.relations(versions)) == 10_000
    for known in (pool, buffer):
        known.exchange([10_000], {10_000: version(10_000)})
        assert known._versions.weight <= (16 << 10) + version(10_000).weight
    assert pool.exchange([0, 9_999], versions).keys() == {0}, (
        "the one used longest ago is told again, the last one not"
    )


def test_a_call_that_was_lost_is_noticed_by_the_first_that_builds_on_it() -> None:
    pool, buffer = RelationCache(), RelationCache()
    pool.exchange([1], {1: version(1)})  # lost on its way
    new_versions = pool.exchange([1, 2], {1: version(1), 2: version(2)})
    with pytest.raises(ComponentLost, match="version 1 of a relation"):
        buffer.exchange([1, 2], new_versions)
