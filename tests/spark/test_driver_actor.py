"""The driver actor's object, with a real session: whose jobs and whose loop an ``end`` ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import IDENTITY
from xidstream.actors.driver.batch_loop import BatchLoop
from xidstream.actors.driver.spark_driver import SparkDriver
from xidstream.actors.driver.spark_master import SparkMaster
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink import make_sink

pytestmark = pytest.mark.spark


def test_an_end_that_comes_late_cancels_nothing_of_the_next_epochs_loop(spark: Any, tmp_path: Path) -> None:
    """It cancelled the new loop's first jobs, which the sink took for a failure of its own: the run ended."""
    driver = SparkDriver({"s": Config.of({"slot": "s"})})
    session = driver._session = DriverSession.given(spark)
    driver._master = SparkMaster("none")
    sink = make_sink(f"delta:{tmp_path}", IDENTITY)
    for name in ("old", "new"):
        of_loop = driver._sessions["s"] = LoopSession(session, name)
        driver._loops["s"] = BatchLoop(of_loop, sink, None, str(tmp_path), IDENTITY, SinkReport())
        driver._names["s"] = name
    started = tmp_path / "started"
    failures: list[BaseException] = []

    def work() -> None:
        def wait_for_both(rows: Any) -> Any:
            import time

            started.touch()
            while not (tmp_path / "ended").exists():
                time.sleep(0.05)
            return rows

        try:
            of_loop.get().range(1).rdd.mapPartitions(wait_for_both).collect()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not started.exists():
        thread.join(0.05)
    driver.end("s", "old")
    assert not driver._loops["s"]._stop.is_set()
    (tmp_path / "ended").touch()
    thread.join(60)
    assert not thread.is_alive() and not failures
    driver.end("s", "new")
    assert driver._loops["s"]._stop.is_set()


DYING = """
import sys

from pyspark.sql import SparkSession

from tests.spark.support import IDENTITY
from xidstream.actors.driver import spark_driver
from xidstream.actors.runtime.driver_session import DriverSession
from xidstream.actors.driver.session_kind import reads_ray_objects
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.errors import ComponentLost

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
jvm = spark.sparkContext._gateway.proc


class Loop(spark_driver.BatchLoop):
    def run(self):
        jvm.kill()
        jvm.wait()
        reads_ray_objects(self._session.get())


spark_driver.BatchLoop = Loop
driver = spark_driver.SparkDriver({"s": Config.of({"slot": "s", "sink": "console", "storage": sys.argv[1]})})
driver._session = DriverSession.given(spark)
for name in ("its JVM dies in the loop", "its JVM is dead"):
    try:
        driver.run("s", name, None, IDENTITY)
    except ComponentLost as error:
        print(f"{name}: {error.message}")
"""


def test_a_jvm_that_dies_outside_of_the_sink_costs_an_epoch_and_not_the_run(tmp_path: Path) -> None:
    """The run ended with "Py4JError: SparkConf does not exist in the JVM": so Py4J says it of a JVM that is gone."""
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    lost = "the Spark session was lost while delivering batches"
    assert [line.partition(" (")[0] for line in ended.stdout.splitlines()] == [
        f"its JVM dies in the loop: {lost}",
        f"its JVM is dead: {lost}",
    ]
