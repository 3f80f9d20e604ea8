"""Which files of a base table a refresh replaces: decided from counts, with files that are made up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from xidstream.pipeline.mirror.plan import (
    MOST_GROUPS,
    BaseFile,
    FileGroup,
    KeyRange,
    in_key_order,
    jobs,
    kept_versions,
    n_files_for,
    plan_swap,
    removed,
)

TARGET = 1000


def file(low: int, high: int, size: int = TARGET, n_rows: int = 100) -> BaseFile:
    return BaseFile(f"f{low}", size, n_rows, KeyRange((low,), (high,)))


FILES = [file(0, 99), file(100, 199), file(200, 299), file(300, 399)]


def holds(box: KeyRange, key: tuple[object, ...]) -> bool:
    return box.meets(KeyRange(key, key))


def test_only_the_touched_file_is_replaced_and_its_updates_do_not_make_it_grow() -> None:
    (group,) = plan_swap(FILES, touched={2: 30}, arriving={2: 30}, target_bytes=TARGET)
    assert group == FileGroup((2,), (2,), TARGET)
    assert removed(FILES, [group]) == [FILES[2]]


def test_nothing_touched_and_nothing_new_replaces_nothing() -> None:
    assert plan_swap(FILES, touched={}, arriving={}, target_bytes=TARGET) == []


def test_rows_behind_the_last_full_file_become_a_file_of_their_own() -> None:
    (group,) = plan_swap(FILES, touched={}, arriving={3: 20}, target_bytes=TARGET)
    assert group == FileGroup((), (3,), 200)


def test_rows_behind_a_small_last_file_are_joined_with_it() -> None:
    files = [*FILES, file(400, 419, size=200, n_rows=20)]
    (group,) = plan_swap(files, touched={}, arriving={4: 20}, target_bytes=TARGET)
    assert group == FileGroup((4,), (4,), 400)


def test_many_new_rows_are_cut_into_files_of_the_target_size() -> None:
    (group,) = plan_swap(FILES, touched={}, arriving={3: 1000}, target_bytes=TARGET)
    assert group == FileGroup((), (3,), 10_000, 10)


def test_a_touched_file_that_has_grown_beyond_one_and_a_half_is_cut() -> None:
    files = [file(0, 99, size=1_600, n_rows=160), *FILES[1:]]
    (group,) = plan_swap(files, touched={0: 1}, arriving={0: 1}, target_bytes=TARGET)
    assert (group.files, group.n_files) == ((0,), 2)
    (group,) = plan_swap([file(0, 99, size=1_499), *FILES[1:]], {0: 1}, {0: 1}, TARGET)
    assert group.n_files == 1


def test_a_file_of_narrow_rows_is_cut_by_its_rows() -> None:
    files = [
        file(0, 99, size=20_000_000, n_rows=2_000_000),
        file(100, 199, size=10_000_000, n_rows=1_000_000),
    ]
    first, second = plan_swap(files, {0: 1, 1: 1}, {0: 1, 1: 1}, target_bytes=32 << 20)
    assert (first.files, first.n_files) == ((0,), 2)
    assert (second.files, second.n_files) == ((1,), 1)


def test_small_neighbours_of_a_touched_file_are_joined_with_it_and_far_ones_are_kept() -> None:
    files = [file(0, 99, size=300), file(100, 199, size=300), file(200, 299), file(300, 399, size=300)]
    (group,) = plan_swap(files, touched={0: 1}, arriving={0: 1}, target_bytes=TARGET)
    assert group.files == (0, 1)


def test_a_file_whose_rows_are_all_gone_is_replaced_by_what_comes() -> None:
    (group,) = plan_swap(FILES, touched={1: 100}, arriving={}, target_bytes=TARGET)
    assert group.files == (1,)


def test_every_new_row_has_one_place_and_every_touched_file_is_replaced_once() -> None:
    dice = random.Random(18)
    for _ in range(300):
        n = dice.randint(1, 30)
        files = [file(100 * i, 100 * i + 99, size=dice.choice([100, 400, 900, 1_700])) for i in range(n)]
        touched = {i: dice.randint(1, 50) for i in range(n) if dice.random() < 0.4}
        arriving = {i: dice.randint(1, 300) for i in range(n) if i in touched or dice.random() < 0.2}
        groups = plan_swap(files, touched, arriving, TARGET)
        slots = Counter(slot for group in groups for slot in group.slots)
        assert set(arriving) <= set(slots) and max(slots.values(), default=1) == 1
        replaced = Counter(i for group in groups for i in group.files)
        assert set(touched) <= set(replaced) and max(replaced.values(), default=1) == 1
        assert all(list(group.files) == sorted(group.files) for group in groups)
        assert all(group.n_files == n_files_for(group.bytes, TARGET) for group in groups)


def test_files_are_ordered_by_their_lowest_key_and_one_without_a_range_leaves_no_order() -> None:
    assert in_key_order(reversed(FILES)) == FILES
    assert in_key_order([*FILES, BaseFile("x", 1, 1, None)]) is None
    assert in_key_order([]) == []


def test_a_key_of_two_columns_is_within_a_file_if_each_column_is() -> None:
    box = KeyRange((1, "a"), (3, "m"))
    assert holds(box, (2, "b")) and holds(box, (3, "m"))
    assert not holds(box, (2, "z")) and not holds(box, (0, "b"))


@pytest.mark.parametrize(("n_bytes", "n_files"), [(0, 1), (1_500, 1), (1_501, 2), (2_000, 2), (10_001, 11)])
def test_a_table_is_cut_into_files_of_about_the_target(n_bytes: int, n_files: int) -> None:
    assert n_files_for(n_bytes, TARGET) == n_files


def test_a_job_has_no_more_branches_than_a_plan_should_have() -> None:
    groups = [FileGroup((i,), (i,), 1) for i in range(2 * MOST_GROUPS + 1)]
    assert [len(job) for job in jobs(groups)] == [MOST_GROUPS, MOST_GROUPS, 1]


def test_the_present_version_stays_whether_the_manifest_names_it_or_not() -> None:
    assert kept_versions([3, 5], 7) == [3, 5, 7]
    assert kept_versions([], 7) == [7]
