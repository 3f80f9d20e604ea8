"""A writer of an Iceberg table that is killed again and again: each row is there once, and the table is whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path

from tests.unit.iceberg.test_iceberg_table import SLOT, commit, ids, metadata_files, named, raw, table_of
from tests.waiting import wait_until
from xidstream.pipeline import faultpoints
from xidstream.pipeline.faultpoints import FaultPlan

N_COMMITS = 80


def _write(root: str, plan: str) -> None:
    """What a sink does: go on after the watermark."""
    faultpoints._plan = FaultPlan(plan, None) if plan else None
    table = table_of(Path(root))
    for lsn in range(table.watermark(SLOT) + 1, N_COMMITS + 1):
        commit(table, lsn, lsn)


def test_a_writer_that_is_killed_between_any_two_steps_loses_and_repeats_nothing(tmp_path: Path) -> None:
    pick = random.Random(7)
    context = multiprocessing.get_context("spawn")
    table_of(tmp_path)
    killed = []
    for life in range(3):
        plan = ("", f"iceberg_committing:kill@{pick.randint(1, 10)}", "iceberg_merging:kill")[life]
        writer = context.Process(target=_write, args=(str(tmp_path), plan))
        before = table_of(tmp_path).watermark(SLOT)
        writer.start()
        if not plan:
            # At any moment of a commit.
            wait_until(lambda least=before + 5: table_of(tmp_path).watermark(SLOT) >= least)  # type: ignore[misc]
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
        writer.join(60)
        killed.append(writer.exitcode)
        reached = table_of(tmp_path).watermark(SLOT)
        assert ids(tmp_path) == list(range(1, reached + 1))
    assert killed == [-signal.SIGKILL] * 3
    _write(str(tmp_path), "")
    assert ids(tmp_path) == list(range(1, N_COMMITS + 1))
    assert raw(tmp_path).properties[f"xidstream.lsn.{SLOT}"] == str(N_COMMITS)
    assert named(tmp_path) <= metadata_files(tmp_path)
