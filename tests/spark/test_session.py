"""What is done to a session before the first batch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xidstream.actors.driver.users_session import adopt_spark
from xidstream.pipeline.mirror.rewrite import mirror_session
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


def n_partitions_of_a_union(spark: Any) -> int:
    one = spark.range(0, 1, 1, 1)
    return int(one.unionAll(spark.range(0, 1, 1, 1)).rdd.getNumPartitions())


def test_the_frames_of_a_batch_stay_tasks_of_their_own(spark: Any) -> None:
    assert n_partitions_of_a_union(spark) == 2


def test_so_they_do_in_a_users_session_unless_the_user_said_otherwise(spark: Any) -> None:
    users = spark.newSession()
    users.conf.unset(session.UNION_PARTITIONING)
    adopt_spark(users)
    assert n_partitions_of_a_union(users) == 2
    users.conf.set(session.UNION_PARTITIONING, "true")
    adopt_spark(users)
    assert users.conf.get(session.UNION_PARTITIONING) == "true"


def test_so_they_do_for_the_files_of_a_base_table(spark: Any) -> None:
    users = spark.newSession()
    users.conf.unset(session.UNION_PARTITIONING)
    assert n_partitions_of_a_union(mirror_session(users)) == 2
