"""Reader, buffers and sequencer as real actors: memory, credit, order, and what happens when one dies."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.ray.conftest import MemoryWatch, RayPipeline, wait_until
from xidstream.actors.cli.display import summary
from xidstream.actors.reader.small_blocks import LOADING_AFTER
from xidstream.pipeline.errors import SlotLost

pytestmark = pytest.mark.ray
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
MIB = 1 << 20

SEVEN_COLUMNS = """
create table big (
  id bigint primary key, customer int, note text, amount numeric(12,2), placed timestamptz, paid bool, weight float8
)
"""
FILL = """
insert into big
select i, mod(i, 1000), 'order number ' || i, mod(i, 100000) / 100.0, now(), mod(i, 2) = 0, i / 7.0
from generate_series({}::bigint, {}::bigint) i
"""


def set_up(database: Database) -> None:
    database.execute(SEVEN_COLUMNS)
    database.execute("create table small (id int primary key)")
    database.execute("create publication p for table big, small")


@pytest.mark.slow
@NEWEST
def test_a_million_rows_pass_with_bounded_memory_spilled_before_commit_and_clean_after(
    pipeline: RayPipeline,
) -> None:
    n_rows = 1_000_000
    set_up(pipeline.database)
    pipeline.driver.keep_rows = False
    supervisor = pipeline.start(reader_memory_bytes="32MB", buffer_memory_bytes="32MB", buffers_max=1)
    watch = MemoryWatch(supervisor.pids)
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        for first in range(1, n_rows, 250_000):
            session.execute(FILL.format(first, first + 249_999).encode())
        wait_until(lambda: pipeline.open_rows() > n_rows * 0.95)
        n_segments = len(pipeline.segments())
        session.execute(b"commit")
    wait_until(lambda: pipeline.driver.transactions)
    reader_growth, buffer_growth = watch.end()
    for pid in (*supervisor.pids, pipeline.sequencer_pid()):
        assert "/pandas/" not in Path(f"/proc/{pid}/maps").read_text(), "it would cost each part 30 MB"
    assert pipeline.driver.transactions[0]["rows"] == pipeline.driver.n_rows == n_rows
    assert n_segments >= 2
    # Twice the setting: beside what is held stand one block on its way in and one part on its way out.
    assert reader_growth < 2 * 32 * MIB, reader_growth
    assert buffer_growth < 2 * 32 * MIB, buffer_growth
    wait_until(lambda: not pipeline.segments())


@pytest.mark.slow
@NEWEST
def test_a_sink_that_takes_nothing_stops_the_reading_and_not_the_connection(pipeline: RayPipeline) -> None:
    database = pipeline.database
    set_up(database)
    database.execute("alter system set wal_sender_timeout = '2s'")
    database.execute("select pg_reload_conf()")
    try:
        supervisor = pipeline.start(backlog_bytes="1MB", status_interval_ms=300, journal_max_bytes=0)
        pipeline.driver.hold.set()
        for n in range(40):
            database.execute(FILL.format(n * 2000 + 1, n * 2000 + 2000))
        wait_until(lambda: (r := supervisor.status().account.reader) is not None and r.paused_by)
        time.sleep(5)  # beyond wal_sender_timeout, twice
        status = supervisor.status()
        reader = status.account.reader
        assert reader is not None and reader.paused_by == "backlog_bytes"
        assert reader.backlog_bytes < 2 * MIB + 4 * MIB
        assert re.search(r"reading paused: [\d.]+ MiB wait for the sink", summary(status))
        pipeline.driver.hold.clear()
        wait_until(lambda: pipeline.driver.n_rows == 80_000)
    finally:
        database.execute("alter system reset wal_sender_timeout")
        database.execute("select pg_reload_conf()")
    assert pipeline.restarts() == [], "the connection was never lost"
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == list(range(1, 80_001))


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize("victim", ["reader", "buffer", pytest.param("sequencer", marks=pytest.mark.slow)])
def test_a_killed_part_costs_a_new_epoch_and_no_row(pipeline: RayPipeline, victim: str) -> None:
    set_up(pipeline.database)
    supervisor = pipeline.start(buffer_memory_bytes="1MB", block_bytes=256 << 10, buffers_max=1)
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        session.execute(FILL.format(1, 50_000).encode())
        wait_until(lambda: pipeline.open_rows() > 20_000)
        left = pipeline.segments()
        assert left
        pids = supervisor.pids
        victims = {"reader": pids[0], "buffer": pids[1], "sequencer": pipeline.sequencer_pid()}
        os.kill(victims[victim], signal.SIGKILL)
        wait_until(lambda: supervisor.pids and supervisor.pids != pids)
        session.execute(FILL.format(50_001, 60_000).encode())
        session.execute(b"commit")
    pipeline.database.execute("insert into small values (1)")
    wait_until(lambda: len(pipeline.driver.transactions) == 2)
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == list(range(1, 60_001))
    assert len(pipeline.notices) >= 1
    wait_until(lambda: not pipeline.segments())


@pytest.mark.slow
@NEWEST
def test_a_trickle_needs_no_buffer_and_loses_and_doubles_nothing_when_its_reader_is_killed(
    pipeline: RayPipeline,
) -> None:
    set_up(pipeline.database)
    supervisor = pipeline.start(buffers_max=1)

    def trickle(first: int, last: int) -> None:
        for i in range(first, last + 1):
            pipeline.database.execute(f"insert into small values ({i})")
            wait_until(lambda: pipeline.driver.n_rows >= i)  # noqa: B023 - it is called here

    def arrives_without_a_buffer(i: int) -> bool:
        os.kill(buffer, signal.SIGSTOP)
        try:
            pipeline.database.execute(f"insert into small values ({i})")
            deadline_s = time.monotonic() + 3
            while pipeline.driver.n_rows < i and time.monotonic() < deadline_s:
                time.sleep(0.02)
            return pipeline.driver.n_rows >= i
        finally:
            os.kill(buffer, signal.SIGCONT)
            wait_until(lambda: pipeline.driver.n_rows >= i)

    reader, buffer = supervisor.pids
    trickle(1, LOADING_AFTER)
    # Until the reader has loaded its kernels, the buffer is needed.
    n = next(i for i in range(LOADING_AFTER + 1, LOADING_AFTER + 31) if arrives_without_a_buffer(i))
    assert "/pandas/" not in Path(f"/proc/{reader}/maps").read_text(), "it would cost the reader 30 MB"
    pipeline.driver.hold.set()
    wait_until(lambda: pipeline.driver.is_held)
    # What is not confirmed yet, a sink without a watermark gets once more.
    wait_until(lambda: pipeline.confirmed() >= pipeline.driver.transactions[-1]["end_lsn"])
    for i in range(n + 1, n + 11):
        pipeline.database.execute(f"insert into small values ({i})")
    os.kill(reader, signal.SIGKILL)
    wait_until(lambda: supervisor.pids and supervisor.pids != [reader, buffer])
    pipeline.driver.hold.clear()
    wait_until(lambda: pipeline.driver.n_rows >= n + 10)
    assert [r["id"] for r in pipeline.driver.rows("public.small")] == list(range(1, n + 11))


@pytest.mark.slow
@NEWEST
def test_sixteen_open_transactions_share_two_buffers_and_commit_in_reverse(pipeline: RayPipeline) -> None:
    set_up(pipeline.database)
    pipeline.start(logical_decoding_work_mem="64kB", buffer_memory_bytes="1MB", block_bytes=64 << 10)
    sessions = [pipeline.database.connect() for _ in range(16)]
    try:
        for n, session in enumerate(sessions):
            session.execute(b"begin")
            session.execute(FILL.format(n * 10_000 + 1, n * 10_000 + 3000).encode())
        wait_until(lambda: pipeline.open_rows() > 16 * 2000)
        for session in reversed(sessions):
            session.execute(b"commit")
    finally:
        for session in sessions:
            session.close()
    wait_until(lambda: len(pipeline.driver.transactions) == 16)
    expected = [n * 10_000 + i for n in reversed(range(16)) for i in range(1, 3001)]
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == expected


@pytest.mark.slow
@NEWEST
def test_transactions_that_shared_move_to_buffers_of_their_own_and_lose_nothing(
    pipeline: RayPipeline,
) -> None:
    """With rows in memory and in segments, a rolled-back subtransaction, and messages, before and after the move."""
    set_up(pipeline.database)
    supervisor = pipeline.start(
        logical_decoding_work_mem="64kB", buffer_memory_bytes="1MB", block_bytes=64 << 10, buffers_max=3
    )
    sessions = [pipeline.database.connect() for _ in range(3)]

    def write(session: psycopg.Connection[Any], first: int) -> None:
        session.execute(FILL.format(first, first + 3999).encode())
        session.execute(b"savepoint s")
        session.execute(FILL.format(first + 4000, first + 4999).encode())
        session.execute(b"rollback to savepoint s")
        session.execute(b"select pg_logical_emit_message(true, 'mark', repeat('x', 9))")

    try:
        for n, session in enumerate(sessions):
            session.execute(b"begin")
            write(session, n * 100_000 + 1)
        reader = lambda: supervisor.status().account.reader
        wait_until(lambda: (r := reader()) is not None and r.n_open == 3)
        wait_until(lambda: (r := reader()) is not None and r.n_moved == 2)
        for n, session in enumerate(sessions):
            write(session, n * 100_000 + 50_001)
            session.execute(b"commit")
    finally:
        for session in sessions:
            session.close()
    wait_until(lambda: len(pipeline.driver.transactions) == 3)
    expected = [n * 100_000 + half + i for n in range(3) for half in (0, 50_000) for i in range(1, 4001)]
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == expected
    assert [t["rows"] for t in pipeline.driver.transactions] == [8000] * 3
    assert not [n for n in pipeline.notices if "starting again" in n]


@pytest.mark.slow
@NEWEST
def test_buffers_that_no_node_has_room_for_hold_up_nobody_and_are_not_asked_for_longer_than_wanted(
    pipeline: RayPipeline,
) -> None:
    set_up(pipeline.database)
    supervisor = pipeline.start(
        logical_decoding_work_mem="64kB", buffer_memory_bytes="4MB", block_bytes=64 << 10, buffers_max=4,
        reader_memory_bytes="1MB", buffer_resource="nowhere", buffers_idle_s=1,
    )  # fmt: skip
    reader = lambda: supervisor.status().account.reader
    sessions = [pipeline.database.connect() for _ in range(4)]
    try:
        for session in sessions:
            session.execute(b"begin")
        for n, session in enumerate(sessions):
            session.execute(FILL.format(n * 100_000 + 1, n * 100_000 + 10_000).encode())
        wait_until(lambda: (r := reader()) is not None and r.n_buffers_asked == 3)
        for n, session in enumerate(sessions):
            session.execute(FILL.format(n * 100_000 + 10_001, n * 100_000 + 20_000).encode())
        pipeline.database.execute("insert into small values (1)")
        wait_until(lambda: pipeline.driver.transactions)
        wait_until(lambda: pipeline.open_rows() > 4 * 18_000)
        for session in sessions:
            session.execute(b"commit")
    finally:
        for session in sessions:
            session.close()
    wait_until(lambda: len(pipeline.driver.transactions) == 5)
    expected = [n * 100_000 + i for n in range(4) for i in range(1, 20_001)]
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == expected
    wait_until(lambda: (r := reader()) is not None and r.n_buffers_asked == 0 and r.n_buffers == 1)
    assert not [n for n in pipeline.notices if "starting again" in n]


@pytest.mark.slow
@NEWEST
def test_leftovers_of_a_dead_run_are_cleaned_and_those_of_other_slots_are_not(pipeline: RayPipeline) -> None:
    set_up(pipeline.database)
    pipeline.create_slot()
    (slot_folder,) = pipeline.storage.glob("*/s_*")
    ours = slot_folder / "epochs" / "20200101T000000-dead" / "700-0000000000000001" / "0.arrow"
    theirs = (
        slot_folder.parent
        / "another"
        / "epochs"
        / "20200101T000000-live"
        / "700-0000000000000001"
        / "0.arrow"
    )
    for path in (ours, theirs):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"leftover")
    pipeline.run_available()
    assert not ours.exists() and theirs.exists()


@NEWEST
def test_a_slot_that_was_moved_behind_our_back_is_terminal(pipeline: RayPipeline) -> None:
    set_up(pipeline.database)
    pipeline.create_slot()
    pipeline.database.execute("insert into small values (1)")
    pipeline.database.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", pipeline.slot
    )
    with pytest.raises(SlotLost, match="went elsewhere"):
        pipeline.run_available()


@pytest.mark.slow
@NEWEST
def test_what_was_confirmed_is_not_delivered_again(pipeline: RayPipeline) -> None:
    set_up(pipeline.database)
    pipeline.create_slot()
    pipeline.database.execute("insert into small values (1)")
    pipeline.run_available()
    confirmed = pipeline.confirmed()
    assert confirmed >= pipeline.driver.transactions[0]["end_lsn"]
    pipeline.run_available()
    assert len(pipeline.driver.transactions) == 1


@pytest.mark.slow
@NEWEST
def test_storage_that_cannot_be_written_ends_clearly_with_nothing_confirmed(
    pipeline: RayPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xidstream.pipeline.errors import StorageFault

    monkeypatch.setattr("xidstream.pipeline.restarts.GIVE_UP_BEFORE_ANY_WORKED_S", 3.0)
    set_up(pipeline.database)
    pipeline.create_slot()
    confirmed = pipeline.confirmed()
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(StorageFault):
        pipeline.run_available(storage=str(blocker / "below"))
    assert pipeline.confirmed() == confirmed


@pytest.mark.slow
@NEWEST
def test_the_smallest_legal_memory_never_stops_the_reading_for_good(pipeline: RayPipeline) -> None:
    """MessageBuffer blocks of several transactions exceeded the credit with nothing in flight to bring it back."""
    set_up(pipeline.database)
    pipeline.start(
        block_bytes=512 << 10,
        reader_memory_bytes="1MB",
        logical_decoding_work_mem="64kB",
        linger_ms=60_000,
        stream_linger_ms=600_000,
    )
    with pipeline.database.connect() as first, pipeline.database.connect() as second:
        for session, base in ((first, 0), (second, 100_000)):
            session.execute(b"begin")
            session.execute(FILL.format(base + 1, base + 3000).encode())
        for n in range(10):
            pipeline.database.execute(FILL.format(200_000 + n * 400, 200_399 + n * 400))
        first.execute(FILL.format(3001, 9000).encode())
        first.execute(b"commit")
        second.execute(b"commit")
    wait_until(lambda: pipeline.driver.n_rows == 9000 + 3000 + 4000)


@pytest.mark.slow
@NEWEST
def test_a_cut_connection_never_puts_two_batches_into_the_sink_at_once(pipeline: RayPipeline) -> None:
    database = pipeline.database
    set_up(database)
    supervisor = pipeline.start()
    pipeline.driver.take_s = 4.0
    database.execute("insert into small values (1)")
    wait_until(lambda: pipeline.driver.n_active == 1)
    pids = supervisor.pids
    database.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s",
        pipeline.slot,
    )
    wait_until(lambda: supervisor.pids and supervisor.pids != pids)
    database.execute("insert into small values (2)")
    wait_until(lambda: {r["id"] for r in pipeline.driver.rows("public.small")} == {1, 2})
    assert pipeline.driver.most_active == 1
    assert len(pipeline.notices) >= 1


@pytest.mark.slow
@NEWEST
def test_a_server_older_than_what_it_delivered_is_terminal(pipeline: RayPipeline) -> None:
    """As after a failover to a standby that lags, or a restored backup."""
    from xidstream.pipeline.pg import Lsn
    from xidstream.pipeline.storage.keys import Layout
    from xidstream.pipeline.storage.progress import write_progress
    from xidstream.pipeline.storage.storage import Storage

    set_up(pipeline.database)
    pipeline.create_slot()
    (folder,) = pipeline.storage.glob("*/s_*")
    layout = Layout(int(folder.parent.name), pipeline.slot, "20200101T000000-other")
    write_progress(Storage(str(pipeline.storage)), layout, Lsn(0xFFFF_FFFF_0000), owner=2)
    with pytest.raises(SlotLost, match="older"):
        pipeline.run_available()
