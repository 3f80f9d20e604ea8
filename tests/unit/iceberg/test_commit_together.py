"""Several Iceberg tables in one request of a REST catalog: all of a batch is visible at once, or none of it.

The sink is the whole one, over HTTP, without Spark: small batches need none. The server has one transaction of SQLite
after a request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.iceberg_rest import IcebergRestServer
from tests.lakes import TogetherLake
from tests.spark.support import (
    IDENTITY,
    INT8,
    TEXT,
    LocalSegments,
    Transaction,
    batch_of,
    memory_frame,
    put_memory,
    read_memory,
    relation,
)
from tests.unit.iceberg.test_iceberg_table import written
from xidstream.pipeline import faultpoints
from xidstream.pipeline.errors import SinkFailed, StorageFault, Superseded, XidstreamError
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg import expiring
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks import batch_commits
from xidstream.pipeline.sinks.iceberg_sink import IcebergSink
from xidstream.pipeline.spark.frames import SinkBatch

A = relation("public.a", ("id", INT8), ("name", TEXT), relid=1)
B = relation("public.b", ("id", INT8), ("name", TEXT), relid=2)
TABLES = ("public__a", "public__b", "_transactions")


def transaction(lsn: int) -> Transaction:
    rows = [{"id": lsn, "name": "x"}]
    return Transaction(lsn, [(A, rows), (B, rows)])


class World:
    """A catalog behind HTTP, and the runs that write to it."""

    def __init__(self, root: Path, *, together: bool) -> None:
        self.root = root
        self.server = IcebergRestServer(root, together=together)
        self.segments = LocalSegments(str(root / "segments"))
        self.sinks: list[IcebergSink] = []

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.server.stop()

    def run(self) -> IcebergSink:
        """The next run of the slot."""
        sink = IcebergSink(IcebergAddress.parse("prod/shop"), IDENTITY, commit_every_s=0)
        sink.open(self._no_spark)
        self.sinks.append(sink)
        number = len(self.sinks)
        sink.claim(Tenure(number, f"epoch-{number}", 1, {}, Lsn(10_000)))
        return sink

    def _no_spark(self) -> Any:
        raise AssertionError("nothing here needs Spark")

    def batch(self, *lsns: int) -> SinkBatch:
        return SinkBatch(
            batch_of([transaction(lsn) for lsn in lsns], self.segments, 0),
            self._no_spark,
            memory_frame,
            self.segments,
            read_memory,
            put_memory,
            self.segments.storage,
        )

    def lsns(self, key: str) -> list[int]:
        """The commits in a table, to whoever reads it now: without HTTP, also while a request is answered."""
        column = "commit_lsn" if key == "_transactions" else "_commit_lsn"
        rows = self.server.catalog.load_table(f"shop.{key}").scan(selected_fields=(column,)).to_arrow()
        return sorted(rows[column].to_pylist())

    def seen(self) -> list[list[int]]:
        return [self.lsns(key) for key in TABLES]

    def theirs(self, key: str, moved: dict[str, int], *ids: int) -> None:
        """Another program, or another run, commits to a table meanwhile."""
        table = self.server.catalog.load_table(f"shop.{key}")
        handle = IcebergTableWriter(table, Location.parse(table.location()), key)
        files = written(handle, 9_000, *ids) if ids else []
        versions = {name: version for name, version in moved.items() if ids}
        handle.commit(files, versions, marks={} if ids else moved)

    def orphans(self) -> set[str]:
        """Manifests, and lists of them, that no snapshot names."""
        left: set[str] = set()
        for key in TABLES:
            table = self.server.catalog.load_table(f"shop.{key}")
            folder = table.location().removeprefix("file://") + "/metadata"
            named = {each.manifest_list for each in table.snapshots()}
            named |= {m.manifest_path for each in table.snapshots() for m in each.manifests(table.io)}
            there = {name for name in os.listdir(folder) if name.endswith(".avro")}
            left |= there - {os.path.basename(path) for path in named}
        return left


@pytest.fixture
def world_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*, together: bool = True) -> World:
        world = World(tmp_path, together=together)
        monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "rest")
        monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", world.server.uri)
        made.append(world)
        return world

    yield make
    for each in made:
        each.close()


@pytest.fixture
def world(world_of: Callable[..., World]) -> World:
    """With both tables, and one commit in each."""
    made = world_of()
    made.run().write(made.batch(100))
    return made


def fail_at(patch: pytest.MonkeyPatch, step: str) -> None:
    patch.setattr(faultpoints, "_plan", FaultPlan(f"{step}:error", None))


def test_no_reader_finds_one_table_of_a_transaction_without_the_other(world: World) -> None:
    seen: list[list[list[int]]] = []
    world.server.changed = lambda: seen.append(world.seen())
    sink, n_before = world.sinks[0], world.server.n_transactions
    sink.write(world.batch(110, 120))
    world.server.changed = lambda: None
    sink.write(world.batch(130))
    # Three tables were changed in the first request, and the look is at each change.
    assert seen == [[[100]] * 3] * 3
    assert world.seen() == [[100, 110, 120, 130]] * 3
    assert world.server.n_transactions == n_before + 2
    assert sink.watermark() == 130 and world.orphans() == set()


def test_a_server_that_does_not_offer_it_gets_each_table_by_itself_and_transactions_last(
    world_of: Callable[..., World],
) -> None:
    world = world_of(together=False)
    sink = world.run()
    sink.write(world.batch(100))
    seen: list[list[list[int]]] = []
    world.server.changed = lambda: seen.append(world.seen())
    sink.write(world.batch(110))
    assert [each[2] for each in seen] == [[100], [100], [100, 110]]
    assert [100] in seen[0][:2] and [100, 110] in seen[0][:2], "one table is ahead of the other"
    assert world.seen() == [[100, 110]] * 3 and world.server.n_transactions == 0


@pytest.mark.parametrize("why", ["the property", "too many tables"])
def test_each_table_is_committed_by_itself_where_the_catalog_says_so_or_a_batch_has_too_many(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    world = world_of()
    if why == "the property":
        monkeypatch.setenv("PYICEBERG_CATALOG__PROD__XIDSTREAM__TRANSACTIONS_COMMIT", "false")
    else:
        monkeypatch.setattr(batch_commits, "MOST_TOGETHER", 1)
    world.run().write(world.batch(100, 110))
    assert world.seen() == [[100, 110]] * 3 and world.server.n_transactions == 0


def test_a_harmless_change_of_one_table_leaves_all_as_they_were_and_is_gone_behind(world: World) -> None:
    looks: list[list[list[int]]] = []

    def before() -> None:
        looks.append(world.seen())
        if len(looks) == 1:
            world.theirs("public__b", {"another/slot": 9_000}, 9_000)

    world.server.before = before
    world.sinks[0].write(world.batch(110))
    assert looks == [[[100]] * 3, [[100], [100, 9_000], [100]]]
    assert world.seen() == [[100, 110], [100, 110, 9_000], [100, 110]]
    assert world.orphans() == set()


def test_a_run_that_was_taken_over_meanwhile_adds_nothing_to_any_table(world: World) -> None:
    def before() -> None:
        world.server.before = lambda: None
        world.theirs("_transactions", {f"{IDENTITY.application_id}/owner": 2})

    world.server.before = before
    with pytest.raises(Superseded):
        world.sinks[0].write(world.batch(110))
    assert world.seen() == [[100]] * 3 and world.orphans() == set()


def test_a_column_that_somebody_adds_meanwhile_has_the_batch_written_anew(world: World) -> None:
    def before() -> None:
        world.server.before = lambda: None
        from pyiceberg.types import StringType

        table = world.server.catalog.load_table("shop.public__a")
        with table.update_schema() as change:
            change.add_column("theirs", StringType())
        world.theirs("public__a", {"another/slot": 9_000}, 9_000)

    world.server.before = before
    world.sinks[0].write(world.batch(110))
    assert world.seen() == [[100, 110, 9_000], [100, 110], [100, 110]]


@pytest.mark.parametrize(
    ("step", "is_done"),
    [
        ("committing_table", False),
        ("iceberg_committing", False),
        ("committing_transactions", False),
        ("iceberg_tables_committed", True),
        ("transactions_committed", True),
    ],
)
def test_a_crash_between_two_steps_leaves_all_tables_with_the_batch_or_none(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    fail_at(monkeypatch, step)
    with pytest.raises(XidstreamError):
        world.sinks[0].write(world.batch(110, 120))
    assert world.seen() == [[100, 110, 120] if is_done else [100]] * 3
    next_run = world.run()
    assert next_run.watermark() == (120 if is_done else 100)
    next_run.write(world.batch(110))
    next_run.write(world.batch(120, 130))
    assert world.seen() == [[100, 110, 120, 130]] * 3


def test_an_answer_that_was_lost_is_found_by_the_watermarks(world: World) -> None:
    world.server.n_to_lose = 1
    with pytest.raises(StorageFault, match="does not answer"):
        world.sinks[0].write(world.batch(110))
    assert world.seen() == [[100, 110]] * 3
    world.sinks[0].write(world.batch(110, 120))
    assert world.seen() == [[100, 110, 120]] * 3


@pytest.mark.parametrize("others_came", [False, True])
def test_a_commit_that_was_done_and_answered_as_one_that_lost_a_race_is_found(
    world: World, others_came: bool
) -> None:
    """A proxy had sent it again, after an answer that was lost. The manifests were removed from under the tables."""
    world.server.answers_after = [409]
    if others_came:

        def after() -> None:
            world.server.after = lambda: None
            world.theirs("public__b", {"another/slot": 9_000}, 9_000)

        world.server.after = after
    sink = world.sinks[0]
    sink.write(world.batch(110))
    more = [9_000] if others_came else []
    assert world.seen() == [[100, 110], [100, 110, *more], [100, 110]] and world.orphans() == set()
    sink.write(world.batch(120))
    assert world.seen() == [[100, 110, 120], [100, 110, 120, *more], [100, 110, 120]]
    assert world.server.n_transactions == 3


def test_a_server_that_took_some_of_the_tables_and_refused_the_rest_has_nothing_removed(
    world: World,
) -> None:
    world.server.takes_only = 1
    with pytest.raises(StorageFault):
        world.sinks[0].write(world.batch(110))
    world.server.takes_only = None
    assert world.seen().count([100, 110]) == 1
    world.sinks[0].write(world.batch(110, 120))
    assert world.seen() == [[100, 110, 120]] * 3


def test_a_token_that_has_run_out_is_renewed_once(world: World) -> None:
    world.server.refusals = [401]
    world.sinks[0].write(world.batch(110))
    assert world.seen() == [[100, 110]] * 3


@pytest.mark.parametrize("status", [400, 413, 501])
def test_a_catalog_that_takes_no_such_request_ends_the_run_with_the_way_out(
    world: World, status: int
) -> None:
    world.server.refusals = [status]
    with pytest.raises(SinkFailed, match=f"HTTP {status}") as error:
        world.sinks[0].write(world.batch(110))
    assert "xidstream.transactions-commit" in error.value.remedy
    assert world.seen() == [[100]] * 3


def test_old_snapshots_and_metadata_go_and_manifests_are_merged_in_the_same_request(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", 4)
    monkeypatch.setattr(expiring, "KEPT_SNAPSHOTS", 2)
    world = world_of()
    sink = world.run()
    sink.write(world.batch(100))
    for key in TABLES:
        with world.server.catalog.load_table(f"shop.{key}").transaction() as change:
            change.set_properties({"commit.manifest.min-count-to-merge": "3"})
    lsns = range(110, 230, 10)
    for lsn in lsns:
        sink.write(world.batch(lsn))
    assert world.seen() == [[100, *lsns]] * 3
    for key in TABLES:
        table = world.server.catalog.load_table(f"shop.{key}")
        names = os.listdir(table.location().removeprefix("file://") + "/metadata")
        assert len(table.snapshots()) <= 6 and len(table.current_snapshot().manifests(table.io)) <= 3
        assert sum(name.endswith(".metadata.json") for name in names) <= 6
        written = [name for name in names if name.endswith(".avro") and not name.startswith("snap-")]
        # A merge writes the commit's own manifest first, which nobody names: it is gone.
        assert len(written) <= len(lsns) + 1 + 1
    assert sum(len(each) for each in world.seen()) == 3 * (len(lsns) + 1)


@pytest.mark.parametrize("together", [True, False])
def test_the_judge_of_chaos_rounds_condemns_a_table_that_is_ahead_of_transactions(
    world_of: Callable[..., World], together: bool
) -> None:
    world = world_of(together=together)
    lake = TogetherLake(world.server, "shop")
    sink = world.run()
    world.server.changed = lambda: lake.holds("_transactions")
    sink.write(world.batch(100))
    sink.write(world.batch(110))
    if together:
        assert lake.torn() == []
    else:
        assert lake.torn()[0].endswith("and _transactions 0")


def test_an_overloaded_catalog_is_asked_again_later(world: World) -> None:
    world.server.refusals = [503]
    with pytest.raises(StorageFault, match="ServiceUnavailableError"):
        world.sinks[0].write(world.batch(110))
    world.sinks[0].write(world.batch(110))
    assert world.seen() == [[100, 110]] * 3
