"""Small tables, whose snapshots are taken together: the log of each folds to what the source holds."""

from __future__ import annotations

import threading
import time
from collections import Counter

import psycopg
import pytest

from tests.e2e.conftest import Pipeline
from tests.e2e.test_snapshots import generations, kill, start, until, wait_until_delivered, wait_until_taken
from tests.fold import Log, Row
from xidstream.pipeline import faultpoints
from xidstream.pipeline.errors import SinkDiverged
from xidstream.pipeline.faultpoints import FaultPlan

pytestmark = pytest.mark.e2e
N_TABLES = 60
on_18 = pytest.mark.parametrize("postgres_server", [18], indirect=True)


def make_tables(pipeline: Pipeline) -> list[str]:
    names = [f"s{i:02d}" for i in range(N_TABLES)]
    for i, name in enumerate(names):
        pipeline.database.execute(f"create table {name} (id int primary key, n int)")
        pipeline.database.execute(f"insert into {name} select i, i from generate_series(1, {i}) i")
    pipeline.database.execute("create publication p for all tables")
    return names


def assert_each_is_the_source(pipeline: Pipeline, names: list[str]) -> None:
    lsn = until(pipeline.database)
    wait_until_delivered(pipeline, lsn)
    for name in names:
        rows = Counter(pipeline.database.execute(f"select id, n from {name}"))
        assert in_one_column(Log(pipeline.delta, "public", name).at(lsn)) == rows, name


def in_one_column(state: Counter[Row]) -> Counter[Row]:
    """``(id, n)``. A log whose snapshot began before n's type changed has n in a second column, too."""
    one: Counter[Row] = Counter()
    for (key, *versions), times in state.items():
        (n,) = (value for value in versions if value is not None)
        one[key, n] += times
    return one


def finished(pipeline: Pipeline) -> Counter[tuple[str, int]]:
    lines = generations(pipeline)
    return Counter((line["table"], line["generation"]) for line in lines if line["state"] == "finished")


@pytest.mark.slow
@on_18
def test_a_lock_ddl_a_truncate_a_drop_and_a_lost_holder_amid_groups_leave_each_table_what_the_source_has(
    pipeline: Pipeline,
) -> None:
    database = pipeline.database
    names = make_tables(pipeline)
    over = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            with database.connect() as session:
                n = 0
                while not over.wait(0.005):
                    n += 1
                    session.execute(f"update {names[n % 50]} set n = n + 1 where id % 7 = {n % 7}".encode())
        except psycopg.Error as error:
            failures.append(error)

    with database.connect() as locking:
        writing = threading.Thread(target=write)
        writing.start()
        try:
            start(pipeline)
            pipeline.wait_until_reading()
            locking.execute("begin")
            locking.execute("lock table s51 in access exclusive mode")
            pipeline.wait_until(lambda: sum(finished(pipeline).values()) >= 3)
            database.execute("alter table s55 alter n type bigint")
            database.execute("truncate s56")
            database.execute("drop table s57")
            kill("SnapshotHolder")
            names.remove("s57")
            wait_until_taken(pipeline, N_TABLES - 2)
            assert ("public.s51", 1) not in finished(pipeline), "it is waited for, and holds nobody up"
            locking.execute("rollback")
            wait_until_taken(pipeline, N_TABLES - 1)
            time.sleep(0.5)
        finally:
            over.set()
            writing.join()
    assert not failures
    pipeline.wait_until(
        lambda: {table for table, _ in finished(pipeline)} >= {f"public.{each}" for each in names}
    )
    assert_each_is_the_source(pipeline, names)
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    places = Counter(line["place"] for line in generations(pipeline) if line["state"] == "finished")
    assert max(places.values()) > 8, "most were taken together"
    assert set(finished(pipeline).values()) == {1}


@pytest.mark.slow
@on_18
def test_a_run_that_ends_amid_the_commits_of_a_group_is_followed_by_one_that_has_each_table_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = make_tables(pipeline)
    # The rows of the seventh table are in the sink then, and there is no line about them.
    monkeypatch.setattr(faultpoints, "_plan", FaultPlan("snapshot_committed:error=SinkDiverged@7", None))
    query = start(pipeline)
    with pytest.raises(SinkDiverged):
        query.awaitTermination(120)
    assert len(finished(pipeline)) < N_TABLES
    monkeypatch.setattr(faultpoints, "_plan", None)
    start(pipeline)
    wait_until_taken(pipeline, N_TABLES)
    assert_each_is_the_source(pipeline, names)
    pipeline.query.stop()
    assert finished(pipeline) == Counter((f"public.{name}", 1) for name in names)
