"""What is done to a session before the first batch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xidstream.pipeline.spark import session

pytestmark = pytest.mark.spark


class Jobs:
    """Those of one warm-up: how many tasks the stages of each had."""

    def __init__(self, spark: Any) -> None:
        self._context = spark.sparkContext

    def of_warm_up(self, spark: Any) -> list[list[int]]:
        return self.of(lambda: session.warm_up(spark))

    def of(self, action: Callable[[], None]) -> list[list[int]]:
        group = f"epoch-{uuid.uuid4().hex}"  # the session keeps the jobs of groups of earlier tests
        self._context.setJobGroup(group, group)
        action()
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        return [[tracker.getStageInfo(stage).numTasks for stage in job.stageIds] for job in jobs]


@pytest.fixture
def jobs(spark: Any) -> Iterator[Jobs]:
    yield Jobs(spark)
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def test_a_session_is_warmed_up_once_on_every_core_however_many_epochs_it_serves(
    spark: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_warm", {})
    n_cores = spark.sparkContext.defaultParallelism
    assert n_cores == 2
    # More than once: the second of its kind still loads and compiles.
    assert jobs.of_warm_up(spark) == [[n_cores]] * 3
    assert jobs.of_warm_up(spark) == []


def test_a_session_after_another_is_warmed_up_for_itself(
    spark: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_warm", {"the application before this one": 64})
    assert jobs.of_warm_up(spark)


def test_a_session_that_has_more_cores_by_now_is_warmed_up_again(
    spark: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_warm", {spark.sparkContext.applicationId: 1})
    assert jobs.of_warm_up(spark) == [[2]] * 3
    assert jobs.of_warm_up(spark) == []


def test_the_first_plan_is_made_without_a_job(spark: Any, jobs: Jobs) -> None:
    assert jobs.of(lambda: session.plan_first_job(spark)) == []


def test_a_warm_up_that_failed_is_not_taken_for_one(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_warm", {})
    monkeypatch.setattr(session, "imports", lambda batches: (1 // 0 for _ in batches))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        session.warm_up(spark)
    assert not session._warm
