"""How snapshots are led, without Ray: nothing is read here."""

from __future__ import annotations

import dataclasses
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
from xidstream.pipeline.segments.snapshot_record import Taken
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.course import Course, Failed, Hold, Wanted
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.generations import signature_of
from xidstream.pipeline.snapshot.resting import Resting
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource, Surveyed
from xidstream.pipeline.spark.snapshot_log import GenerationLine
from xidstream.pipeline.stages.snapshot_book import SnapshotBook
from xidstream.pipeline.stages.snapshot_lines import SnapshotLines

RELATION = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
SOURCE = PublishedSource(RELATION, "[]", None, (Leaf(1, "public", "t", 1, 8192),), attnums=(1,))

BOUNDS = SnapshotBounds(Lsn(0x4FFE), Lsn(0x4FFF), 700, 710, (), 1_700_000_000_000_000)


def nobody(*_: Any) -> Any:
    raise ComponentLost("the stream is starting again")


@pytest.fixture
def taking(tmp_path: Path) -> Iterator[SnapshotTaking]:
    book = SnapshotBook(Storage(str(tmp_path)), Layout(7, "s", "e"), Decision(takes_snapshots=True))
    taking = SnapshotTaking(Config(), book, lambda: None, lambda: None, nobody, lambda text: None)
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
        taking._try_to(taking._look)
    assert told == ["snapshots: a published table with a row filter is locked; asking again in 10 s"]


def test_looks_at_a_catalog_that_costs_much_are_rare_and_the_stream_alone_is_asked_meanwhile(
    taking: SnapshotTaking,
) -> None:
    """With 5,000 tables each look took the reader's process 0.7 s, each ten seconds, and each second at the end."""
    n_looks, delivered = 0, Lsn(0x100)
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')

    def survey() -> Surveyed:
        nonlocal n_looks
        n_looks += 1
        return Surveyed((published,), None, cpu_s=0.7)

    told: list[tuple[Any, ...]] = []
    taking._survey, taking._delivered = survey, lambda: delivered
    taking._call_sink = lambda *call: told.append(call)
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._lines, taking._is_ready = SnapshotLines([line]), True
    taking._book._taken[1, 1] = Taken(Generation(RELATION, 1, BOUNDS, None), signature_of(published))
    taking._try_to(taking._look)
    assert (taking.is_complete, taking.is_reached) == (True, False)
    assert taking._pause_s == pytest.approx(70)
    for delivered in (Lsn(0x4000), Lsn(0x5000)):  # noqa: B007 - what the stream answers
        assert not taking.is_reached
        taking._try_to(taking._look_at_stream)
    assert taking.is_reached and n_looks == 1 and told == [("reach", Lsn(0x4FFF))]
