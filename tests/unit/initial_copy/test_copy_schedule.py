"""What ``CopySchedule`` does next, without a server: tables are held, read in ranges, committed once, and taken
anew."""

from __future__ import annotations

import dataclasses
import random

import pytest

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.initial_copy.copy_schedule import (
    MOST_TOGETHER,
    SMALL_BYTES,
    Action,
    Carried,
    Carry,
    CommitSnapshot,
    CopySchedule,
    Dropped,
    Failed,
    Hold,
    LeftOut,
    RangeRead,
    Read,
    ReaderLost,
    Release,
    Retry,
    Several,
    SnapshotCommitted,
    TableHeld,
    TableState,
    Together,
    Wanted,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.key_filter import Repair, bound, parse_key_filter
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource, plan_ranges

MIB = 1 << 20
REPAIR = Repair(parse_key_filter("id < 7"), number=3)
BOUNDS = SnapshotBounds(Lsn(99), Lsn(120), 700, 710, (705,), 0)


def _source(relid: int, n_mib: int = 1) -> PublishedSource:
    relation = RelationVersion(
        relid, "public", f"t{relid}", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),)
    )
    leaf = Leaf(relid, "public", f"t{relid}", n_mib * 128, n_mib * MIB)
    return PublishedSource(relation, f"table:{relid}", None, (leaf,))


def _held(hold: Hold) -> TableHeld:
    source = hold.source
    ranges = plan_ranges(source.leaves, by_range=True, range_bytes=MIB)
    return TableHeld(source.relation.relid, hold.attempt, source, f"snapshot-{hold.attempt}", BOUNDS, ranges)


def _read(read: Read) -> RangeRead:
    relid, number = read.task.source.relation.relid, read.task.range.number
    return RangeRead(relid, read.attempt, number, (f"{relid}/{read.attempt}/{number}",), 10)


