"""A batch loop that fails while reader and sequencer live: only the driver's part begins again, on the same slot."""

from __future__ import annotations

import os
import signal

import pytest

from tests.ray.conftest import RayPipeline, wait_until
from xidstream.actors.supervision import epoch
from xidstream.pipeline.errors import ComponentLost, SegmentCorrupt, StorageFault, XidstreamError

pytestmark = [pytest.mark.ray, pytest.mark.parametrize("postgres_server", [18], indirect=True)]

FILL = "insert into t select i, repeat('x', 100) from generate_series({}::bigint, {}::bigint) i"
LOST = ComponentLost("the Spark driver ended")
AWAY = StorageFault("the sink's store is away")


@pytest.fixture
def one_delivered(pipeline: RayPipeline) -> RayPipeline:
    """It runs, and the sink has rows 1 to 10. The server knows that they are there, so that it never sends them again:
    this sink keeps no position, and would take them twice."""
    database = pipeline.database
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    pipeline.create_slot()
    pipeline.start(logical_decoding_work_mem="64kB")
    database.execute(FILL.format(1, 10))
    wait_until(lambda: pipeline.driver.ids("public.t") == list(range(1, 11)))
    wait_until(lambda: pipeline.driver.transactions)
    end_lsn = pipeline.driver.transactions[-1]["end_lsn"]
    wait_until(lambda: pipeline.confirmed() >= end_lsn)
    return pipeline


def walsender(pipeline: RayPipeline) -> int:
    row = pipeline.database.execute(
        "select active_pid from pg_replication_slots where slot_name = %s", pipeline.slot
    )
    return int(row[0][0])


def pids(pipeline: RayPipeline) -> list[int]:
    assert pipeline.supervisor is not None
    return pipeline.supervisor.pids


@pytest.mark.slow
@pytest.mark.parametrize(
    # Whether another part failed is asked of a reader that lives, unless the driver itself has ended.
    ("error", "failing_starts", "root_cause_s"),
    [
        pytest.param(LOST, 2, 600, id="lost, and two sessions do not start"),
        pytest.param(AWAY, 0, 1, id="alive", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_fails_with_a_batch_in_hand_costs_no_epoch_and_its_batch_comes_once_in_order(
    one_delivered: RayPipeline,
    error: XidstreamError,
    failing_starts: int,
    root_cause_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epoch, "_ROOT_CAUSE_S", root_cause_s)
    pipeline, database = one_delivered, one_delivered.database
    before, sender = pids(pipeline), walsender(pipeline)
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(FILL.format(10_001, 20_000).encode())
        wait_until(lambda: pipeline.open_rows() > 5_000)
        pipeline.driver.failing_starts = failing_starts
        for first in (11, 21):  # the first loop lives on after this one, and the second one fails again
            pipeline.driver.die(error)
            database.execute(FILL.format(first, first + 9))
            wait_until(lambda n=first + 9: n in pipeline.driver.ids("public.t"))
        # The open transaction was not sent again.
        assert pipeline.open_rows() > 5_000
        session.execute(b"commit")
    wait_until(lambda: 20_000 in pipeline.driver.ids("public.t"))
    assert pipeline.driver.ids("public.t") == [*range(1, 31), *range(10_001, 20_001)]
    assert (pids(pipeline), walsender(pipeline)) == (before, sender)
    assert pipeline.driver.n_begun == 3
    told = [notice.partition(";")[0] for notice in pipeline.restarts()]
    assert told == [error.message, *["the session did not start"] * failing_starts, error.message]
    end_lsn = pipeline.driver.transactions[-1]["end_lsn"]
    wait_until(lambda: pipeline.confirmed() >= end_lsn)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(SegmentCorrupt("segment '0.parquet' is missing"), id="stored"),
        pytest.param(
            ComponentLost("the xid buffer ended unexpectedly"), id="in-memory", marks=pytest.mark.slow
        ),
    ],
)
def test_rows_that_cannot_be_read_are_read_again_from_the_slot(
    one_delivered: RayPipeline, error: XidstreamError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_ROOT_CAUSE_S", 1)
    pipeline = one_delivered
    before = pids(pipeline)
    pipeline.driver.die(error, is_lost=False)
    pipeline.database.execute(FILL.format(11, 20))
    wait_until(lambda: pipeline.driver.ids("public.t") == list(range(1, 21)))
    assert pids(pipeline) != before


@pytest.mark.slow
def test_a_second_failure_without_a_batch_in_between_ends_the_epoch(
    one_delivered: RayPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "_ROOT_CAUSE_S", 1)
    pipeline = one_delivered
    before = pids(pipeline)
    pipeline.driver.die(AWAY, AWAY)
    pipeline.database.execute(FILL.format(11, 20))
    wait_until(lambda: pipeline.driver.ids("public.t") == list(range(1, 21)))
    assert pids(pipeline) != before
    assert len(pipeline.restarts()) == 2


@pytest.mark.slow
def test_a_buffer_that_died_is_told_and_not_what_the_sink_saw_of_it(one_delivered: RayPipeline) -> None:
    pipeline = one_delivered
    before = pids(pipeline)
    pipeline.driver.die(AWAY)
    os.kill(before[1], signal.SIGKILL)
    pipeline.database.execute(FILL.format(11, 20))
    wait_until(lambda: pipeline.driver.ids("public.t") == list(range(1, 21)))
    assert pids(pipeline) != before
    assert "xid buffer" in pipeline.restarts()[0]
