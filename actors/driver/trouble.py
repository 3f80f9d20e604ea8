"""Tells why a batch in a Spark driver's hands will never end, if that is known."""

from __future__ import annotations

from xidstream.actors.driver.batch_loop import STALLED_AFTER_S, BatchLoop
from xidstream.actors.driver.spark_master import SparkMaster

_STALLED = (
    f"a Spark job waited {STALLED_AFTER_S:.0f} s without a running task: RayDP's master or executors are lost"
)
_MASTER_LOST = "RayDP's master is lost: its Spark session cannot start executors any more"


def trouble_of(master: SparkMaster, loop: BatchLoop | None) -> str | None:
    """The reason why the batch in hand will never end; None if there is none."""
    if master.is_lost():
        return _MASTER_LOST
    return _STALLED if loop is not None and loop.is_stalled() else None
