"""The driver's JVM that is started early is the one that RayDP would have started."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import ray
from raydp.spark.ray_cluster import SparkCluster

from tests.waiting import wait_until
from xidstream.actors.driver import driver_jvm
from xidstream.actors.driver.driver_jvm import start_driver_jvm
from xidstream.actors.driver.session import BASE_CONF

EXECUTORS = (3, 2, "600m")

SPEAKING_JVM = """
import sys
from pyspark import SparkConf, SparkContext

conf = SparkConf(loadDefaults=False).setMaster("local[1]").setAppName("speaking").set("spark.ui.enabled", "false")
conf.set("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={sys.argv[1]}")
with SparkContext(conf=conf) as context:
    logger = context._jvm.org.apache.log4j.LogManager.getLogger("of.a.Library")
    logger.warn("a warning")
    logger.error("an error")
"""


@ray.remote(num_cpus=0)
def early_jvm(conf: dict[str, str]) -> dict[str, Any]:
    """In a process of its own: PySpark has one JVM for each."""
    from pyspark import SparkContext

    start_driver_jvm(conf, *EXECUTORS)
    # Not asked of PySpark, which would start one.
    wait_until(lambda: SparkContext._gateway is not None and SparkContext._jvm is not None, 60)
    jvm: Any = SparkContext._jvm
    runtime = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    return {
        "arguments": list(runtime.getInputArguments()),
        "raydp": jvm.java.lang.Class.forName("org.apache.spark.deploy.raydp.RayAppMaster").getName(),
        "memory": jvm.java.lang.Runtime.getRuntime().maxMemory(),
    }


def test_the_driver_jvm_is_there_before_raydp_asks_with_raydps_classes_and_the_users_settings() -> None:
    options = f"{BASE_CONF['spark.driver.extraJavaOptions']} -Dxidstream.test=here"
    conf = {**BASE_CONF, "spark.driver.extraJavaOptions": options, "spark.driver.memory": "300m"}
    found = ray.get(early_jvm.remote(conf))
    assert "-Dxidstream.test=here" in found["arguments"]
    assert any(each.startswith("-javaagent:") for each in found["arguments"])
    assert found["raydp"] == "org.apache.spark.deploy.raydp.RayAppMaster"
    assert found["memory"] < 400 << 20


def test_its_settings_are_those_that_raydp_makes_and_the_callers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conf = {**BASE_CONF, "spark.driver.extraClassPath": "mine.jar"}
    made = driver_jvm.raydp_settings(conf, *EXECUTORS)
    assert conf == {**BASE_CONF, "spark.driver.extraClassPath": "mine.jar"}
    monkeypatch.setattr(SparkCluster, "_set_up_master", lambda self, resources, kwargs: None)
    assert made == SparkCluster("name", *EXECUTORS, False, dict(conf))._configs


def test_with_a_raydp_that_makes_its_settings_elsewhere_no_jvm_is_started_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(driver_jvm, "_start", started.append)
    monkeypatch.delattr(SparkCluster, "_prepare_spark_configs")
    start_driver_jvm(BASE_CONF, *EXECUTORS)
    assert not started


@pytest.mark.slow
def test_the_jvm_of_a_script_tells_errors_and_nothing_else() -> None:
    made = driver_jvm.raydp_settings(BASE_CONF, *EXECUTORS)
    # The last one counts, and RayDP's comes after all others.
    named = re.findall(r"-Dlog4j2\.configurationFile=(\S+)", made["spark.driver.extraJavaOptions"])[-1]
    spoken = subprocess.run(
        [sys.executable, "-c", SPEAKING_JVM, named], capture_output=True, text=True, check=True
    ).stderr
    # On Spark 4 a Java that has this module says so before any of our settings counts.
    told = spoken.removeprefix("WARNING: Using incubator modules: jdk.incubator.vector\n")
    assert re.fullmatch(r"[\d:]+ ERROR Library: an error\n", told), spoken
