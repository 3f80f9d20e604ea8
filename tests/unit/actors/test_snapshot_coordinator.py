"""How snapshots are led, without Ray: nothing is read here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xidstream.actors.snapshots import coordinator
from xidstream.actors.snapshots.coordinator import SnapshotCoordinator
from xidstream.actors.snapshots.sink_tables import SinkTables
from xidstream.actors.snapshots.steps import TableTaken
from xidstream.pipeline.errors import ComponentLost, SnapshotInterrupted
from xidstream.pipeline.initial_copy.copy_schedule import (
    CopySchedule,
    Failed,
    Hold,
    Release,
    SnapshotCommitted,
    TableHeld,
    Wanted,
)
from xidstream.pipeline.initial_copy.retry_backoff import RetryBackoff
from xidstream.pipeline.initial_copy.snapshot_book import Needs, SnapshotBook
from xidstream.pipeline.initial_copy.snapshot_lines import SnapshotLines
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine, Proven
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.ddl import Witnessed
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.invalidation import signature_of
from xidstream.pipeline.snapshot.key_filter import Repair, parse_key_filter
from xidstream.pipeline.snapshot.proven import Look
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource, Surveyed
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import TakenSnapshot, read_wishes, request
from xidstream.pipeline.storage.storage import Storage

RELATION = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
SOURCE = PublishedSource(RELATION, "[]", None, (Leaf(1, "public", "t", 1, 8192),), attnums=(1,))

BOUNDS = SnapshotBounds(Lsn(0x4FFE), Lsn(0x4FFF), 700, 710, (), 1_700_000_000_000_000)


def nobody(*_: Any, **__: Any) -> Any:
    raise ComponentLost("the stream is starting again")


class Told:
    """``SnapshotTables`` that notes what is called, as ``(method, *arguments)``, and has every table's rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ended: list[tuple[GenerationLine, str]] = []
        self.known: list[GenerationLine] = []

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((method, *arguments))
            if method == "prove":
                return Proven(arguments[0], tuple(self.ended))
            if method == "commit":
                return [True] * len(arguments[0])
            return self.known if method == "lines" else True

        return call


@pytest.fixture
def taking(tmp_path: Path) -> Iterator[SnapshotCoordinator]:
    book = SnapshotBook(Storage(str(tmp_path)), Layout(7, "s", "e"), Decision(takes_snapshots=True))
    taking = SnapshotCoordinator(
        Config(), book, lambda known: None, lambda: None, SinkTables(nobody), lambda text: None
    )
    yield taking
    taking.stop()


def test_readers_that_all_fail_for_one_lost_snapshot_make_the_table_rest_once(
    taking: SnapshotCoordinator,
) -> None:
    taking._resting = RetryBackoff(first_s=16.0)  # longer than this test
    course = taking._course = CopySchedule(4)
    (hold,) = course.handle(Wanted(SOURCE, wait_for_writers=False))
    assert isinstance(hold, Hold)
    for _ in range(4):
        taking._handle(Failed(1, hold.attempt))
    assert taking._resting.rest(1, now_s=0.0) == 32.0, "the rest behind the first one"


def test_the_log_says_that_it_is_whole_when_the_sink_has_all_up_to_the_snapshots_and_says_it_once(
    taking: SnapshotCoordinator,
) -> None:
    taking._tables = tables = Told()
    told = tables.calls
    valid_from = Lsn(0x4FFF)
    lines = SnapshotLines(
        [GenerationLine("public.t", 1, 1, 0x4FFE, int(valid_from), GenerationState.FINISHED, is_ours=True)]
    )
    assert not taking._reaches(lines, valid_from.before)
    assert told == []
    for _ in range(2):
        assert taking._reaches(lines, Lsn(0x5000))
    assert told == [("reach", valid_from)]


