"""What becomes of a snapshot's action that fails: which errors end the run, and which the table's snapshot alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.actors.test_snapshot_coordinator import Told
from tests.unit.initial_copy.test_snapshot_book import BOUNDS, INITIAL, LAYOUT, source_of, wanted
from xidstream.actors.snapshots import steps as steps_module
from xidstream.actors.snapshots.steps import SnapshotSteps, TableTaken
from xidstream.pipeline.errors import (
    ColumnNameClash,
    ComponentLost,
    ConnectionLost,
    LoginRefused,
    PoisonedChange,
    PreconditionMissing,
    SinkDiverged,
    SinkFailed,
    SlotLost,
    SnapshotInterrupted,
    SnapshotLost,
    StorageFault,
    TableUnreadable,
    XidstreamError,
)
from xidstream.pipeline.initial_copy.copy_schedule import (
    SMALL_BYTES,
    Carried,
    Carry,
    CommitSnapshot,
    Dropped,
    Failed,
    Hold,
    LeftOut,
    RangeRead,
    Read,
    ReaderLost,
    Release,
    Several,
    SnapshotCommitted,
    TableHeld,
)
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.key_filter import Repair, parse_key_filter
from xidstream.pipeline.snapshot.tables import PublishedSource, RangeTask, plan_ranges
from xidstream.pipeline.storage.snapshot_record import read_taken, read_wishes, request
from xidstream.pipeline.storage.storage import Storage


def outcome(
    storage: Storage, error: XidstreamError, on_poison: str, sink: str = ""
) -> tuple[list[Any], list[BaseException]]:
    """What the course and the supervisor hear of an action on table 7 that raises ``error``."""
    reported: list[Any] = []
    failed: list[BaseException] = []
    book = SnapshotBook(storage, LAYOUT, INITIAL)
    config = Config(slot="orders", on_poison=on_poison, sink=sink)
    steps = SnapshotSteps(config, book, Told(), lambda _: 0, lambda _: None, reported.append, failed.append)

    def act(action: object) -> None:
        raise error

    steps._watched(act, [Hold(source_of(7), 3, False)])
    steps.close()
    return reported, failed


def test_where_tables_are_parked_one_that_cannot_be_read_costs_its_own_snapshot_until_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(str(tmp_path))
    request(storage, LAYOUT, 7, "public.t7")
    assert outcome(storage, PoisonedChange("table t7 is bad"), "park") == ([Failed(7, 3)], [])
    assert "table t7 is bad" in caplog.text and "snapshot request --table public.t7" in caplog.text
    wishes = read_wishes(storage, LAYOUT)
    assert (dict(wishes.requests), dict(wishes.cancelled)) == ({}, {7: "public.t7"})
    book = SnapshotBook(storage, LAYOUT, INITIAL)
    assert wanted(book, [source_of(7), source_of(8)], []) == [8]
    request(storage, LAYOUT, 7, "public.t7")
    assert wanted(book, [source_of(7)], []) == [7]


@pytest.mark.parametrize("on_poison", ["stop", "park"])
@pytest.mark.parametrize("error", [ColumnNameClash("a and A"), TableUnreadable("no SELECT")])
def test_a_table_that_nobody_can_read_as_it_is_is_told_and_tried_again_later(
    tmp_path: Path, error: XidstreamError, on_poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(str(tmp_path))
    assert outcome(storage, error, on_poison, f"delta:{tmp_path}/delta") == ([Failed(7, 3)], [])
    assert error.message in caplog.text and read_wishes(storage, LAYOUT).cancelled == {}


def test_a_function_that_waits_for_its_snapshots_does_without_that_of_a_table_whose_names_clash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(str(tmp_path))
    assert outcome(storage, ColumnNameClash("a and A"), "stop") == ([Failed(7, 3)], [])
    assert "a and A" in caplog.text and read_wishes(storage, LAYOUT).cancelled == {7: "public.t7"}


@pytest.mark.parametrize(
    ("error", "on_poison"), [(PoisonedChange("bad"), "stop"), (SlotLost("gone"), "park")]
)
def test_what_concerns_all_or_is_to_stop_ends_the_run_and_cancels_nothing(
    tmp_path: Path, error: XidstreamError, on_poison: str
) -> None:
    storage = Storage(str(tmp_path))
    reported, (failed,) = outcome(storage, error, on_poison)
    assert reported == [] and isinstance(failed, type(error)) and "snapshot cancel" in failed.remedy
    assert read_wishes(storage, LAYOUT).cancelled == {}


def test_a_login_that_is_refused_beside_a_stream_that_was_let_in_is_tried_again(tmp_path: Path) -> None:
    """While a password is changed the stream goes on, and the table's snapshot is taken again."""
    reported, failed = outcome(Storage(str(tmp_path)), LoginRefused("wrong or missing password"), "stop")
    assert (reported, failed) == ([Failed(7, 3)], [])


