"""On a cluster whose nodes have a secret for Spark, RayDP's JVMs ask each other for it, and encrypt what they send."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.local_ray import LocalRay
from xidstream.actors.driver.spark_secret import SECRET_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import json, sys
import psutil
from xidstream import spark_session

spark = spark_session("secret", {"spark": "raydp"})
conf = spark.sparkContext.getConf()
rows = spark.range(0, 100_000, 1, 4).repartition(3).selectExpr("id", "repeat('x', 1000) as text")
lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
print(json.dumps({
    "conf": {name: conf.get(f"spark.{name}") for name in ("authenticate", "network.crypto.enabled")},
    "n_rows": len(rows.mapInArrow(lambda each: each, "id long, text string").collect()),
    "executors": [line for line in lines if f"-Dspark.driver.port={conf.get('spark.driver.port')}" in line],
}))
spark.stop()
"""


def test_raydps_session_uses_the_secret_that_the_nodes_have() -> None:
    with LocalRay() as ray:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**ray.environment, "RAY_ADDRESS": ray.gcs, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        secret = ray.environment[SECRET_VARIABLE]
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["conf"] == {"authenticate": "true", "network.crypto.enabled": "true"}
    assert found["n_rows"] == 100_000, "also those that pass between executors and driver as blocks"
    (executor,) = found["executors"]
    assert "-Dspark.authenticate=true" in executor and secret not in executor