def test_a_table_that_cannot_be_taken_keeps_no_taken_one_from_its_readers_where_nothing_commits(
    taking: SnapshotCoordinator,
) -> None:
    """The log said that it is whole up to a snapshot only when all that were wanted were taken. In an idle database the
    others could not be read until then, however long it took."""
    taking._tables = tables = Told()
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._lines = lines = SnapshotLines([line])
    taking._course = course = CopySchedule(4)
    other = dataclasses.replace(SOURCE, relation=dataclasses.replace(RELATION, relid=2, table="u"))
    course.handle(Wanted(other, wait_for_writers=False))
    look = Look(Lsn(0x5000), frozenset(), waits_for_standby=False, at_s=0.0)
    surveyed = Surveyed((other,), None, look, "as it is", delivered_lsn=Lsn(0x5000))
    taking._take(Needs((), (), (), is_proof=True), surveyed, lines)
    assert tables.calls == [("reach", Lsn(0x4FFF))]
    assert not taking.is_complete and not taking.is_reached


def test_a_lock_that_nothing_can_be_planned_beside_is_told_once(taking: SnapshotCoordinator) -> None:
    """Planning waited without a word while somebody had locked a table with a row filter."""

    def locked(known: str | None) -> None:
        raise SnapshotInterrupted("a published table with a row filter is locked")

    told: list[str] = []
    taking._notify, taking._survey = told.append, locked
    taking._lines, taking._is_ready = SnapshotLines([]), True
    for _ in range(2):
        taking._try_to(taking._look)
    assert told == ["snapshots: a published table with a row filter is locked; asking again in 10 s"]


def test_looks_at_a_catalog_that_costs_much_are_rare_and_the_stream_alone_is_asked_meanwhile(
    taking: SnapshotCoordinator,
) -> None:
    """With 5,000 tables each look took the reader's process 0.7 s, each ten seconds, and each second at the end."""
    n_looks, delivered, cpu_s = 0, Lsn(0x100), 0.7
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')

    def survey(known: str | None) -> Surveyed:
        nonlocal n_looks
        n_looks += 1
        look = Look(Lsn(0x5000), frozenset(), waits_for_standby=False, at_s=0.0)
        return Surveyed((published,), None, look, "as it is", delivered_lsn=delivered, cpu_s=cpu_s)

    taking._survey, taking._delivered = survey, lambda: (delivered, Lsn(0))
    taking._tables = tables = Told()
    told = tables.calls
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._lines, taking._is_ready = SnapshotLines([line]), True
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(published))
    taking._try_to(taking._look)
    assert (taking.is_complete, taking.is_reached) == (True, False)
    assert taking._pause_s == pytest.approx(70, rel=0.2)
    # It looks for a proof as well, which goes no further than the log is whole.
    assert told.pop() == ("prove", Lsn(0x100), None)
    for delivered in (Lsn(0x4000), Lsn(0x5000)):  # noqa: B007 - what the stream answers
        assert not taking.is_reached
        taking._try_to(taking._look_at_stream)
    assert taking.is_reached and n_looks == 1 and told == [("reach", Lsn(0x4FFF))]
    cpu_s = 0.0
    taking._try_to(taking._look)
    assert taking._pause_s == pytest.approx(10, abs=0.5), (
        "nothing has changed, so the next one is not put off"
    )


def test_what_is_proven_is_told_when_there_are_commits_to_prove_and_nothing_is_asked_before(
    taking: SnapshotCoordinator,
) -> None:
    asked: list[str | None] = []
    taking._tables = tables = Told()
    told = tables.calls
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')
    last_commit, fingerprint, sources = Lsn(0), "first", (published,)

    def survey(known: str | None) -> Surveyed:
        asked.append(known)
        look = Look(Lsn(0x9000), frozenset(), waits_for_standby=False, at_s=0.0)
        found = None if known == fingerprint else sources
        return Surveyed(found, None, look, fingerprint, delivered_lsn=Lsn(last_commit + 8))

    taking._survey, taking._delivered = survey, lambda: (Lsn(last_commit + 8), last_commit)
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._lines = SnapshotLines([line])
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(published))
    taking._prove()
    assert asked == [], "nothing has committed"
    last_commit = Lsn(0x6000)
    taking._prove()
    taking._prove()
    assert asked == [None] and told == [("prove", Lsn(0x6008), None)], "once for each commit"
    last_commit = Lsn(0x7000)
    taking._prove()
    assert asked == [None, "first"] and told[1:] == [("prove", Lsn(0x7008), None)]
    last_commit, fingerprint = Lsn(0x8000), "second"
    sources = (dataclasses.replace(published, row_filter="id > 5"),)
    taking._prove()
    reason = "the row filter of its publication changed"
    assert told[2:] == [("end", line, reason, None), ("prove", Lsn(0x8008), None)], (
        "the end comes before what is proven"
    )
    assert taking._is_changed, "a new snapshot is wanted, and not only at the next look"


