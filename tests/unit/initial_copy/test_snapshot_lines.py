"""What a run knows of the sink's lines of snapshots."""

from __future__ import annotations

from xidstream.pipeline.initial_copy.snapshot_lines import SnapshotLines
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation, GenerationState


def line(table: str, number: int, valid_from: int, *, is_ours: bool = True) -> GenerationLine:
    return GenerationLine(
        f"public.{table}", 1, number, valid_from - 1, valid_from, GenerationState.FINISHED, is_ours
    )


def test_the_state_is_known_from_where_the_last_standing_generation_of_ours_is_valid() -> None:
    lines = SnapshotLines([line("a", 1, 100), line("b", 2, 300), line("c", 1, 900, is_ours=False)])
    assert lines.valid_from == 300
    lines.end(line("b", 2, 300))
    assert lines.valid_from == 100
    assert [each.state.value for each in lines if each.table == "public.b"] == ["ended"]
    assert SnapshotLines([]).valid_from == 0


def test_a_new_generation_takes_the_place_of_the_one_before() -> None:
    lines = SnapshotLines([line("a", 1, 900)])
    relation = RelationVersion(1, "public", "a", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
    bounds = SnapshotBounds(Lsn(99), Lsn(100), 5, 6, (), taken_at_us=0)
    lines.finish(Generation(relation, 2, bounds, None))
    assert lines.last_number("public.a") == 2
    assert lines.valid_from == 100, "the first one does not count any more"


def test_what_was_reached_is_reached_until_a_later_generation_stands() -> None:
    lines = SnapshotLines([line("a", 1, 0x4FFF)])
    assert not lines.is_reached()
    assert not lines.may_reach(Lsn(0x4FFE))
    assert lines.may_reach(Lsn(0x5000))
    lines.reach()
    assert lines.is_reached()
    lines.end(line("a", 1, 0x4FFF))
    assert lines.is_reached(), "nothing stands that is valid only later"


def test_a_snapshot_behind_a_page_header_is_reached_where_the_record_before_it_ends() -> None:
    lines = SnapshotLines([line("a", 1, 0x4017)])
    assert lines.may_reach(Lsn(0x4000)), "there is no record between"
    assert not lines.may_reach(Lsn(0x3FF8))


def test_a_repair_that_waits_has_the_log_say_that_it_is_whole_up_to_its_snapshot() -> None:
    lines = SnapshotLines([])
    assert not lines.is_awaited and lines.is_reached()
    lines.await_(Lsn(0x4FFF))
    assert lines.is_awaited and not lines.is_reached() and lines.valid_from == Lsn(0x4FFF)
    assert not lines.may_reach(Lsn(0x4FFF)) and lines.may_reach(Lsn(0x5000))
    lines.reach()
    assert not lines.is_awaited and lines.is_reached() and lines.reached_lsn == Lsn(0x4FFF)
