"""The way to the server is lost in every manner; the slot, the publication and the server are not what they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres_fixtures import Database
from tests.proxies import Link
from tests.ray.conftest import RayPipeline, wait_until
from tests.ray.test_pipeline import NEWEST, set_up
from tests.ray.test_storage_faults import deliver_one, ids
from xidstream.pipeline.errors import SlotLost

pytestmark = pytest.mark.ray


@pytest.fixture
def link(database: Database) -> Iterator[Link]:
    server = database.server
    made = Link(server.socket_dir / f".s.PGSQL.{server.port}")
    yield made
    made.close()


def through(link: Link, database: Database) -> str:
    return database.dsn(host="127.0.0.1", port=link.port, connect_timeout=2)


def is_read(pipeline: RayPipeline) -> bool:
    rows = pipeline.database.execute(
        "select active from pg_replication_slots where slot_name = %s", pipeline.slot
    )
    return bool(rows and rows[0][0])


@pytest.mark.slow
@NEWEST
def test_a_link_that_is_cut_flaps_and_goes_half_open_loses_nothing(pipeline: RayPipeline, link: Link) -> None:
    database = pipeline.database
    set_up(database)
    pipeline.start(dsn=through(link, database), receive_timeout_ms=2000, status_interval_ms=500)
    deliver_one(pipeline, 1)

    link.freeze()
    database.execute("insert into small values (2)")
    wait_until(lambda: any("silent" in notice for notice in pipeline.notices))
    assert ids(pipeline, "public.small") == [1]
    link.mend()
    wait_until(lambda: 2 in ids(pipeline, "public.small"))

    for number in range(3, 5):
        attempts = link.n_accepted
        link.cut()
        database.execute(f"insert into small values ({number})")
        wait_until(lambda: link.n_accepted > attempts)  # noqa: B023 - awaited before the next round
        link.mend()
    wait_until(lambda: 4 in ids(pipeline, "public.small"))
    assert ids(pipeline, "public.small") == [1, 2, 3, 4]
    last = pipeline.driver.transactions[-1]["end_lsn"]
    wait_until(lambda: pipeline.confirmed() >= last)
    assert pipeline.error is None


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "fate",
    [
        "dropped",
        pytest.param("recreated", marks=pytest.mark.nightly),
        pytest.param("invalidated", marks=pytest.mark.nightly),
    ],
)
def test_a_slot_that_is_lost_while_the_link_is_down_ends_the_run_and_none_is_made(
    pipeline: RayPipeline, link: Link, fate: str
) -> None:
    database = pipeline.database
    set_up(database)
    if fate == "invalidated":
        database.execute("alter system set max_slot_wal_keep_size = '1MB'")
        database.execute("select pg_reload_conf()")
    try:
        pipeline.start(dsn=through(link, database), create_slot=True)
        deliver_one(pipeline, 1)
        link.cut()
        wait_until(lambda: not is_read(pipeline))
        database.execute("insert into small values (2)")
        if fate == "invalidated":
            for _ in range(4):
                database.execute("select pg_logical_emit_message(false, 'x', repeat('x', 1000000))")
                database.execute("select pg_switch_wal()")
                database.execute("checkpoint")
        else:
            database.execute("select pg_drop_replication_slot(%s)", pipeline.slot)
        if fate == "recreated":
            database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.slot)
        link.mend()
        says = {
            "dropped": "does not exist any more",
            "recreated": "went elsewhere",
            "invalidated": "invalidated",
        }
        with pytest.raises(SlotLost, match=says[fate]) as caught:
            pipeline.join()
        assert "snapshot" in caught.value.remedy
        slots = database.execute("select 1 from pg_replication_slots where slot_name = %s", pipeline.slot)
        assert bool(slots) == (fate != "dropped"), "no new slot hides that the old one is gone"
        assert ids(pipeline, "public.small") == [1]
    finally:
        database.execute("alter system reset max_slot_wal_keep_size")
        database.execute("select pg_reload_conf()")


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "again", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["once", "in-the-next-run-too"]
)
def test_a_publication_that_vanishes_is_terminal_though_it_is_made_again(
    pipeline: RayPipeline, again: bool
) -> None:
    database = pipeline.database
    set_up(database)
    pipeline.start()
    deliver_one(pipeline, 1)
    confirmed = pipeline.confirmed()
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(b"drop publication p")
        session.execute(b"commit")
        session.execute(b"insert into small values (2)")
        session.execute(b"create publication p for table small")
        session.execute(b"insert into small values (3)")
    with pytest.raises(SlotLost, match='publication "p"'):
        pipeline.join()
    lost = database.execute("select pg_current_wal_lsn() - '0/0'")[0][0]
    assert confirmed <= pipeline.confirmed() < lost
    if again:
        with pytest.raises(SlotLost, match='publication "p"'):
            pipeline.run_available()
    assert ids(pipeline, "public.small") == [1]
