"""Storage that fails under a run, and heals: nothing is confirmed, the object is named, the run goes on by itself."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ray import test_pipeline
from tests.ray.conftest import CollectingDriver, RayPipeline, wait_until
from tests.ray.test_pipeline import NEWEST, set_up
from tests.s3_server import S3Server
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.restarts import GIVE_UP_AFTER_S

pytestmark = pytest.mark.ray

FILL = test_pipeline.FILL.replace("'order number ' || i", "md5(i::text) || md5((-i)::text)")
"""Segments are compressed: notes that are alike would not fill a small disk."""
SPILLING = {"buffer_memory_bytes": "1MB", "block_bytes": 256 << 10, "buffers_max": 1}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


def ids(pipeline: RayPipeline, table: str = "public.big") -> list[int]:
    """In the order of release; what a new epoch repeated counts once, as the sink's watermark sees to."""
    return list(dict.fromkeys(pipeline.driver.ids(table)))


def deliver_one(pipeline: RayPipeline, number: int) -> None:
    """A small transaction, through to its confirmation."""
    n_before = len(pipeline.driver.transactions)
    pipeline.database.execute(f"insert into small values ({number})")
    # The driver keeps a batch's rows before its transactions.
    wait_until(
        lambda: number in ids(pipeline, "public.small") and len(pipeline.driver.transactions) > n_before
    )
    end_lsn = pipeline.driver.transactions[-1]["end_lsn"]
    wait_until(lambda: pipeline.confirmed() >= end_lsn)


def fails_then_heals(
    pipeline: RayPipeline,
    spilled: Callable[[], bool],
    fail: Callable[[], None],
    heal: Callable[[], None],
    says: str,
) -> None:
    """In the middle of an open transaction that spills, and again a few attempts long."""
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        session.execute(FILL.format(1, 30_000).encode())
        wait_until(spilled)
        fail()
        told = len(pipeline.notices)
        session.execute(FILL.format(30_001, 60_000).encode())
        pipeline.database.execute("insert into small values (100)")
        session.execute(b"commit")
        wait_until(lambda: len(pipeline.notices) >= told + 2)
        # It may move all the same, as an attempt may have room for its progress but not for its rows: up to the first
        # commit that the sink lacks.
        confirmed, delivered = pipeline.confirmed(), ids(pipeline, "public.small")
        assert pipeline.error is None
        # Which object it is depends on who asks first: a segment, a manifest, or the folder of the slot's records.
        faults = [n for n in pipeline.notices[told:] if re.search(r"epochs/|\.json|/progress", n)]
        assert any(says in n for n in faults), pipeline.notices
        heal()
    wait_until(lambda: len(ids(pipeline)) == 60_000)
    assert ids(pipeline) == list(range(1, 60_001))
    assert 100 in ids(pipeline, "public.small")
    wait_until(lambda: len({t["xid"] for t in pipeline.driver.transactions}) == 3)
    _, small, large = {t["commit_lsn"]: t for t in pipeline.driver.transactions}.values()
    assert confirmed <= (large if 100 in delivered else small)["commit_lsn"]
    wait_until(lambda: pipeline.confirmed() >= large["end_lsn"])


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize("fault", ["stopped", pytest.param("failing", marks=pytest.mark.nightly)])
def test_an_s3_server_that_fails_in_the_middle_and_heals(
    pipeline: RayPipeline, s3: S3Server, fault: str
) -> None:
    below = uuid.uuid4().hex
    set_up(pipeline.database)
    pipeline.driver = CollectingDriver(s3.uri(below))
    s3.delay_s = 0.1 if fault == "stopped" else 0.0
    pipeline.start(storage=s3.uri(below), **SPILLING)
    deliver_one(pipeline, 1)
    assert pipeline.restarts() == [], "slowness is no fault"
    s3.delay_s = 0.0

    def fail() -> None:
        if fault == "stopped":
            s3.stop()
        else:
            s3.failing = True

    def heal() -> None:
        if fault == "stopped":
            s3.start()
        else:
            s3.failing = False

    fails_then_heals(pipeline, lambda: bool(s3.keys(below, ".parquet")), fail, heal, "cannot ")
    wait_until(lambda: not s3.keys(below, ".parquet"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of limited size cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
@NEWEST
def test_a_disk_that_is_full_in_the_middle_and_gets_room(pipeline: RayPipeline, small_disk: Path) -> None:
    set_up(pipeline.database)
    pipeline.driver = CollectingDriver(str(small_disk / "segments"))
    pipeline.start(storage=str(small_disk / "segments"), **SPILLING)
    deliver_one(pipeline, 1)

    def make_room() -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)

    fails_then_heals(
        pipeline,
        lambda: bool(list(small_disk.rglob("*.parquet"))),
        lambda: None,
        make_room,
        "No space left on device",
    )
    wait_until(lambda: not list(small_disk.rglob("*.parquet")))
    assert not list(small_disk.rglob("*.tmp"))
    pipeline.stop()


@pytest.mark.slow
@NEWEST
@pytest.mark.timeout(600)
@pytest.mark.parametrize("give_up_after_s", [5.0, pytest.param(GIVE_UP_AFTER_S, marks=pytest.mark.nightly)])
def test_a_disk_too_small_for_a_transaction_ends_the_run_however_long_it_takes_to_fill(
    pipeline: RayPipeline, small_disk: Path, monkeypatch: pytest.MonkeyPatch, give_up_after_s: float
) -> None:
    """Filling it took longer than what counts as an epoch that works, so the run went on for ever."""
    monkeypatch.setattr("xidstream.pipeline.restarts.WORKED_AFTER_S", 0.0)
    monkeypatch.setattr("xidstream.pipeline.restarts.GIVE_UP_AFTER_S", give_up_after_s)
    set_up(pipeline.database)
    pipeline.driver = CollectingDriver(str(small_disk / "segments"))
    pipeline.start(storage=str(small_disk / "segments"), **SPILLING)
    deliver_one(pipeline, 1)
    pipeline.database.execute(FILL.format(1, 60_000))
    with pytest.raises(StorageFault, match="No space left on device"):
        pipeline.join(timeout_s=give_up_after_s + 115)
    assert ids(pipeline, "public.small") == [1] and not ids(pipeline)


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    "damage",
    [
        "altered",
        pytest.param("torn", marks=pytest.mark.nightly),
        pytest.param("missing", marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_segment_is_named_and_its_transaction_read_again(
    pipeline: RayPipeline, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """While the run looked for a deeper cause, the transaction went to the journal, and the server forgot it."""
    monkeypatch.setattr("xidstream.actors.supervision.epoch._ROOT_CAUSE_S", 12.0)
    set_up(pipeline.database)
    pipeline.start(**SPILLING, journal_after_s=10.0)
    deliver_one(pipeline, 1)
    pipeline.driver.hold.set()
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        session.execute(FILL.format(1, 30_000).encode())
        wait_until(pipeline.segments)
        commits_at = pipeline.database.execute("select (pg_current_wal_lsn() - '0/0')::bigint")[0][0]
        session.execute(b"commit")
    segment = pipeline.segments()[0]
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        segment.unlink()
    else:
        segment.write_bytes(content if damage == "altered" else content[:-100])
    pipeline.driver.hold.clear()
    wait_until(lambda: pipeline.notices)
    assert pipeline.confirmed() <= commits_at
    wait_until(lambda: len(ids(pipeline)) == 30_000)
    assert ids(pipeline) == list(range(1, 30_001))
    key = str(segment.relative_to(pipeline.storage))
    assert any(key in notice for notice in pipeline.notices), pipeline.notices
