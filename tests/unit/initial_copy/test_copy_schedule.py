"""What ``CopySchedule`` does next, without a server: tables are held, read in ranges, committed once, and taken
anew."""

from __future__ import annotations

import dataclasses
import random

import pytest

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.initial_copy.copy_schedule import (
    Action,
    Carried,
    Carry,
    CommitSnapshot,
    CopySchedule,
    Dropped,
    Failed,
    Hold,
    RangeRead,
    Read,
    ReaderLost,
    Release,
    Retry,
    SnapshotCommitted,
    TableHeld,
    TableState,
    Wanted,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.key_filter import Repair, bound, parse_key_filter
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource, plan_ranges

MIB = 1 << 20
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
    assert course.handle(SnapshotCommitted(1, commit.attempt)) == [Release(1)]
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
    pending: list[Action] = []
    for source in sources:
        pending += course.handle(Wanted(source, dice.random() < 0.3))
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
        reading = sum(len(table.reading) for table in course.tables.values())
        assert reading <= n_readers
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


REPAIR = Repair(parse_key_filter("id < 7"), number=3)


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