def test_what_the_streams_ddl_has_ended_is_taken_again_and_stands_longer_once_the_next_look_finds_nothing_missed(
    taking: SnapshotCoordinator,
) -> None:
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._tables = tables = Told()
    told, ended = tables.calls, tables.ended
    n_looks, fingerprint = 0, "first"

    def survey(known: str | None) -> Surveyed:
        nonlocal n_looks
        n_looks += 1
        lsn = Lsn(0x6000 + 0x100 * n_looks)
        look = Look(lsn, frozenset(), waits_for_standby=False, at_s=0.0)
        found = None if known == fingerprint else (published,)
        return Surveyed(found, None, look, fingerprint, delivered_lsn=lsn, mark=7)

    def prove() -> None:
        taking._delivered = lambda: (Lsn(0x9000), Lsn(0x6000 + 0x100 * n_looks + 1))
        taking._prove()

    taking._survey = survey
    taking._lines, taking._is_ready = SnapshotLines([line]), True
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(published))
    for _ in range(2):
        prove()
    assert {call[0] for call in told} == {"prove"} and not taking._is_changed
    told.clear()
    ended.append((line, "it was set to UNLOGGED"))
    prove()
    assert [call[0] for call in told] == ["prove"] and taking._is_changed
    assert [each.state for each in taking._lines] == [GenerationState.ENDED]
    surveyed = taking._ask()
    assert surveyed is not None and told[1:] == [("extend", line, Witnessed(7, Lsn(0x6200)))]
    assert taking._compare(surveyed, taking._lines).wanted, "a new snapshot"
    # Another hold on the sink begins: what the former one ended is told by its lines.
    taking._lines = SnapshotLines([line])
    tables.known = list(SnapshotLines([dataclasses.replace(line, state=GenerationState.ENDED)]))
    taking._is_new_sink, taking._course = True, CopySchedule(1)
    taking._survey = lambda known: None
    taking._look()
    assert [each.state for each in taking._lines] == [GenerationState.ENDED] and not taking._is_new_sink


def test_an_end_that_a_look_finds_waits_for_the_ddls_message_and_tells_the_sink_that_none_was_missed(
    taking: SnapshotCoordinator,
) -> None:
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._tables = tables = Told()
    told = tables.calls
    delivered = iter([Lsn(0x6000), Lsn(0x7000), Lsn(0x9000)])
    taking._delivered = lambda: (next(delivered), Lsn(0))
    taking._lines = SnapshotLines([line])
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(published))
    taking._witnessed = Witnessed(7, Lsn(0x5000))
    changed = dataclasses.replace(published, row_filter="id > 5")
    look = Look(Lsn(0x8000), frozenset(), waits_for_standby=False, at_s=0.0)
    taking._compare(Surveyed((changed,), None, look, "second", mark=7), taking._lines)
    reason = "the row filter of its publication changed"
    assert told[0] == ("end", line, reason, taking._witnessed) and list(delivered) == []
    # TRUNCATE of a partition leaves no message.
    parted = dataclasses.replace(published, leaves=(Leaf(2, "public", "t1", 1, 8192),))
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(parted))
    assert not taking._book.leaves_messages(line)
    told.clear()
    taking._lines, taking._witnessed = SnapshotLines([line]), None
    taking._compare(Surveyed((changed,), None, look, "second"), taking._lines)
    assert told[0] == ("end", line, reason, None), "nobody knows of triggers"