class Shortened(Told):
    """The table's log was cut up to ``cut``."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut = Lsn(cut)

    def outputs(self, *arguments: Any) -> list[SnapshotOutput | XidstreamError]:
        return [SnapshotOutput(Location("/tables"), "snapshot-1", Conform(pa.schema([]), ()), cut=self.cut)]


def holds_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Told, *held: SnapshotBounds, waits: bool = False
) -> list[bool]:
    """Whether each of them waits for writers. ``held``: the bounds of the first one, the second one, ..."""
    source, calls, failed = source_of(7), list[bool](), list[BaseException]()
    decision = Decision(True, {7: source.published_as}, slot_xmax=100)
    book = SnapshotBook(Storage(str(tmp_path)), LAYOUT, decision)
    steps = SnapshotSteps(
        Config(slot="orders"), book, tables, lambda _: 0, lambda _: None, lambda _: None, failed.append
    )

    def hold(method: str, source: PublishedSource, wait_for_writers: bool, behind: Lsn) -> HeldSnapshot:
        calls.append(wait_for_writers)
        return HeldSnapshot("name", held[len(calls) - 1], source, True)

    monkeypatch.setattr(steps._actors, "hold", hold)
    steps._watched(steps._act, [Hold(source, 3, waits)])
    steps.close()
    assert failed == []
    return calls


@pytest.mark.parametrize(("xmin", "waited"), [(99, [False, True]), (100, [False])])
def test_a_snapshot_that_may_lack_a_commit_from_before_the_slot_is_taken_again_behind_the_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xmin: int, waited: list[bool]
) -> None:
    first, second = (dataclasses.replace(BOUNDS, xmin=each) for each in (xmin, 100))
    assert holds_asked_for(tmp_path, monkeypatch, Shortened(0), first, second) == waited


@pytest.mark.parametrize(
    ("cut", "waits", "waited"), [(50, False, [False, True]), (50, True, [True]), (0, False, [False])]
)
def test_a_snapshot_that_does_not_know_of_what_its_log_was_cut_is_taken_behind_the_writers_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, waits: bool, waited: list[bool]
) -> None:
    """A transaction that is open from before the last checkpoint: the sink refused each snapshot, when it was read."""
    bounds = dataclasses.replace(BOUNDS, xmin=100)
    behind = dataclasses.replace(bounds, writers_upto=bounds.snapshot_lsn)
    tables = Shortened(cut)
    asked = holds_asked_for(tmp_path, monkeypatch, tables, bounds, behind, waits=waits)
    assert asked == waited and behind.whole_upto >= tables.cut


def test_the_former_generation_ends_before_the_new_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Told()
    done: list[Any] = tables.calls
    steps = SnapshotSteps(
        Config(slot="orders"),
        SnapshotBook(Storage(str(tmp_path)), LAYOUT, INITIAL),
        tables,
        lambda _: 1,
        lambda source: done.append(f"end the former of {source.name}"),
        done.append,
        done.append,
    )
    monkeypatch.setattr(steps._actors, "hold", lambda method, *_: done.append(method) or {})
    steps._watched(steps._act, [CommitSnapshot(source_of(7), BOUNDS, 3, (), 0)])
    steps.close()
    assert done[:2] == ["confirm", "end the former of public.t7"] and done[2][0] == "commit"
    assert isinstance(done[3], TableTaken) and done[3].generation.number == 2


def test_a_snapshot_whose_files_are_gone_at_its_commit_is_taken_again_and_what_is_left_of_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, done = Storage(str(tmp_path)), []
    target = SnapshotOutput(Location("/tables/public.t7"), "snapshot-7", Conform(pa.schema([]), ()))

    class Tables(Told):
        def __getattr__(self, method: str) -> Any:
            def call(*arguments: Any) -> Any:
                done.append((method, *arguments))
                if method == "commit":
                    return [SnapshotInterrupted("1 of 2 files of its snapshot were removed")]
                return [target] if method == "outputs" else None

            return call

    reported: list[Any] = []
    book = SnapshotBook(storage, LAYOUT, INITIAL)
    steps = SnapshotSteps(
        Config(slot="orders"), book, Tables(), lambda _: 1, lambda _: None, reported.append, reported.append
    )
    held = HeldSnapshot("snapshot", BOUNDS, source_of(7), by_range=True)
    monkeypatch.setattr(steps._actors, "hold", lambda method, *_: held if method == "hold" else {})
    steps._watched(steps._act, [Hold(source_of(7), 3, False)])
    steps._watched(steps._act, [CommitSnapshot(source_of(7), BOUNDS, 3, (), 0)])
    assert [type(event) for event in reported] == [TableHeld, Failed]
    assert book.unfinished([]) == [] and read_taken(storage, LAYOUT) == []
    steps._held.release(Release(7, discarded=3))
    assert done[-1] == ("discard", target)
    steps._watched(steps._act, [Hold(source_of(7), 4, False)])
    # What a reader wrote after the first removal.
    assert [each[0] for each in done[-2:]] == ["discard", "outputs"]
    steps._held.release(Release(7))
    steps.close()
    assert [each[0] for each in done].count("discard") == 2


@pytest.mark.parametrize("is_held_again", [False, True])
def test_of_a_table_that_is_dropped_while_it_is_held_alone_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held_again: bool
) -> None:
    discarded: list[SnapshotOutput] = []
    given_up: list[Callable[[], None]] = []

    class Tables(Shortened):
        def discard(self, target: SnapshotOutput) -> None:
            discarded.append(target)

        def outputs(self, *arguments: Any) -> list[SnapshotOutput | XidstreamError]:
            if not is_held_again:
                given_up.pop()()
            return super().outputs(*arguments)

    tables, failed = Tables(50 if is_held_again else 0), list[BaseException]()
    decision = Decision(True, {7: source_of(7).published_as}, slot_xmax=100)
    book = SnapshotBook(Storage(str(tmp_path)), LAYOUT, decision)
    steps = SnapshotSteps(
        Config(slot="orders"), book, tables, lambda _: 0, lambda _: None, lambda _: None, failed.append
    )
    given_up.append(lambda: steps._held.release(Release(7, discarded=3)))

    def hold(method: str, source: PublishedSource, wait_for_writers: bool, behind: Lsn) -> HeldSnapshot:
        if wait_for_writers:
            given_up.pop()()
            raise SnapshotLost("the snapshot of a table was given up")
        return HeldSnapshot("name", dataclasses.replace(BOUNDS, xmin=100), source, True)

    monkeypatch.setattr(steps._actors, "hold", hold)
    steps._watched(steps._act, [Hold(source_of(7), 3, False)])
    steps.close()
    assert len(discarded) == 1 and not steps._held.outputs and not failed and not given_up


REPAIR = Repair(parse_key_filter("id < 7"), number=1)
TARGET = SnapshotOutput(Location.parse("/tables/public.t7"), "snapshot-7", Conform(pa.schema([]), ()))


class Carrying(Told):
    """``SnapshotTables`` whose log answers at the second question, or ends in ``error``."""

    def __init__(self, error: XidstreamError | None = None) -> None:
        super().__init__()
        rest = (WrittenFile("rest", 1, 90, 99, 99),)
        self._answers: list[Any] = [*([] if error is None else [error]), None, rest]

    def carry(self, *arguments: Any) -> Any:
        self.calls.append(("carry", *arguments))
        answer = self._answers.pop(0)
        if isinstance(answer, XidstreamError):
            raise answer
        return answer


@pytest.fixture
def carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Any], list[Any], Storage]]:
    """What the holder and the sink are asked for by a carrying, and what is reported of it."""
    monkeypatch.setattr(steps_module, "_CARRY_PAUSE_S", 0.01)

    def carry(
        error: XidstreamError | None = None,
        target: SnapshotOutput | None = TARGET,
        lost: SnapshotLost | None = None,
    ) -> tuple[list[Any], list[Any], Storage]:
        storage, tables, reported = Storage(str(tmp_path)), Carrying(error), []
        request(storage, LAYOUT, 7, "public.t7", REPAIR.key_filter)
        steps = SnapshotSteps(
            Config(slot="orders"),
            SnapshotBook(storage, LAYOUT, INITIAL),
            tables,
            lambda _: 1,
            lambda source: tables.calls.append(f"end the former of {source.name}"),
            reported.append,
            reported.append,
        )
        unheld = {} if lost is None else {7: lost}
        monkeypatch.setattr(steps._actors, "hold", lambda method, *_: tables.calls.append(method) or unheld)
        monkeypatch.setattr(steps._actors, "release", lambda relid: tables.calls.append("release"))
        if target is not None:
            steps._held.outputs[3] = target
        action = Carry(source_of(7), BOUNDS, 3, REPAIR, (), first_number=2)
        steps._watched(steps._act, [action])
        steps.close()
        return tables.calls, reported, storage

    return carry


def test_a_repair_lets_go_of_its_table_and_then_waits_until_the_log_answers(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]],
) -> None:
    calls, reported, storage = carried()
    assert calls[:3] == ["confirm", "release", "end the former of public.t7"]
    assert [each[0] for each in calls[3:]] == ["carry", "carry"]
    assert all(each[2].directory.startswith("snapshot-7-") for each in calls[3:])
    assert (calls[3][1].number, calls[3][1].first_seq) == (1, 2 << 32)
    assert reported == [Carried(7, 3, (WrittenFile("rest", 1, 90, 99, 99),), 90)]
    assert read_wishes(storage, LAYOUT).ranges, "it is not done yet"


def test_a_repair_whose_table_was_not_held_to_the_end_is_not_carried(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]], caplog: pytest.LogCaptureFixture
) -> None:
    calls, reported, _ = carried(lost=SnapshotLost("the session has ended"))
    assert calls == ["confirm", "release"] and [type(each) for each in reported] == [Failed]
    assert "table public.t7 was not held to the end: the session has ended" in caplog.text


def test_what_a_carrying_that_failed_has_written_is_removed_before_the_next_one(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]], caplog: pytest.LogCaptureFixture
) -> None:
    calls, reported, _ = carried(StorageFault("the disk is full"))
    assert [each[0] for each in calls[3:]] == ["carry", "discard", "carry", "carry"]
    assert calls[4][1] == calls[3][2] != calls[5][2]
    assert [type(event) for event in reported] == [
        Carried
    ] and "the disk is full; trying again" in caplog.text


@pytest.mark.parametrize("error", [PreconditionMissing("it has ended"), SinkFailed("AnalysisException")])
def test_a_repair_that_cannot_be_carried_is_refused_with_the_way_out_and_ends_no_run(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]],
    error: XidstreamError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, reported, storage = carried(error)
    assert reported == [Dropped(7)] and not read_wishes(storage, LAYOUT).requests
    assert f"is not repaired: {error.message}; take the whole table again" in caplog.text
    assert "`xidstream snapshot request --table public.t7`" in caplog.text


def test_a_sink_that_is_ahead_of_the_server_still_ends_the_run(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]],
) -> None:
    _, (error,), storage = carried(SinkDiverged("restored"))
    assert isinstance(error, SinkDiverged) and read_wishes(storage, LAYOUT).ranges


def test_a_repair_that_was_given_up_waits_for_nothing(
    carried: Callable[..., tuple[list[Any], list[Any], Storage]],
) -> None:
    calls, reported, _ = carried(target=None)
    assert reported == [] and "carry" not in [each[0] for each in calls]


def test_a_repair_is_committed_without_its_table_being_held_and_told_with_what_it_read(
    tmp_path: Path,
) -> None:
    tables, reported = Told(), []
    storage = Storage(str(tmp_path))
    book = SnapshotBook(storage, LAYOUT, INITIAL)
    steps = SnapshotSteps(
        Config(slot="orders"), book, tables, lambda _: 1, lambda _: None, reported.append, reported.append
    )
    steps._watched(steps._act, [CommitSnapshot(source_of(7), BOUNDS, 3, (), 10, 90, REPAIR)])
    steps.close()
    (taken,) = reported
    assert isinstance(taken, TableTaken) and (taken.n_rows, taken.n_carried) == (10, 90)
    assert [each.where for each in read_taken(storage, LAYOUT)] == [REPAIR.key_filter]


class Group:
    """Steps for small tables that are taken together, with a holder, readers and a sink that answer as they are told.

    ``held``: which tables the holder holds, ``confirms`` to the end. ``n_bytes``: of a table under its lock. ``places``
    and ``commits``: what the sink answers for a table, if anything else than that it is done."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relids: Sequence[int] = (7, 8, 9)
    ) -> None:
        monkeypatch.setattr(steps_module, "_FIRST_PAUSE_S", 0.01)
        self.relids = relids
        self.held = self.confirms = list(relids)
        self.bounds = dataclasses.replace(BOUNDS, xmin=100)
        self.n_bytes: dict[int, int] = {}
        self.places: dict[int, Any] = {}
        self.commits: dict[int, list[Any]] = {}
        self.reads: Any = None
        self.before_hold = self.before_places = self.before_read = lambda: None
        self.released: list[int] = []
        self.asked: list[list[int]] = []
        self.discarded: list[str] = []
        self.reported: list[Any] = []
        self.failed: list[BaseException] = []
        published = {relid: source_of(relid).published_as for relid in relids}
        self.storage = Storage(str(tmp_path))
        self.book = SnapshotBook(self.storage, LAYOUT, Decision(True, published, slot_xmax=100))
        told, failed = self.reported.append, self.failed.append
        config = Config(slot="orders")
        self.steps = SnapshotSteps(config, self.book, self, lambda _: 0, lambda _: None, told, failed)
        monkeypatch.setattr(self.steps._actors, "hold", self._hold)
        monkeypatch.setattr(self.steps._actors, "release", lambda *relids: self.released.extend(relids))
        monkeypatch.setattr(self.steps._actors, "read", self._read)

    def _hold(self, method: str, tables: Any, lsn: Lsn) -> Any:
        if method == "confirm":
            return {relid: SnapshotLost("gone") for relid in tables if relid not in self.confirms}
        self.before_hold()
        held = {relid: HeldSnapshot("s", self.bounds, self._source(relid), True) for relid in self.held}
        return {
            each.relation.relid: held[each.relation.relid] for each in tables if each.relation.relid in held
        }

    def _source(self, relid: int) -> PublishedSource:
        source = source_of(relid)
        n_bytes = self.n_bytes.get(relid, source.n_bytes)
        leaves = (dataclasses.replace(leaf, n_bytes=n_bytes) for leaf in source.leaves)
        return dataclasses.replace(source, leaves=tuple(leaves))

    def _read(self, tasks: Any, bounds: Any, targets: Any) -> Any:
        if isinstance(self.reads, XidstreamError):
            raise self.reads
        done = ((WrittenFile("f", 1, 10, 99, 99),), 10)
        return [self.reads.get(task.source.relation.relid, done) for task in tasks]

    def __getattr__(self, method: str) -> Any:
        """``SnapshotTables``."""

        def outputs(wanted: Any) -> Any:
            relids = [relation.relid for relation, _ in wanted]
            self.before_places()
            if isinstance(self.places, XidstreamError):
                raise self.places
            return [self.places.get(relid, TARGET) for relid in relids]

        def commit(taken: Any) -> Any:
            relids = [generation.relid for generation, _ in taken]
            self.asked.append(relids)
            if isinstance(self.commits, XidstreamError):
                raise self.commits
            return [self.commits[relid].pop(0) if self.commits.get(relid) else True for relid in relids]

        def discard(target: SnapshotOutput) -> None:
            self.discarded.append(target.directory)

        return {"outputs": outputs, "commit": commit, "discard": discard}[method]

    def hold(self) -> list[Any]:
        self.steps._watched(
            self.steps._act, [Hold(source_of(relid), relid * 10, False) for relid in self.relids]
        )
        return self._events()

    def read(self) -> list[Any]:
        for relid in self.relids:
            self.steps._held.outputs[relid * 10] = TARGET
        self.before_read()
        (pages,) = plan_ranges(source_of(7).leaves, by_range=True)
        tasks = [RangeTask(source_of(relid), "s", pages) for relid in self.relids]
        self.steps._watched(
            self.steps._act, [Read(task, BOUNDS, task.source.relation.relid * 10) for task in tasks]
        )
        return self._events()

    def committed(self) -> list[Any]:
        self.steps._watched(
            self.steps._act,
            [CommitSnapshot(source_of(relid), BOUNDS, relid * 10, (), 0) for relid in self.relids],
        )
        return self._events()

    def _events(self) -> list[Any]:
        self.steps.close()
        return [
            event
            for each in self.reported
            for event in (each.events if isinstance(each, Several) else [each])
        ]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(tmp_path, monkeypatch)


