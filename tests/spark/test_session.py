"""What is done to a session before the first batch."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.spark import session


def test_a_session_is_warmed_up_once_however_many_epochs_it_serves(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_warm", set())
    n_jobs = []
    for epoch in ("first", "second"):
        spark.sparkContext.setJobGroup(f"epoch-{epoch}", epoch)
        session.warm_up(spark)
        n_jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(f"epoch-{epoch}")))
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert n_jobs[0] > 0 and n_jobs[1] == 0