def _only(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def _taken(course: CopySchedule, source: PublishedSource) -> tuple[Hold, list[Action]]:
    (hold,) = _only(course.handle(Wanted(source, wait_for_writers=False)), Hold)
    assert isinstance(hold, Hold)
    return hold, course.handle(_held(hold))


def test_a_table_is_committed_once_when_all_its_ranges_are_read() -> None:
    course = CopySchedule(2)
    _, actions = _taken(course, _source(1, n_mib=5))
    commits: list[CommitSnapshot] = []
    while reads := _only(actions, Read):
        assert len(reads) <= 2
        actions = [action for read in reads for action in course.handle(_read(read))]  # type: ignore[arg-type]
        commits += _only(actions, CommitSnapshot)  # type: ignore[arg-type]
    (commit,) = commits
    assert len(commit.files) == 5 and commit.n_rows == 50 and commit.bounds == BOUNDS
    assert course.handle(SnapshotCommitted(1, commit.attempt)) == [], "it was let go of before"
    assert not course.tables


def test_a_lost_reader_costs_its_range_alone() -> None:
    course = CopySchedule(1)
    hold, (first,) = _taken(course, _source(1, n_mib=3))
    assert isinstance(first, Read)
    (second,) = course.handle(_read(first))
    assert isinstance(second, Read)
    (again,) = course.handle(ReaderLost(1, hold.attempt, second.task.range.number))
    assert isinstance(again, Read) and again.task == second.task and again.attempt == first.attempt
    assert course.tables[1].n_ranges_again == 1


def test_a_failed_table_is_taken_from_its_beginning_when_it_has_rested() -> None:
    course = CopySchedule(1)
    hold, (read,) = _taken(course, _source(1, n_mib=2))
    assert isinstance(read, Read)
    assert course.handle(Failed(1, hold.attempt)) == [Release(1, discarded=hold.attempt)]
    assert course.tables[1].state is TableState.RESTING
    assert course.handle(_read(read)) == [], "a reader's late report counts for nothing"
    (again,) = course.handle(Retry(1))
    assert isinstance(again, Hold) and again.attempt > hold.attempt
    assert course.handle(_read(read)) == []
    actions = course.handle(_held(again))
    assert [action.task.snapshot_name for action in actions if isinstance(action, Read)] == [
        f"snapshot-{again.attempt}"
    ]


def test_a_table_that_changed_before_its_lock_is_held_next_as_it_is_then() -> None:
    course = CopySchedule(1)
    (hold,) = course.handle(Wanted(_source(1), wait_for_writers=False))
    assert isinstance(hold, Hold)
    course.handle(Failed(1, hold.attempt))
    changed = _source(1, n_mib=7)
    assert course.handle(Wanted(changed, wait_for_writers=True)) == []
    (again,) = course.handle(Retry(1))
    assert isinstance(again, Hold) and again.source is changed and again.wait_for_writers
    course.handle(Wanted(_source(1), wait_for_writers=False))
    assert course.tables[1].source is changed, "what is being held stays what it is"


def test_a_dropped_table_is_released_and_forgotten() -> None:
    course = CopySchedule(1)
    hold, (read,) = _taken(course, _source(1, n_mib=2))
    assert isinstance(read, Read)
    assert course.handle(Dropped(1)) == [Release(1, discarded=hold.attempt)]
    assert course.handle(_read(read)) == [] and not course.tables


def test_of_a_dropped_table_that_is_being_committed_no_file_is_removed() -> None:
    course = CopySchedule(2)
    _, reads = _taken(course, _source(1, n_mib=2))
    for read in reads:
        assert isinstance(read, Read)
        actions = course.handle(_read(read))
    assert len(_only(actions, CommitSnapshot)) == 1
    assert course.handle(Dropped(1)) == [Release(1)]


def test_small_tables_come_first_and_those_that_wait_for_writers_last() -> None:
    course = CopySchedule(1)
    order: list[int] = []
    holds = _only(course.handle(Wanted(_source(9, n_mib=1), wait_for_writers=True)), Hold)
    for relid, n_mib in ((3, 30), (1, 10), (2, 20)):
        assert course.handle(Wanted(_source(relid, n_mib), wait_for_writers=False)) == []
    while holds:
        (hold,) = holds
        assert isinstance(hold, Hold)
        order.append(hold.source.relation.relid)
        holds = _only(course.handle(Dropped(order[-1])), Hold)
    assert order == [9, 1, 2, 3], "the first one was alone; of the others the smallest comes first"


def test_a_partitioned_table_without_partitions_is_committed_without_files() -> None:
    course = CopySchedule(1)
    source = PublishedSource(_source(1).relation, "table:1", None, ())
    _, (commit,) = _taken(course, source)
    assert isinstance(commit, CommitSnapshot) and commit.files == ()


def test_an_illegal_report_raises_and_changes_nothing() -> None:
    course = CopySchedule(1)
    hold, _ = _taken(course, _source(1))
    with pytest.raises(UsageError, match=r"public\.t1: it is reading.*holding was expected"):
        course.handle(_held(hold))
    with pytest.raises(UsageError, match="committing was expected"):
        course.handle(SnapshotCommitted(1, hold.attempt))
    assert course.tables[1].state is TableState.READING


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_losses_commits_each_table_once_with_each_range_once(seed: int) -> None:
    """Seeds are the parameters: a failing one is in the test's name."""
    dice = random.Random(seed)
    n_readers = dice.randint(1, 5)
    course = CopySchedule(n_readers)
    sources = [_source(relid, dice.randint(0, 6)) for relid in range(1, 12)]
    sources += [_small(relid) for relid in range(12, 12 + dice.randint(0, 60))]
    pending = course.handle(Several(tuple(Wanted(source, dice.random() < 0.3) for source in sources)))
    committed: dict[int, tuple[str, ...]] = {}
    steps = 0
    while course.tables:
        steps += 1
        assert steps < 5_000, "it does not come to an end"
        resting = [table.relid for table in course.tables.values() if table.state is TableState.RESTING]
        if not pending:
            pending += course.handle(Retry(dice.choice(resting)))
            continue
        assert sum(isinstance(action, Read) for action in pending) <= n_readers + steps
        action = pending.pop(dice.randrange(len(pending)))
        in_hand = [table for table in course.tables.values() if table.attempt]
        assert len({(table.group, table.group or table.relid) for table in in_hand}) <= n_readers
        busy = {(table.group, number) for table in in_hand for number in table.reading if table.group}
        assert len(busy) + sum(len(table.reading) for table in in_hand if not table.group) <= n_readers
        if isinstance(action, Together):
            pending += course.handle(_of_several(action, dice, committed))
            continue
        if isinstance(action, Hold):
            relid = action.source.relation.relid
            event = _held(action) if dice.random() < 0.8 else Failed(relid, action.attempt)
        elif isinstance(action, Read):
            relid, number = action.task.source.relation.relid, action.task.range.number
            roll = dice.random()
            event = _read(action) if roll < 0.8 else ReaderLost(relid, action.attempt, number)
            if roll > 0.97:
                event = Failed(relid, action.attempt)
        elif isinstance(action, CommitSnapshot):
            relid = action.source.relation.relid
            if dice.random() < 0.2:
                event = Failed(relid, action.attempt)
            else:
                assert relid not in committed
                committed[relid] = action.files
                event = SnapshotCommitted(relid, action.attempt)
        else:
            continue
        pending += course.handle(event)
    assert set(committed) == {source.relation.relid for source in sources}
    for source in sources:
        files = committed[source.relation.relid]
        assert (
            len(set(files)) == len(files) == len(plan_ranges(source.leaves, by_range=True, range_bytes=MIB))
        )
        assert len({file.split("/")[1] for file in files}) == 1, "the files of one attempt alone"


def _of_several(together: Together, dice: random.Random, committed: dict[int, tuple[str, ...]]) -> Several:
    """What becomes of them: something of each of its own, or the same of all."""
    of_all = dice.random() if dice.random() < 0.3 else None
    events = []
    for action in together.actions:
        roll = dice.random() if of_all is None else of_all
        if isinstance(action, Hold):
            relid = action.source.relation.relid
            events.append(_held(action) if roll < 0.8 else LeftOut(relid, action.attempt))
        elif isinstance(action, Read):
            relid, number = action.task.source.relation.relid, action.task.range.number
            lost = ReaderLost if roll < 0.9 else Failed
            failure = lost(relid, action.attempt, *([number] if lost is ReaderLost else []))
            events.append(_read(action) if roll < 0.8 else failure)
        elif roll < 0.2:
            events.append(Failed(action.source.relation.relid, action.attempt))
        else:
            relid = action.source.relation.relid
            assert relid not in committed
            committed[relid] = action.files
            events.append(SnapshotCommitted(relid, action.attempt))
    return Several(tuple(events))


def _small(relid: int, n_bytes: int = 16 << 10) -> PublishedSource:
    source = _source(relid)
    return dataclasses.replace(
        source, leaves=(dataclasses.replace(source.leaves[0], n_pages=2, n_bytes=n_bytes),)
    )


def _group(course: CopySchedule, *sources: PublishedSource, waits: bool = False) -> tuple[Hold, ...]:
    """The one group that is held when these are wanted."""
    (hold,) = course.handle(Several(tuple(Wanted(source, waits) for source in sources)))
    assert isinstance(hold, Together) and all(isinstance(each, Hold) for each in hold.actions)
    return hold.actions  # type: ignore[return-value]


def _relids(actions: object) -> list[int]:
    assert isinstance(actions, Together)
    return [
        (each.task.source if isinstance(each, Read) else each.source).relation.relid
        for each in actions.actions
    ]


def _reading(course: CopySchedule, holds: tuple[Hold, ...]) -> tuple[Read, ...]:
    reads = course.handle(Several(tuple(map(_held, holds))))[0]
    assert isinstance(reads, Together) and _relids(reads) == [each.source.relation.relid for each in holds]
    return reads.actions  # type: ignore[return-value]


def test_small_tables_are_held_read_and_committed_together_by_one_reader() -> None:
    course = CopySchedule(1)
    holds = _group(course, *map(_small, range(1, 4)))
    reads = _reading(course, holds)
    (commit,) = course.handle(Several(tuple(map(_read, reads))))
    assert isinstance(commit, Together) and _relids(commit) == [1, 2, 3]
    assert course.handle(Wanted(_small(4), False)) == [], "a group takes a place until all of it is committed"
    for relid in (1, 2):
        assert course.handle(SnapshotCommitted(relid, holds[relid - 1].attempt)) == []
    (after,) = course.handle(SnapshotCommitted(3, holds[2].attempt))
    assert isinstance(after, Hold) and after.source == _small(4)


def test_a_group_is_small_in_tables_and_in_bytes_and_within_a_second_of_a_limited_rate() -> None:
    course = CopySchedule(1)
    assert len(_group(course, *map(_small, range(1, 40)))) == MOST_TOGETHER
    assert SMALL_BYTES * MOST_TOGETHER <= 8 << 20
    for n_bytes, n_together in ((SMALL_BYTES, 2), (SMALL_BYTES + 1, 1)):
        actions = CopySchedule(1).handle(
            Several((Wanted(_small(1, n_bytes), False), Wanted(_small(2, n_bytes), False)))
        )
        assert len(_relids(actions[0]) if isinstance(actions[0], Together) else actions) == n_together
    limited = CopySchedule(2, bytes_per_s=6 * (16 << 10))
    found = limited.handle(Several(tuple(Wanted(_small(relid), False) for relid in range(1, 40))))
    assert [len(_relids(each)) for each in found] == [3, 3]


def test_where_few_small_tables_are_wanted_the_readers_share_them() -> None:
    course = CopySchedule(3)
    found = course.handle(Several(tuple(Wanted(_small(relid), False) for relid in range(1, 8))))
    assert [len(_relids(each)) for each in found] == [3, 2, 2]


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(_small(9), True),
        Wanted(dataclasses.replace(_small(9), leaves=_small(9).leaves * 2), False),
        Wanted(_small(9), False, REPAIR),
        Wanted(_source(9, 2), False),
    ],
    ids=["waits for writers", "of two partitions", "repair", "large"],
)
def test_what_may_have_to_wait_or_is_many_tables_is_held_alone(wanted: Wanted) -> None:
    course = CopySchedule(1)
    found: list[Action] = course.handle(
        Several((wanted, Wanted(_small(10), False), Wanted(_small(11), False)))
    )
    for action in found:
        if isinstance(action, Release):
            continue
        relids = _relids(action) if isinstance(action, Together) else [action.source.relation.relid]  # type: ignore[union-attr]
        assert relids in ([9], [10, 11])
        for relid in relids:
            found += course.handle(Dropped(relid))
    assert not course.tables