def test_tables_that_the_holder_or_the_sink_cannot_take_with_the_others_are_left_out_and_let_go(
    group: Group,
) -> None:
    group.held = [7, 8]
    group.places = {8: SinkFailed("it is partitioned")}
    held, *left_out = group.hold()
    assert isinstance(held, TableHeld) and (held.relid, held.attempt) == (7, 70)
    assert left_out == [LeftOut(8, 80), LeftOut(9, 90)] and group.released == [8]
    assert len(group.reported) == 1, "one report, so that one reader is asked for all of them"
    assert list(group.steps._held.outputs) == [70]


def test_a_group_whose_snapshot_may_lack_a_commit_from_before_the_slot_is_taken_one_by_one(
    group: Group,
) -> None:
    group.bounds = dataclasses.replace(BOUNDS, xmin=99)
    assert group.hold() == [LeftOut(7, 70), LeftOut(8, 80), LeftOut(9, 90)] and group.released == [7, 8, 9]


def test_of_a_group_a_table_whose_log_was_cut_behind_its_snapshot_is_taken_behind_its_writers(
    group: Group,
) -> None:
    group.places = {8: dataclasses.replace(TARGET, cut=Lsn(50), directory="snapshot-8")}
    assert [type(each) for each in group.hold()] == [TableHeld, LeftOut, TableHeld]
    assert (group.released, group.discarded) == ([8], ["snapshot-8"])


