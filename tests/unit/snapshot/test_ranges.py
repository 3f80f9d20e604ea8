"""The plan of a table's ranges: each page once, even ranges, the last one open."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from xidstream.pipeline.snapshot import tables
from xidstream.pipeline.snapshot.tables import CtidRange, Leaf, plan_ranges

PAGE = 8192


def leaf(relid: int, n_pages: int, n_bytes: int | None = None) -> Leaf:
    return Leaf(relid, "public", f"t{relid}", n_pages, n_pages * PAGE if n_bytes is None else n_bytes)


def of_leaf(ranges: tuple[CtidRange, ...], relid: int) -> list[CtidRange]:
    return [each for each in ranges if each.leaf.relid == relid]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1 << 26)), min_size=1, max_size=6),
    range_bytes=st.integers(PAGE, 1 << 24),
    n_readers=st.integers(1, 5),
)
def test_each_page_of_each_leaf_is_in_one_range(
    sizes: list[tuple[int, int]], range_bytes: int, n_readers: int
) -> None:
    leaves = [leaf(i, n_pages, n_pages * PAGE + toast) for i, (n_pages, toast) in enumerate(sizes)]
    ranges = plan_ranges(leaves, by_range=True, range_bytes=range_bytes, n_readers=n_readers)
    assert [each.number for each in ranges] == list(range(len(ranges)))
    for each in leaves:
        own = of_leaf(ranges, each.relid)
        assert own[0].first_page == 0 and own[-1].end_page is None
        assert [r.end_page for r in own[:-1]] == [r.first_page for r in own[1:]]
        lengths = [b.first_page - a.first_page for a, b in itertools.pairwise(own)]
        lengths.append(each.n_pages - own[-1].first_page)
        assert max(lengths) - min(lengths) <= 1
        assert all(r.n_bytes <= range_bytes + each.n_bytes // max(each.n_pages, 1) * 2 for r in own)


def test_readers_share_the_ranges_of_a_large_leaf_evenly() -> None:
    def n_ranges(n_mib: int, n_readers: int) -> int:
        large = leaf(1, n_mib << 7)
        return len(plan_ranges([large], by_range=True, range_bytes=1 << 20, n_readers=n_readers))

    assert [n_ranges(11, readers) for readers in (1, 2, 4)] == [11, 12, 12]
    assert [n_ranges(n_mib, 4) for n_mib in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 8], (
        "small ones are cut as before"
    )


def test_an_empty_table_has_one_range_because_it_may_have_grown() -> None:
    (only,) = plan_ranges([leaf(1, 0)], by_range=True)
    assert (only.first_page, only.end_page, only.n_bytes) == (0, None, 0)


def test_a_server_that_cannot_scan_ranges_gets_whole_leaves() -> None:
    ranges = plan_ranges([leaf(1, 100_000), leaf(2, 5)], by_range=False)
    assert [(each.first_page, each.end_page) for each in ranges] == [(0, None), (0, None)]


def test_toast_counts_so_a_few_pages_with_large_values_are_shared_too() -> None:
    assert len(plan_ranges([leaf(1, 8, 8 * tables.RANGE_BYTES)], by_range=True)) == 8


def test_a_giant_table_has_no_more_ranges_than_a_plan_may_have() -> None:
    giant = leaf(1, 1 << 32, 64 << 40)
    ranges = plan_ranges([giant], by_range=True, range_bytes=1 << 20)
    assert tables.MOST_RANGES - 2 <= len(ranges) <= tables.MOST_RANGES
