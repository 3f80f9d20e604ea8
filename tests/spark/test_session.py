"""What is done to a session before the first batch."""

from __future__ import annotations

import json
import subprocess
import sys
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


# In a process of its own: PySpark has one JVM for each.
STARTS_JVM = """
import json, sys
from pyspark import SparkContext
from xidstream.actors.driver.jvm_stderr import start_jvm
from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.settings.config import Config

ensure_java()
conf = json.load(sys.stdin)
start_jvm(Config(spark_conf=conf).spark_conf)
system = SparkContext._jvm.java.lang.System
print(json.dumps({name: system.getProperty(name) for name in conf}))
"""


def test_settings_of_spark_come_to_the_jvm_as_they_are_whatever_is_in_them() -> None:
    """They pass its command line, two shell scripts and a launcher."""
    values = (
        "",
        " a  b ",
        "two\nlines\tand a tab",
        "-Dx=y --conf spark.master=local[9]",
        "--class Evil",
        "$(touch /tmp/x) `id` ${HOME} $HOME",
        "'single' \"double\" \\ \\n",
        "; rm -rf . && || | > <",
        "%s %20 *.py ~ !! #",
        "é\U0001f600",
        "x" * 5000,
    )
    conf = {f"spark.xidstream.test.n{number}": value for number, value in enumerate(values)}
    conf["spark.xidstream.--class;$(id)'\"\\*"] = "a key"
    ended = subprocess.run(
        [sys.executable, "-c", STARTS_JVM], input=json.dumps(conf), capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == conf