@pytest.mark.parametrize("moment", ["before_hold", "before_places"])
def test_of_a_table_that_is_dropped_before_the_sink_gives_its_place_nothing_is_kept(
    group: Group, moment: str
) -> None:
    """The sink took it for one whose snapshot is under way, and so never shortened its log."""
    group.places = {8: dataclasses.replace(TARGET, directory="snapshot-8")}
    setattr(group, moment, lambda: group.steps._held.release(Release(8, discarded=80)))
    group.hold()
    assert group.discarded == ["snapshot-8"] and list(group.steps._held.outputs) == [70, 90]
    assert group.released == [8, 8], "it is held behind the first release, perhaps"


def test_a_table_of_a_group_for_which_a_store_fails_is_let_go_of_and_taken_with_others_again(
    group: Group,
) -> None:
    group.places = {8: StorageFault("slow down")}
    held, failed, _ = group.hold()
    assert isinstance(held, TableHeld) and failed == Failed(8, 80, is_own=False) and group.released == [8]


def test_what_a_reader_wrote_behind_the_end_of_an_attempt_is_removed_before_the_table_is_held_in_a_group(
    group: Group,
) -> None:
    group.steps._held.outputs[3] = dataclasses.replace(TARGET, directory="snapshot-8")
    group.steps._held.release(Release(8, discarded=3))
    group.hold()
    assert group.discarded == ["snapshot-8", "snapshot-8"]


