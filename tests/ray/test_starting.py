"""While the parts start: what is waited for is told, and one that fails does not start the others anew."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import ray

from tests.postgres_fixtures import Database
from tests.ray.conftest import CollectingDriver, RayPipeline, wait_until
from xidstream.actors.supervision import epoch
from xidstream.actors.supervision.supervisor import Supervisor

NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
CREATING = "select pid from pg_locks where locktype = 'transactionid' and not granted"


@ray.remote
class Gate:
    """Something that starts for as long as nobody lets it."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def wait(self) -> None:
        self._open.wait()

    def open(self) -> None:
        self._open.set()


class SlowDriver(CollectingDriver):
    def __init__(self, storage_uri: str, gate: Any) -> None:
        super().__init__(storage_uri)
        self._gate = gate
        self.n_starts = self.n_closed = 0

    replaceable = True

    def start(self) -> Any:
        self.n_starts += 1
        return self._gate.wait.remote()

    def close(self) -> None:
        self.n_closed += 1


class Starting(NamedTuple):
    pipeline: RayPipeline
    driver: SlowDriver
    supervisor: Supervisor
    gate: Any


@pytest.mark.slow
@NEWEST
def test_a_reader_that_waits_and_fails_while_the_driver_starts_is_told_and_the_driver_goes_on_starting(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_TELL_WAITING_AFTER_S", 2.0)
    # The reader's process itself may take longer than that to start: then there is nothing to tell yet.
    monkeypatch.setattr(epoch, "_TELL_AGAIN_AFTER_S", 600.0)
    database.execute("create table t (id bigint primary key)")
    database.execute("create publication p for table t")
    pipeline = RayPipeline(database, tmp_path)
    driver = SlowDriver(str(pipeline.storage), Gate.options(num_cpus=0, max_concurrency=4).remote())
    notices: list[str] = []
    supervisor = Supervisor(pipeline.config(), lambda: driver, notify=notices.append)
    with psycopg.connect(database.dsn()) as other:
        other.execute("insert into t values (1)")
        run = threading.Thread(target=supervisor.run, daemon=True)
        run.start()
        wait_until(lambda: any("can be created" in notice for notice in notices))
        assert "open transaction" in notices[-1]
        (creating,) = database.execute(CREATING)
        database.execute("select pg_terminate_backend(%s)", *creating)
        wait_until(lambda: database.execute(CREATING) not in ([], [creating]))
        assert any("starting again" in notice for notice in notices)
        assert (driver.n_starts, driver.n_closed) == (1, 0)
        supervisor.stop()
        run.join(60)
        assert not run.is_alive()
        # The other transaction is open still: nobody waits for it any more, and no slot is left.
        wait_until(lambda: database.execute("select count(*) from pg_replication_slots") == [(0,)])
    assert driver.n_closed == 1


@pytest.fixture
def starting(database: Database, tmp_path: Path) -> Iterator[Starting]:
    """It reads, and its session starts until the gate is opened."""
    database.execute("create table t (id bigint primary key)")
    database.execute("create publication p for table t")
    pipeline = RayPipeline(database, tmp_path)
    pipeline.create_slot()
    gate = Gate.options(num_cpus=0, max_concurrency=4).remote()  # type: ignore[attr-defined]
    driver = SlowDriver(str(pipeline.storage), gate)
    pipeline.driver = driver
    yield Starting(pipeline, driver, pipeline.start(), gate)
    pipeline.stop()


@NEWEST
def test_reading_begins_while_the_session_still_starts_and_the_first_batch_has_what_was_read(
    database: Database, starting: Starting
) -> None:
    pipeline, driver, supervisor, gate = starting
    wait_until(lambda: supervisor.status().account.reader is not None)
    database.execute("insert into t select generate_series(1, 100)")
    wait_until(lambda: (s := supervisor.status().account).sequencer is not None and s.sequencer.n_waiting > 0)
    status = supervisor.status()
    assert (status.run.state, status.run.waiting_for) == ("reading", ("the Spark session",))
    assert driver.n_begun == 0
    ray.get(gate.open.remote())
    wait_until(lambda: driver.ids("public.t") == list(range(1, 101)))
    wait_until(lambda: supervisor.status().run.waiting_for == ())
    assert pipeline.notices == [] and driver.n_begun == 1
    pipeline.stop()
    assert pipeline.error is None


@pytest.mark.slow
@NEWEST
def test_a_reader_that_dies_while_the_session_starts_costs_an_epoch_and_no_session(
    database: Database, starting: Starting
) -> None:
    pipeline, driver, supervisor, gate = starting
    wait_until(lambda: supervisor.status().run.waiting_for == ("the Spark session",))
    database.execute("insert into t values (1)")
    pids = supervisor.pids
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: supervisor.pids and supervisor.pids != pids)
    ray.get(gate.open.remote())
    wait_until(lambda: driver.ids("public.t") == [1])
    assert (driver.n_starts, driver.n_begun, len(pipeline.restarts())) == (1, 1, 1)


@pytest.mark.slow
@NEWEST
def test_a_run_stopped_while_it_reads_and_its_session_starts_ends_in_order(
    database: Database, starting: Starting
) -> None:
    pipeline, driver, supervisor, _ = starting
    wait_until(lambda: supervisor.status().account.reader is not None)
    pipeline.stop()
    assert pipeline.error is None and driver.n_closed == 1 and pipeline.notices == []
    wait_until(lambda: not database.execute("select active from pg_replication_slots")[0][0])
    # Nothing was taken from the slot that nobody has.
    database.execute("insert into t select generate_series(1, 100)")
    pipeline.driver = CollectingDriver(str(pipeline.storage))
    pipeline.run_available()
    assert pipeline.driver.ids("public.t") == list(range(1, 101))