def test_two_readers_read_two_groups_at_the_same_time() -> None:
    course = CopySchedule(2)
    found = course.handle(Several(tuple(Wanted(_small(relid), False) for relid in range(1, 9))))
    reads = [course.handle(Several(tuple(map(_held, each.actions)))) for each in found]  # type: ignore[union-attr]
    assert [_relids(read) for (read,) in reads] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_table_that_is_left_out_of_its_group_is_held_alone_and_the_others_are_read() -> None:
    course = CopySchedule(1)
    one, other, third = _group(course, *map(_small, range(1, 4)))
    (reads,) = course.handle(Several((_held(one), LeftOut(2, other.attempt), _held(third))))
    assert _relids(reads) == [1, 3]
    assert course.handle(Several((Wanted(_small(4), False), Wanted(_small(5), False)))) == []
    (commits,) = course.handle(Several(tuple(map(_read, reads.actions))))  # type: ignore[union-attr,arg-type]
    committed = [SnapshotCommitted(relid, hold.attempt) for relid, hold in ((1, one), (3, third))]
    assert _relids(commits) == [1, 3]
    (alone,) = course.handle(Several(tuple(committed)))
    assert isinstance(alone, Hold) and alone.source == _small(2)


def test_a_table_of_a_group_that_fails_or_is_dropped_costs_the_others_nothing() -> None:
    course = CopySchedule(1)
    holds = _group(course, *map(_small, range(1, 5)))
    reads = _reading(course, holds)
    assert course.handle(Dropped(1)) == [Release(1, holds[0].attempt)]
    commit, release = course.handle(
        Several((*map(_read, (reads[0], *reads[2:])), Failed(2, holds[1].attempt)))
    )
    assert release == Release(2, holds[1].attempt) and _relids(commit) == [3, 4]
    assert course.handle(Several((Retry(2), Wanted(_small(5), False)))) == []
    course.handle(SnapshotCommitted(3, holds[2].attempt))
    (again,) = course.handle(SnapshotCommitted(4, holds[3].attempt))
    assert isinstance(again, Hold) and again.source == _small(2)
    assert course.tables[2].is_alone, "what made it fail in a group does so to nobody else"