def test_a_group_is_let_go_of_where_the_driver_is_lost_before_it_is_read(group: Group) -> None:
    group.places = ComponentLost("the driver is starting again")  # type: ignore[assignment]
    assert group.hold() == [Failed(relid, 10 * relid, is_own=False) for relid in (7, 8, 9)]
    assert group.released == [7, 8, 9] and not group.failed


def test_a_table_of_a_group_that_cannot_be_read_has_failed_and_the_others_are_read(group: Group) -> None:
    group.reads = {8: PoisonedChange("table t8 is bad"), 9: ConnectionLost("cut")}
    first, second, third = group.read()
    assert isinstance(first, RangeRead) and first.n_rows == 10
    assert (second, third) == (Failed(8, 80), Failed(9, 90, is_own=False))
    assert not group.failed, "what a bad row does to the run is said when the table is taken alone"


def test_a_table_that_is_read_alone_is_what_its_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, bad = (Group(tmp_path, monkeypatch, [7]) for _ in range(2))
    lost.reads = {7: ConnectionLost("cut")}
    assert lost.read() == [ReaderLost(7, 70, 0)] and not lost.failed
    bad.reads = {7: PoisonedChange("table t7 is bad")}
    assert bad.read() == [] and "snapshot cancel --table public.t7" in bad.failed[0].remedy  # type: ignore[attr-defined]


