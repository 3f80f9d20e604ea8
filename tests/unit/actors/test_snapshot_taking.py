"""How long a table rests whose snapshot failed: without Ray, because nothing is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xidstream.actors.snapshot import taking as taking_module
from xidstream.actors.snapshot.taking import SnapshotTaking
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.relations import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.segments import Layout, Storage
from xidstream.pipeline.snapshot.course import Course, Failed, Hold, Wanted
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource
from xidstream.pipeline.stages.snapshot_book import SnapshotBook

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
    taking: SnapshotTaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_module, "_FIRST_REST_S", 16.0)  # longer than this test
    course = taking._course = Course(4)
    (hold,) = course.handle(Wanted(SOURCE, wait_for_writers=False))
    assert isinstance(hold, Hold)
    rests = []
    for _ in range(4):
        taking._handle(Failed(1, hold.attempt))
        rests.append(taking._rests[1][1])
    assert rests == [16.0] * 4
