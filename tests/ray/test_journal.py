"""The journal with real actors: the slot does not wait for the sink, and the sink gets everything later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from tests.ray.conftest import RayPipeline
from tests.ray.test_pipeline import FILL, NEWEST, set_up
from tests.ray.test_poison import xidstream
from tests.waiting import wait_until
from xidstream.actors.supervision import delivery
from xidstream.pipeline.errors import ExitStatus, SlotLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.journal_file import load_journal_units
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.skips import read_skips
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import stored_journal

pytestmark = pytest.mark.ray

SPILLING = {
    "buffer_memory_bytes": "1MB",
    "block_bytes": 256 << 10,
    "logical_decoding_work_mem": "64kB",
    "journal_after_s": 0.3,
}


def wal_end(pipeline: RayPipeline) -> int:
    return int(pipeline.database.execute("select (pg_current_wal_flush_lsn() - '0/0')::bigint")[0][0])


def journal_files(pipeline: RayPipeline) -> list[Path]:
    assert isinstance(pipeline.storage, Path)
    return sorted(pipeline.storage.rglob("*.journal"))


def commit_some(pipeline: RayPipeline, first: int, n: int) -> None:
    for i in range(first, first + n):
        pipeline.database.execute("insert into small values (%s)", i)


def hold_sink(pipeline: RayPipeline) -> None:
    """From now on the sink takes nothing; it has all that was there before."""
    pipeline.database.execute("insert into small values (0)")
    wait_until(lambda: len(pipeline.driver.transactions) == 1)
    pipeline.driver.hold.set()
    wait_until(lambda: pipeline.driver.is_held)


def stop_without_sink(pipeline: RayPipeline) -> None:
    """The sink takes nothing more."""
    assert pipeline.supervisor is not None
    epoch = pipeline.supervisor._epoch
    assert epoch is not None
    pipeline.supervisor.stop()
    wait_until(lambda: ray.get(epoch.sequencer.finished.remote()))
    pipeline.driver.hold.clear()
    pipeline.join()


def stored(pipeline: RayPipeline) -> tuple[Storage, Layout]:
    (folder,) = Path(pipeline.storage).glob("*/s_*")
    return Storage(str(pipeline.storage)), Layout(int(folder.parent.name), pipeline.slot, "test")


def commit_in_journal(pipeline: RayPipeline, xid: int) -> Lsn:
    storage, layout = stored(pipeline)
    journal = stored_journal(storage, layout, verify=False)
    assert journal is not None
    units = (unit for file in journal.readable for _, unit in load_journal_units(storage, layout, file, id))
    lines = (line for unit in units for line in unit.transactions.to_pylist())
    (commit_lsn,) = (line["commit_lsn"] for line in lines if line["xid"] == xid)
    return Lsn(commit_lsn)


def small_ids(pipeline: RayPipeline) -> list[int]:
    return [row["id"] for row in pipeline.driver.rows("public.small")]


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "killed", [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="sequencer killed")]
)
def test_the_slot_is_confirmed_while_the_sink_is_away_and_all_arrives_in_order(
    pipeline: RayPipeline, killed: bool
) -> None:
    set_up(pipeline.database)
    supervisor = pipeline.start(**SPILLING, batch_bytes=4096)
    hold_sink(pipeline)
    commit_some(pipeline, 1, 40)
    pipeline.database.execute(FILL.format(1, 30_000))
    commit_some(pipeline, 41, 40)
    target = wal_end(pipeline)
    wait_until(lambda: pipeline.confirmed() >= target)
    assert len(pipeline.driver.transactions) == 1 and journal_files(pipeline) and pipeline.segments()
    if killed:
        before = supervisor.pids
        os.kill(pipeline.sequencer_pid(), signal.SIGKILL)
        pipeline.driver.hold.clear()
        wait_until(lambda: bool(supervisor.pids) and supervisor.pids != before)
    commit_some(pipeline, 81, 3)
    pipeline.driver.hold.clear()
    wait_until(lambda: len(pipeline.driver.transactions) >= 85)
    commits = [t["commit_lsn"] for t in pipeline.driver.transactions]
    assert commits == sorted(commits) and len(set(commits)) == len(commits) == 85
    assert small_ids(pipeline) == list(range(84))
    assert [r["id"] for r in pipeline.driver.rows("public.big")] == list(range(1, 30_001))
    wait_until(lambda: not journal_files(pipeline) and not pipeline.segments())


@pytest.mark.slow
@NEWEST
def test_a_stopped_run_leaves_what_it_had_in_the_journal_and_the_next_one_delivers_it_but_for_what_is_given_up(
    pipeline: RayPipeline, tmp_path: Path
) -> None:
    set_up(pipeline.database)
    settings = {**SPILLING, "journal_after_s": 3600}
    pipeline.start(**settings)
    hold_sink(pipeline)
    commit_some(pipeline, 1, 5)
    pipeline.database.execute(FILL.format(1, 20_000))
    target = wal_end(pipeline)
    wait_until(lambda: (s := pipeline.supervisor) and s.status().account.sequencer.n_waiting >= 1)  # type: ignore[union-attr]
    wait_until(
        lambda: (s := pipeline.supervisor) and Lsn.parse(s.status().account.reader.received_lsn) >= target
    )  # type: ignore[union-attr]
    assert pipeline.confirmed() < target and not journal_files(pipeline)
    stop_without_sink(pipeline)
    assert pipeline.confirmed() >= target
    assert small_ids(pipeline) == [0] and journal_files(pipeline)
    xid = int(pipeline.database.execute("select xmin::text::bigint from small where id = 3")[0][0])
    name = ["--xid", str(xid), "--commit-lsn", str(commit_in_journal(pipeline, xid))]
    assert xidstream(pipeline, "slot", "skip", *name) == 0

    successor = RayPipeline(pipeline.database, tmp_path)
    successor.run_available(**settings)
    assert small_ids(successor) == [1, 2, 4, 5]
    assert xid not in [each["xid"] for each in successor.driver.transactions]
    assert [f"transaction {xid}, " in notice and "given up" in notice for notice in successor.notices] == [
        True
    ]
    (recorded,) = read_skips(*stored(pipeline))
    assert recorded.left_out_at is not None
    assert [r["id"] for r in successor.driver.rows("public.big")] == list(range(1, 20_001))
    assert not journal_files(pipeline) and not pipeline.segments()


@pytest.mark.slow
@NEWEST
def test_a_run_that_is_stopped_while_a_batch_hangs_confirms_what_it_journals(
    pipeline: RayPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "LAST_BATCH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(delivery, "_POLL_S", 0.0)
    set_up(pipeline.database)
    supervisor = pipeline.start(**{**SPILLING, "journal_after_s": 3600})
    pipeline.driver.hang.set()
    commit_some(pipeline, 1, 5)
    pipeline.database.execute(FILL.format(1, 20_000))
    target = wal_end(pipeline)
    wait_until(
        lambda: (
            (s := supervisor.status().account).reader is not None
            and Lsn.parse(s.reader.received_lsn) >= target
        )
    )
    # What a buffer has not decoded yet is not journaled at a stop: it comes again.
    wait_until(
        lambda: (s := supervisor.status().account).reader is not None and s.reader.in_flight_bytes == 0
    )
    assert pipeline.confirmed() < target and not journal_files(pipeline)
    supervisor.stop()
    pipeline.join()
    assert "the batch in hand did not end" in pipeline.notices[-1]
    assert pipeline.confirmed() >= target and journal_files(pipeline)


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("altered", marks=pytest.mark.slow),
        pytest.param("missing", marks=pytest.mark.slow),
        "segment missing",
    ],
)
def test_a_damaged_journal_ends_the_run_behind_all_that_came_before(
    pipeline: RayPipeline, tmp_path: Path, damage: str
) -> None:
    set_up(pipeline.database)
    pipeline.start(**SPILLING)
    hold_sink(pipeline)
    commit_some(pipeline, 1, 1)
    wait_until(lambda: len(journal_files(pipeline)) == 1)
    pipeline.database.execute(FILL.format(1, 20_000))
    wait_until(lambda: len(journal_files(pipeline)) == 2)
    commit_some(pipeline, 2, 1)
    target = wal_end(pipeline)
    wait_until(lambda: pipeline.confirmed() >= target)
    stop_without_sink(pipeline)

    victim = journal_files(pipeline)[1] if damage != "segment missing" else pipeline.segments()[0]
    if damage == "altered":
        content = bytearray(victim.read_bytes())
        content[20] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    successor = RayPipeline(pipeline.database, tmp_path)
    with pytest.raises(SlotLost) as raised:
        successor.run_available(**SPILLING)
    assert small_ids(successor) == [1] and successor.driver.n_rows == 1
    assert raised.value.policy.exit_status is ExitStatus.TERMINAL
    assert "journal" in raised.value.message and "restore the object" in raised.value.remedy
    assert len(journal_files(pipeline)) >= (1 if damage == "missing" else 2), "nothing else was removed"