def test_a_range_whose_reader_was_lost_is_read_again_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, waited_s = Group(tmp_path, monkeypatch, [7]), list[float]()
    monkeypatch.setattr(group.steps._stop, "wait", waited_s.append)
    group.reads = ComponentLost("killed")
    assert group.read() == [ReaderLost(7, 70, 0)] and waited_s == [0.01]


def test_a_range_of_a_table_that_was_given_up_before_its_reader_began_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, monkeypatch, [7])
    group.before_read = lambda: group.steps._held.release(Release(7, discarded=70))
    assert group.read() == [] and not group.failed


@pytest.mark.parametrize("error", [ComponentLost("killed"), SnapshotLost("gone")])
def test_a_group_whose_reader_or_snapshot_is_lost_is_let_go_of_and_taken_together_again(
    group: Group, error: XidstreamError
) -> None:
    """Its tables would be locked until another reader has started."""
    group.reads = error
    assert group.read() == [Failed(relid, 10 * relid, is_own=False) for relid in (7, 8, 9)]


def test_a_group_is_committed_without_those_that_were_not_held_to_the_end_or_whose_files_are_gone(
    group: Group,
) -> None:
    group.confirms = [8, 9]
    group.commits = {9: [SnapshotInterrupted("1 of 1 files were removed")]}
    lost, interrupted, taken = sorted(group.committed(), key=lambda each: isinstance(each, TableTaken))
    assert (lost, interrupted) == (Failed(7, 70, is_own=False), Failed(9, 90))
    assert isinstance(taken, TableTaken) and taken.event == SnapshotCommitted(8, 80)
    assert group.released == [7, 8, 9] and group.asked == [[8, 9]]
    assert [each.generation.relid for each in read_taken(group.storage, LAYOUT)] == [8]


