"""Ray's own autoscaler, asked for nodes by open transactions, and by Spark's waiting tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Autoscaled, Recorder, n_nodes
from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline, wait_until
from xidstream.pipeline.settings.config import Config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)

FILL = "insert into big select i, repeat('x', 100) from generate_series({}::bigint, {}::bigint) i"


@pytest.fixture
def pipeline(autoscaled: Autoscaled, database: Database, tmp_path: Path) -> Iterator[RayPipeline]:
    made = RayPipeline(database, tmp_path)
    yield made
    made.stop()


@NEWEST
@pytest.mark.parametrize("autoscaled", [{"CPU": 1, "txn_buffer": 2}], indirect=True)
def test_nodes_come_with_open_transactions_and_go_when_they_end(
    pipeline: RayPipeline, autoscaled: Autoscaled
) -> None:
    database = pipeline.database
    database.execute("create table big (id bigint primary key, note text)")
    database.execute("create table small (id int primary key)")
    database.execute("create publication p for table big, small")
    supervisor = pipeline.start(
        logical_decoding_work_mem="64kB",
        block_bytes=64 << 10,
        buffer_memory_bytes="4MB",
        buffers_min=1,
        buffers_max=7,
        buffer_resource="txn_buffer",
        buffers_idle_s=5,
    )

    def measure() -> tuple[int, ...]:
        reader = supervisor.status().account.reader
        numbers = (0, 0, 0) if reader is None else (reader.n_open, reader.n_buffers, reader.n_buffers_asked)
        return (n_nodes(), *numbers, len(pipeline.driver.transactions))

    recorder = Recorder(("nodes", "open", "buffers", "asked for", "committed"), measure)
    stop_small = threading.Event()
    n_small = 0

    def keep_committing() -> None:
        nonlocal n_small
        with database.connect() as session:
            while not stop_small.wait(0.5):
                n_small += 1
                session.execute(f"insert into small values ({n_small})".encode())

    small = threading.Thread(target=keep_committing)
    sessions = [database.connect() for _ in range(16)]
    try:
        wait_until(lambda: supervisor.status().account.reader is not None)
        assert n_nodes() == 1
        small.start()
        for n, session in enumerate(sessions):
            session.execute(b"begin")
            session.execute(FILL.format(n * 100_000 + 1, n * 100_000 + 3000).encode())
        rows = 3000
        deadline_s = time.monotonic() + 240
        # They go on writing all the while that nodes are asked for and come.
        while (
            (reader := supervisor.status().account.reader) is None
            or reader.n_buffers < 7
            or reader.n_moved < 6
        ):
            assert time.monotonic() < deadline_s, recorder.rows
            for n, session in enumerate(sessions):
                session.execute(FILL.format(n * 100_000 + rows + 1, n * 100_000 + rows + 200).encode())
            rows += 200
        assert n_nodes() == 4
        for n, session in enumerate(sessions):
            session.execute(FILL.format(n * 100_000 + rows + 1, n * 100_000 + rows + 3000).encode())
        rows += 3000
        committed = [n for n in reversed(range(16)) if n % 4]
        for n in reversed(range(16)):
            sessions[n].execute(b"commit" if n in committed else b"rollback")
        # Back to the head alone, though small transactions go on; and on record.
        wait_until(lambda: recorder.last("nodes") == 1, 240)
        stop_small.set()
        small.join()
        wait_until(lambda: len(pipeline.driver.transactions) == len(committed) + n_small)
    finally:
        stop_small.set()
        for session in sessions:
            session.close()
        recorder.end("autoscaling")
    big = [r["id"] for r in pipeline.driver.rows("public.big")]
    assert big == [n * 100_000 + i for n in committed for i in range(1, rows + 1)]
    assert [r["id"] for r in pipeline.driver.rows("public.small")] == list(range(1, n_small + 1))
    assert pipeline.restarts() == []
    nodes = [row[1] for row in recorder.rows]
    assert nodes[0] == nodes[-1] == 1 and set(nodes[nodes.index(4) :]) >= {4, 1}
    # Small transactions went through while buffers were asked for that no node had room for.
    asked = [row for row in recorder.rows if row[4] > 0]
    assert asked[-1][5] > asked[0][5]


@pytest.mark.parametrize("autoscaled", [{"CPU": 1, "executor": 1, "memory": 2 << 30}], indirect=True)
def test_executors_come_while_tasks_wait_and_go_when_idle(autoscaled: Autoscaled) -> None:
    from xidstream.actors.driver.session import start_spark, stop_spark

    config = Config(
        spark_executors=1,
        spark_executors_max=3,
        spark_executors_idle_s=5,
        spark_executor_cores=1,
        spark_conf={"spark.ray.raydp_spark_executor.actor.resource.executor": "1"},
    )
    with ExitStack() as stack:
        stack.callback(stop_spark)
        spark = start_spark(config, "xidstream-autoscaling")
        _grow_and_shrink(spark)


def _grow_and_shrink(spark: Any) -> None:
    executors = spark.sparkContext._jsc.sc()
    recorder = Recorder(
        ("nodes", "executors"), lambda: (n_nodes(), executors.getExecutorMemoryStatus().size() - 1)
    )

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        for batch in batches:
            time.sleep(2)
            yield batch

    most_nodes = 0
    try:
        wait_until(lambda: n_nodes() == 2)
        job = threading.Thread(
            target=lambda: spark.range(0, 60, 1, 60).mapInArrow(slowly, "id long").collect(), daemon=True
        )
        job.start()
        while job.is_alive():
            most_nodes = max(most_nodes, n_nodes())
            job.join(0.5)
        wait_until(lambda: recorder.last("nodes") == 2, 180)
        assert executors.getExecutorMemoryStatus().size() - 1 == 1
    finally:
        recorder.end("executors")
    assert most_nodes == 4
