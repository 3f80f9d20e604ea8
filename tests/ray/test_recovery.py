"""What dies besides reader, buffer and sequencer, without a JVM: the server, the hard way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline, wait_until
from tests.ray.test_pipeline import NEWEST
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ComponentLost

pytestmark = pytest.mark.ray

FILL = "insert into t select i, repeat('x', 100) from generate_series({}::bigint, {}::bigint) i"


@pytest.fixture
def crashing(own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path) -> Iterator[RayPipeline]:
    # With fsync: what a server without it has acknowledged may be gone after a crash, and rightly so.
    server = own_postgres(settings={"fsync": "on"})
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        made = RayPipeline(Database(server, "postgres", connection), tmp_path)
        yield made
        made.stop()


@pytest.mark.slow
def test_a_server_that_stops_at_once_costs_a_new_epoch_and_no_row_when_it_is_back(
    crashing: RayPipeline,
) -> None:
    database = crashing.database
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    crashing.start(buffer_memory_bytes="1MB", block_bytes=256 << 10)
    database.execute(FILL.format(1, 1000))
    wait_until(lambda: len(crashing.driver.transactions) == 1)
    doomed = database.connect()
    doomed.execute("begin")
    doomed.execute(FILL.format(100_001, 150_000).encode())
    wait_until(lambda: crashing.open_rows() > 20_000)
    confirmed = crashing.confirmed()
    database.server.restart("immediate")
    doomed.close()
    with psycopg.connect(database.dsn(), autocommit=True) as connection:
        database.connection = connection
        database.execute(FILL.format(1001, 2000))
        wait_until(lambda: 2000 in crashing.driver.ids("public.t"))
        # The crash may take the slot back to an older position than it was told. This sink has no watermark, so it
        # sees what is repeated: the same rows under the same commit LSN and _seq, by which a sink drops them.
        once = {(r["_commit_lsn"], r["_seq"]): r["id"] for r in crashing.driver.rows("public.t")}
        assert list(once.values()) == list(range(1, 2001))
        assert len(crashing.notices) >= 1
        wait_until(lambda: crashing.confirmed() > confirmed and not crashing.segments())


@NEWEST
def test_a_driver_that_dies_after_its_first_batches_is_not_taken_for_one_that_never_worked(
    pipeline: RayPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its progress died with it, so a later failure ended the run: seen under `make chaos`."""
    monkeypatch.setattr("xidstream.pipeline.restarts.GIVE_UP_BEFORE_ANY_WORKED_S", 0.0)
    database = pipeline.database
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    supervisor = pipeline.start()
    database.execute(FILL.format(1, 10))
    wait_until(lambda: supervisor._retries.restarts.took_batch)
    pipeline.driver.die(ComponentLost("the driver was told to die"))
    database.execute(FILL.format(11, 20))
    wait_until(lambda: pipeline.error is not None or len(pipeline.driver.transactions) == 2)
    assert pipeline.error is None and pipeline.driver.n_begun == 2


@NEWEST
def test_drivers_that_die_right_behind_each_first_batch_do_not_end_a_run_that_moves_on(
    pipeline: RayPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody saw a batch counted, so the run gave up although each epoch had delivered one."""
    monkeypatch.setattr("xidstream.pipeline.restarts.GIVE_UP_BEFORE_ANY_WORKED_S", 0.01)
    database = pipeline.database
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    pipeline.driver.deaths_before_count = 2
    pipeline.start()
    for n in (1, 2, 3):
        database.execute(FILL.format(n, n))
        wait_until(lambda n=n: pipeline.error is not None or len(pipeline.driver.transactions) == n)
        assert pipeline.error is None
    assert [r["id"] for r in pipeline.driver.rows("public.t")] == [1, 2, 3]