def test_those_of_a_group_that_the_sink_does_not_have_yet_are_asked_for_again_and_the_others_told(
    group: Group,
) -> None:
    """A function gets one table after the other; a store may fail for one of them."""
    group.commits = {7: [False, False], 9: [StorageFault("slow down")]}
    assert [each.generation.relid for each in group.committed()] == [8, 9, 7]
    assert group.asked == [[7, 8, 9], [7, 9], [7]] and not group.failed


def test_a_sink_that_is_ahead_of_the_server_ends_the_run_in_a_group_too(group: Group) -> None:
    group.commits = {8: [SinkDiverged("restored")]}
    assert [each.generation.relid for each in group.committed()] == [7, 9]
    (failed,) = group.failed
    assert isinstance(failed, SinkDiverged) and "snapshot cancel --table public.t8" in failed.remedy


def test_an_error_of_no_table_that_a_person_must_see_ends_the_run_at_the_commit_of_a_group(
    group: Group,
) -> None:
    group.commits = SinkDiverged("another run has taken over")  # type: ignore[assignment]
    assert group.committed() == [] and [type(each) for each in group.failed] == [SinkDiverged]


def test_a_store_that_fails_is_asked_for_the_commits_of_a_group_less_and_less_often_and_a_function_as_before(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    monkeypatch.setattr(group.steps._stop, "wait", waited_s.append)
    monkeypatch.setattr(steps_module, "_LONGEST_PAUSE_S", 0.03)
    group.commits = {8: [StorageFault("down")] * 4, 9: [False] * 7}
    group.committed()
    assert waited_s == [0.01, 0.02, 0.03, 0.03, 0.01, 0.01, 0.01]


def test_a_table_of_a_group_that_is_not_small_under_its_lock_is_left_out_and_let_go(group: Group) -> None:
    """While one published table is locked, a look finds no sizes, and one that was never analyzed looks empty."""
    group.n_bytes = {8: SMALL_BYTES + 8192}
    assert [type(each) for each in group.hold()] == [TableHeld, LeftOut, TableHeld]
    assert group.released == [8] and 80 not in group.steps._held.outputs
