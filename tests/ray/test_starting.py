"""While the parts start: what is waited for is told, and one that fails does not start the others anew."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

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


@NEWEST
def test_a_reader_that_waits_and_fails_while_the_driver_starts_is_told_and_the_driver_goes_on_starting(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_TELL_WAITING_AFTER_S", 2.0)
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
