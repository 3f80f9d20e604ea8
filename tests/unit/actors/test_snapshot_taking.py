"""How snapshots are led, without Ray: nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xidstream.actors.snapshot.taking import SnapshotTaking
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ComponentLost, SnapshotInterrupted
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.relations import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.segments import Layout, Storage
from xidstream.pipeline.snapshot.course import Course, Failed, Hold, Wanted
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import GenerationState
from xidstream.pipeline.snapshot.resting import Resting
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource
from xidstream.pipeline.spark.snapshot_log import GenerationLine
from xidstream.pipeline.stages.snapshot_book import SnapshotBook
from xidstream.pipeline.stages.snapshot_lines import SnapshotLines

RELATION = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
SOURCE = PublishedSource(RELATION, "[]", None, (Leaf(1, "public", "t", 1, 8192),), attnums=(1,))


def nobody(*_: Any) -> Any:
    raise ComponentLost("the stream is starting again")


@pytest.fixture
def taking(tmp_path: Path) -> Iterator[SnapshotTaking]:
    book = SnapshotBook(Storage(str(tmp_path)), Layout(7, "s", "e"), Decision(takes_snapshots=True))
    taking = SnapshotTaking(Config(), book, lambda: None, nobody, lambda text: None)
    yield taking
    taking.stop()


def test_readers_that_all_fail_for_one_lost_snapshot_make_the_table_rest_once(
    taking: SnapshotTaking,
) -> None:
    taking._resting = Resting(first_s=16.0)  # longer than this test
    course = taking._course = Course(4)
    (hold,) = course.handle(Wanted(SOURCE, wait_for_writers=False))
    assert isinstance(hold, Hold)
    for _ in range(4):
        taking._handle(Failed(1, hold.attempt))
    assert taking._resting.rest(1, now_s=0.0) == 32.0, "the rest behind the first one"


def test_the_log_says_that_it_is_whole_when_the_sink_has_all_up_to_the_snapshots_and_says_it_once(
    taking: SnapshotTaking,
) -> None:
    told: list[tuple[Any, ...]] = []
    taking._call_sink = lambda *call: told.append(call)
    valid_from = Lsn(0x4FFF)
    lines = SnapshotLines(
        [GenerationLine("public.t", 1, 1, 0x4FFE, int(valid_from), GenerationState.FINISHED, is_ours=True)]
    )
    assert not taking._reaches(lines, valid_from.before)
    assert told == []
    for _ in range(2):
        assert taking._reaches(lines, Lsn(0x5000))
    assert told == [("reach", valid_from)]


def test_a_lock_that_nothing_can_be_planned_beside_is_told_once(taking: SnapshotTaking) -> None:
    """Planning waited without a word while somebody had locked a table with a row filter."""

    def locked() -> None:
        raise SnapshotInterrupted("a published table with a row filter is locked")

    told: list[str] = []
    taking._notify, taking._survey = told.append, locked
    taking._lines, taking._is_ready = SnapshotLines([]), True
    for _ in range(2):
        taking._try_to_look()
    assert told == ["snapshots: a published table with a row filter is locked; asking again in 10 s"]