def test_columns_that_a_look_finds_are_told_when_the_log_is_whole_up_to_it_and_nothing_is_proven_before(
    taking: SnapshotCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_STREAM_WAIT_S", 0.0)
    published = dataclasses.replace(SOURCE, published_as='["table 1"]')
    columns = (*RELATION.columns, Column("note", 25, -1, False))
    relation = dataclasses.replace(RELATION, columns=columns)
    grown = dataclasses.replace(published, relation=relation, attnums=(1, 2))
    line = GenerationLine("public.t", 1, 1, 0x4FFE, 0x4FFF, GenerationState.FINISHED, is_ours=True)
    taking._tables = tables = Told()
    told = tables.calls
    taking._lines = SnapshotLines([line])
    taking._book._taken[1, 1] = TakenSnapshot(Generation(RELATION, 1, BOUNDS, None), signature_of(published))

    def look(lsn: int, delivered: int) -> None:
        taking._delivered = lambda: (Lsn(delivered), Lsn(0x9000))
        at = Look(Lsn(lsn), frozenset(), waits_for_standby=False, at_s=0.0)
        found = Surveyed((grown,), None, at, "second", Lsn(delivered), mark=7, end_lsn=Lsn(lsn + 8))
        assert taking._lines is not None
        taking._witnessed = Witnessed(7, Lsn(0x5000))
        taking._compare(found, taking._lines)

    look(0x6000, delivered=0x6006)
    assert told == [] and taking._fingerprint is None
    look(0x7000, delivered=0x6007)
    assert told == [("lay_out", [(relation, Lsn(0x6007))], Witnessed(7, Lsn(0x5000)))], (
        "as it was found first"
    )
    assert taking._fingerprint == "second", "the next look need not read the catalog"
    look(0x8000, delivered=0x8000)
    assert told[1:] == [("prove", Lsn(0x8000), None)]


REPAIR = Repair(parse_key_filter("id < 7"), number=1)


def test_while_a_repair_waits_for_the_log_in_an_idle_database_the_log_is_asked_to_say_how_far_it_is(
    taking: SnapshotCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking._steps, "submit", lambda action: None)
    taking._tables = tables = Told()
    taking._lines, taking._course = SnapshotLines([]), CopySchedule(1)
    taking._handle(Wanted(SOURCE, False, REPAIR))
    attempt = taking._course.tables[1].attempt
    assert not taking._waits_for_log
    taking._handle(TableHeld(1, attempt, SOURCE, "snapshot", BOUNDS, ()))
    assert taking._waits_for_log and taking._lines.valid_from == BOUNDS.valid_from
    taking._delivered = lambda: (BOUNDS.valid_from.next_record.record_end, Lsn(0))
    taking._look_at_stream()
    assert tables.calls == [("reach", BOUNDS.valid_from)] and not taking._waits_for_log
    assert not taking.is_reached, "the run is not complete"


def test_a_finished_repair_tells_what_it_read_and_carried_and_is_no_table_that_was_read(
    taking: SnapshotCoordinator,
) -> None:
    told: list[Any] = []
    taking._notify, taking._lines = told.append, SnapshotLines([])
    generation = Generation(RELATION, 2, BOUNDS)
    taking._handle(TableTaken(SnapshotCommitted(1, 3), generation, 100, 1 << 30, n_carried=1_900))
    (event,) = told
    assert event == (
        "table public.t: a key range is repaired: 100 rows read from the source, 1,900 rows carried over"
    )
    assert (event.name, event.facts) == (
        "snapshot_repaired",
        {"table": "public.t", "n_rows": 100, "n_carried": 1_900},
    )
    assert taking.progress().n_finished == 0 and taking._lines.last_number("public.t") == 2


def test_a_repair_that_cannot_be_is_told_forgotten_and_given_up(
    taking: SnapshotCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []
    told: list[Any] = []
    monkeypatch.setattr(taking._steps, "submit", submitted.append)
    taking._notify = told.append
    request(taking._book._storage, taking._book._layout, 1, "public.t", REPAIR.key_filter)
    taking._lines = lines = SnapshotLines([])
    taking._course = course = CopySchedule(1)
    taking._handle(Wanted(SOURCE, False, REPAIR))
    attempt = course.tables[1].attempt
    look = Look(Lsn(0x5000), frozenset(), waits_for_standby=False, at_s=0.0)
    surveyed = Surveyed((SOURCE,), None, look, "as it is", delivered_lsn=Lsn(0x5000))
    taking._tables = Told()
    taking._take(Needs((), (), (), True, ((SOURCE, "no snapshot of it stands"),)), surveyed, lines)
    assert submitted[-1] == Release(1, attempt) and not course.tables
    assert "is not repaired: no snapshot of it stands; take the whole table again" in told[0]
    assert not read_wishes(taking._book._storage, taking._book._layout).requests