def test_a_group_that_is_lost_with_its_holder_or_reader_is_let_go_of_and_taken_together_again() -> None:
    course = CopySchedule(1)
    holds = _group(course, *map(_small, range(1, 4)))
    _reading(course, holds)
    lost = tuple(Failed(n, hold.attempt, is_own=False) for n, hold in enumerate(holds, 1))
    assert course.handle(Several(lost)) == [Release(n, hold.attempt) for n, hold in enumerate(holds, 1)]
    (again,) = course.handle(Several(tuple(map(Retry, (1, 2, 3)))))
    assert _relids(again) == [1, 2, 3]


def _carrying(course: CopySchedule, source: PublishedSource, repair: Repair) -> Carry:
    """A repair whose rows are read."""
    (hold,) = _only(course.handle(Wanted(source, False, repair)), Hold)
    assert isinstance(hold, Hold) and hold.repair == repair
    only = bound(repair.key_filter, source.relation, ("id",))
    held = dataclasses.replace(_held(hold), only=only)
    (read,) = _only(course.handle(held), Read)
    assert isinstance(read, Read) and read.task.only == only
    (carry,) = _only(course.handle(_read(read)), Carry)
    assert isinstance(carry, Carry)
    return carry


def test_a_repair_is_carried_when_its_range_is_read_and_then_committed_with_the_files_of_both() -> None:
    course = CopySchedule(2)
    carry = _carrying(course, _source(1), REPAIR)
    assert (carry.repair, carry.first_number, carry.bounds) == (REPAIR, 1, BOUNDS)
    assert course.handle(Wanted(_source(1), False, REPAIR)) == [], "it is asked for until it is done"
    (commit,) = course.handle(Carried(1, carry.attempt, ("rest",), 90))
    assert isinstance(commit, CommitSnapshot) and commit.files == (f"1/{carry.attempt}/0", "rest")
    assert (commit.n_rows, commit.n_carried, commit.repair) == (10, 90, REPAIR)
    assert course.tables[1].n_bytes == course.tables[1].n_bytes_read == 0
    assert course.handle(Wanted(_source(1), False)) == [], "what is committed stays"
    course.handle(SnapshotCommitted(1, commit.attempt))
    assert not course.tables


