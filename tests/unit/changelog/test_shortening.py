"""How far a log may be cut: the example of the module, and random logs against a model that looks at every LSN."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_table import MAX_LSN, LogFile
from xidstream.pipeline.changelog.shortening import (
    Start,
    Stretch,
    cut_for,
    fold_for,
    lsn_for_bytes,
    oldest_state,
    removable,
    stretches_of,
    with_fold,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.bounds import SnapshotBounds


def generation(
    number: int, valid_from: int, contained_upto: int, until: int | None = None
) -> TableGeneration:
    bounds = SnapshotBounds(Lsn(valid_from - 1), Lsn(valid_from), 700, 710, (705,), 0, Lsn(contained_upto))
    ended, last = (None, None) if until is None else ("it was altered", Lsn(until))
    return TableGeneration("public.t", 1, number, bounds, ("id",), ended, last)


EXAMPLE = stretches_of([generation(1, 100, 90), generation(2, 500, 480)], [(99, 300)])


def test_the_example_of_the_module() -> None:
    assert [
        Stretch(100, 499, 99, (Start(100, 90), Start(300, 300))),
        Stretch(500, math.inf, 499, (Start(500, 480),)),
    ] == EXAMPLE
    cuts = {wanted: cut_for(wanted, EXAMPLE) for wanted in (200, 400, 600)}
    assert cuts == {200: 90, 400: 300, 600: 480}
    assert [oldest_state(EXAMPLE, cut) for cut in cuts.values()] == [100, 300, 500]


def test_a_log_whose_only_start_is_a_snapshot_that_may_lack_old_transactions_is_not_cut() -> None:
    assert cut_for(10_000, stretches_of([generation(1, 100, 0)], [])) == 0
    assert cut_for(10_000, stretches_of([generation(1, 100, 0)], [(99, 9_000)])) == 9_000


def test_a_table_without_a_snapshot_has_changes_alone_and_is_cut_where_it_is_asked_for() -> None:
    assert cut_for(10_000, []) == 10_000


def test_nothing_is_cut_that_somebody_else_needs() -> None:
    assert cut_for(600, EXAMPLE, [350, 470]) == 350
    assert cut_for(600, EXAMPLE, [0]) == 0


def test_a_generation_that_ended_before_what_is_wanted_holds_nothing_back() -> None:
    stretches = stretches_of([generation(1, 100, 90, until=150), generation(2, 500, 480)], [])
    assert cut_for(140, stretches) == 90
    assert cut_for(151, stretches) == 151, (
        "no state is known there, and the next one needs what lies behind 480"
    )


def test_files_that_straddle_the_cut_or_are_not_known_or_have_a_usable_snapshot_stay() -> None:
    whole, straddling = LogFile("whole", 1, 10, 300), LogFile("straddling", 1, 290, 301)
    first, unknown = LogFile("snapshot", 1, 99, 99), LogFile("unknown", 1, 0, MAX_LSN)
    second = LogFile("snapshot 2", 1, 499, 499)
    files = [whole, straddling, first, unknown, second]
    assert removable(files, EXAMPLE, 300) == [whole, first]
    assert removable(files, EXAMPLE, 90) == []
    # The place of a snapshot may lie below what it needs.
    needs_more = [Stretch(500, math.inf, 450, (Start(500, 480),))]
    assert removable([LogFile("s", 1, 450, 450), LogFile("c", 1, 440, 449)], needs_more, 480) == [
        LogFile("c", 1, 440, 449)
    ]


def test_a_size_asks_for_the_oldest_files_that_are_too_much() -> None:
    files = [LogFile("a", 40, 1, 10), LogFile("b", 40, 11, 20), LogFile("c", 40, 21, 30)]
    assert [lsn_for_bytes(files, n) for n in (120, 119, 80, 79, 0)] == [0, 10, 10, 20, 30]


def test_a_fold_waits_until_the_changes_that_go_for_it_have_as_many_bytes_as_the_rows_it_is_made_from() -> (
    None
):
    stretches = stretches_of([generation(1, 100, 0)], [])
    snapshot = LogFile("s", 50, 99, 99)
    changes = [LogFile(str(lsn), 10, lsn, lsn + 9) for lsn in range(110, 200, 10)]
    assert fold_for([snapshot, *changes], stretches, 0, 158) is None, "40 bytes would go for 50"
    found = fold_for([snapshot, *changes], stretches, 0, 166)
    assert found == (stretches[0], 165)
    # The next one is made from the rows of the first.
    folded = [with_fold(stretches[0], 165)]
    rest = [LogFile("f", 50, 165, 165), *changes[5:]]
    assert fold_for(rest, folded, 165, 190) is None and fold_for(rest, folded, 165, 200) is None
    more = [*rest, LogFile("more", 10, 200, 205)]
    assert fold_for(more, folded, 165, 206) == (folded[0], 205)


def test_no_fold_is_made_where_it_would_free_nothing_more() -> None:
    changes = [LogFile(str(lsn), 10, lsn, lsn + 9) for lsn in range(110, 700, 10)]
    assert fold_for(changes, EXAMPLE, 480, 481) is None
    assert fold_for(changes, [], 0, 600) is None, "a table without a snapshot has changes alone"
    ended = stretches_of([generation(1, 100, 90, until=150)], [])
    assert fold_for(changes, ended, 90, 200) is None
    later = stretches_of([generation(1, 100, 90), generation(2, 500, 0)], [])
    assert fold_for(changes, later, 0, 400) is None, "the later generation needs the changes"
    assert fold_for(changes, later, 0, 600) == (later[1], 597)


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Stretch], list[int]]:
    """The stretches of a table with LSNs below 60, and the commits that have rows of it."""
    generations, at, snapshot_lsns = [], 2, []
    for number in range(draw(st.integers(0, 3))):
        at += draw(st.integers(2, 15))
        at += at % 8 in (5, 6)  # a place is none of a fold's
        needs = draw(st.integers(0, at))
        until = draw(st.one_of(st.none(), st.integers(0, 60)))
        generations.append(generation(number, at, needs, until))
        snapshot_lsns.append(at - 1)
    bases = (
        draw(st.lists(st.tuples(st.sampled_from(snapshot_lsns), st.integers(1, 60)), max_size=4))
        if snapshot_lsns
        else []
    )
    commits = draw(
        st.lists(
            st.integers(1, 60).filter(lambda n: n not in snapshot_lsns and n % 8 != 5),
            unique=True,
            max_size=25,
        )
    )
    return stretches_of(generations, bases), sorted(commits)


def readable(
    stretches: list[Stretch],
    changes: set[int],
    there: set[int],
    lsn: int,
    folds: frozenset[int] = frozenset(),
) -> bool:
    """By the definition alone: some start at or below ``lsn`` has its rows and all changes that it needs."""
    for stretch in stretches:
        if stretch.first <= lsn <= stretch.last:
            for i, start in enumerate(stretch.starts):
                is_there = i > 0 or stretch.snapshot_lsn in there
                if start.needs in folds:
                    is_there = start.needs in there
                needed = {n for n in changes if start.needs < n <= lsn}
                if start.answers_from <= lsn and is_there and needed <= there:
                    return True
    return False


@settings(max_examples=400, deadline=None)
@given(
    logs(),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), max_size=2),
    st.data(),
)
def test_cuts_one_after_the_other_keep_every_state_and_change_that_was_promised(
    log: tuple[list[Stretch], list[int]], wanted: list[int], needed: list[int], data: st.DataObject
) -> None:
    stretches, commits = log
    changes = set(commits)
    # Files with neighbouring commits, and a file for each snapshot.
    files: list[tuple[LogFile, set[int]]] = []
    rest = commits
    while rest:
        n = data.draw(st.integers(1, 4))
        part, rest = rest[:n], rest[n:]
        files.append((LogFile(str(part[0]), 1, part[0], part[-1]), set(part)))
    files += [
        (LogFile(f"s{s.snapshot_lsn}", 1, s.snapshot_lsn, s.snapshot_lsn), {s.snapshot_lsn})
        for s in stretches
    ]
    everything = {lsn for _, rows in files for lsn in rows}
    told, fold = 0, 0
    folds: frozenset[int] = frozenset()
    for asked in wanted:
        cut = cut_for(asked, stretches, needed)
        listed = [file for file, _ in files]
        found = fold_for(listed, stretches, max(cut, told), min([asked, *needed]))
        if found is not None and readable(
            stretches, changes, {n for _, rows in files for n in rows}, found[1], folds
        ):
            stretch, cut = found
            stretches = [with_fold(each, cut) if each is stretch else each for each in stretches]
            folds |= {cut}
        if cut <= told:
            continue
        gone = {file.path for file in removable(listed, stretches, cut, fold)}
        if not gone:
            continue
        files = [(file, rows) for file, rows in files if file.path not in gone]
        if cut in folds:
            files.append((LogFile(f"f{cut}", 1, cut, cut), {cut}))
            fold = cut
        told = cut
        there = {lsn for _, rows in files for lsn in rows}
        for lsn in range(asked, 61):
            before = readable(stretches, changes, everything, lsn)
            after = readable(stretches, changes, there, lsn, folds)
            assert after >= before, f"state at {lsn}"
        assert {n for n in changes if n > min([asked, *needed])} <= there
        assert {n for n in changes if n > cut} <= there
    # What the log says of itself is true: each start that it calls usable answers.
    there = {lsn for _, rows in files for lsn in rows}
    for stretch in stretches:
        for start in stretch.starts:
            if start.is_usable(told) and not (start.needs in folds and start.needs != fold):
                assert readable(stretches, changes, there, start.answers_from, folds)
    oldest = oldest_state(stretches, told)
    if oldest is not None:
        assert readable(stretches, changes, there, oldest, folds)
