"""Several slots at once: each with its own reader, sequencer and order, and one cap on their buffers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import psycopg
import pytest
import ray
from psycopg import sql

from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline, wait_until
from xidstream.actors.reader.buffer_quota import QuotaShare, start_quota

pytestmark = pytest.mark.ray
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
FILL = "insert into big select i, repeat('x', 100) from generate_series({}::bigint, {}::bigint) i"


@pytest.mark.slow
@NEWEST
def test_slots_share_one_cap_on_buffers_and_a_lost_one_leaves_the_other_its_order(
    database: Database, tmp_path: Path
) -> None:
    other_name = f"{database.name}_other"
    database.connection.execute(sql.SQL("create database {}").format(sql.Identifier(other_name)))
    with psycopg.connect(database.server.conninfo(other_name), autocommit=True) as connection:
        databases = [database, Database(database.server, other_name, connection)]
        quota = start_quota(3, 2)
        pipelines = [RayPipeline(d, tmp_path / d.name, quota) for d in databases]
        try:
            _one_is_lost(databases, pipelines)
        finally:
            for pipeline in pipelines:
                pipeline.stop()
            ray.kill(quota)
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
                [other_name],
            )


def _one_is_lost(databases: list[Database], pipelines: list[RayPipeline]) -> None:
    settings = {"logical_decoding_work_mem": "64kB", "block_bytes": 64 << 10, "buffers_max": 3}
    for database, pipeline in zip(databases, pipelines, strict=True):
        database.execute("create table big (id bigint primary key, note text)")
        database.execute("create publication p for table big")
        pipeline.start(buffers_idle_s=0, **settings)
    first, second = pipelines
    sessions = [[d.connect() for _ in range(3)] for d in databases]

    def fill(of: int, part: int) -> None:
        for n, session in enumerate(sessions[of]):
            start = n * 100_000 + part * 5000
            session.execute(FILL.format(start + 1, start + 5000).encode())

    def n_buffers(pipeline: RayPipeline) -> int:
        reader = pipeline.supervisor.status().account.reader if pipeline.supervisor else None
        return 0 if reader is None else reader.n_buffers + reader.n_buffers_asked

    try:
        for of in (0, 1):
            for session in sessions[of]:
                session.execute(b"begin")
        fill(0, 0)
        wait_until(lambda: n_buffers(first) == 2)
        fill(1, 0)
        wait_until(lambda: second.open_rows() > 3 * 4000)
        assert n_buffers(first) + n_buffers(second) == 3
        # The first slot's reader dies: its share is free for the second, and taken back when that has ended.
        assert first.supervisor is not None
        pids = first.supervisor.pids
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: n_buffers(second) == 2)
        fill(1, 1)
        for session in sessions[1]:
            session.execute(b"commit")
        wait_until(lambda: len(second.driver.transactions) == 3)
        wait_until(lambda: n_buffers(first) == 2)
        fill(0, 1)
        for session in sessions[0]:
            session.execute(b"commit")
        wait_until(lambda: len(first.driver.transactions) == 3)
    finally:
        for session in sessions[0] + sessions[1]:
            session.close()
    expected = [n * 100_000 + i for n in range(3) for i in range(1, 10_001)]
    for pipeline in pipelines:
        assert [r["id"] for r in pipeline.driver.rows("public.big")] == expected
    assert any("starting again" in n for n in first.notices)
    assert not any("starting again" in n for n in second.notices)


def test_a_lost_quota_is_started_again_and_costs_no_epoch() -> None:
    """Every reader that asked it anything ended with ComponentLost, in each of its epochs."""
    quota = start_quota(6, 2)
    share = QuotaShare(quota, "a", 1)
    wait_until(lambda: share.allowed(3) == 3)
    victim = psutil.Process(ray.get(quota.pid.remote()))
    victim.kill()
    wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: share.allowed(5) == 5)
    ray.kill(quota)