@pytest.mark.parametrize("other", [None, Repair(parse_key_filter("id > 7"), 3), Repair(REPAIR.key_filter, 4)])
def test_what_is_asked_for_later_or_of_another_generation_takes_the_place_of_a_repair_in_hand(
    other: Repair | None,
) -> None:
    course = CopySchedule(2)
    carry = _carrying(course, _source(1), REPAIR)
    assert course.handle(Wanted(_source(1), False, other)) == [Release(1, carry.attempt)]
    assert course.handle(Carried(1, carry.attempt, ("rest",), 90)) == []
    (hold,) = course.handle(Wanted(_source(1), False, other))
    assert isinstance(hold, Hold) and hold.repair == other


def test_a_repair_does_not_take_the_place_of_a_whole_table_in_hand() -> None:
    course = CopySchedule(2)
    _taken(course, _source(1))
    assert course.handle(Wanted(_source(1), False, REPAIR)) == []
    assert course.tables[1].repair is None


def test_a_carrying_that_is_refused_leaves_the_course_and_its_files() -> None:
    course = CopySchedule(2)
    carry = _carrying(course, _source(1), REPAIR)
    assert course.handle(Dropped(1)) == [Release(1, carry.attempt)] and not course.tables
    carry = _carrying(course, _source(1), REPAIR)
    assert course.handle(Failed(1, carry.attempt)) == [Release(1, carry.attempt)]
    (hold,) = course.handle(Retry(1))
    assert isinstance(hold, Hold) and hold.repair == REPAIR
