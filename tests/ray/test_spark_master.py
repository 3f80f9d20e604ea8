"""Slots that share a Spark session each ask whether its RayDP master lives, from threads of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from xidstream.actors.driver import spark_master
from xidstream.actors.driver.spark_master import SparkMaster


class Master:
    """What is asked of RayDP's, which needs a JVM."""

    def get_master_url(self) -> str:
        return "spark://"


def test_a_living_master_that_many_threads_ask_for_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spark_master, "_INTERVAL_S", 0.0)
    actor = ray.remote(Master).options(name="threads_SPARK_MASTER", num_cpus=0).remote()
    ray.get(actor.get_master_url.remote())
    master = SparkMaster("threads")

    def ask(_: int) -> bool:
        return any(master.is_lost() for _ in range(300))

    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(ask, range(8)))
    ray.kill(actor)
    while not master.is_lost():
        pass
