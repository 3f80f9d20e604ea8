"""On a cluster whose nodes have a secret for Spark, RayDP's JVMs ask each other for it, and encrypt what they send."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.local_ray import LocalRay
from tests.e2e.stranger import asked
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


def test_two_sessions_on_one_cluster_do_not_meet() -> None:
    """RayDP has one name for its application master: the second one was refused, "Actor of name … exists"."""
    with LocalRay(cpus=4) as ray:
        environment = {
            **ray.environment,
            "RAY_ADDRESS": ray.gcs,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        both = [
            subprocess.Popen(
                [sys.executable, "-c", STAYS, name],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("one", "two")
        ]
        try:
            for each in both:
                assert each.stdout is not None
                assert any(line.startswith("{") for line in each.stdout), "it has run a job"
        finally:
            for each in both:
                each.communicate("\n", timeout=120)
    assert [each.returncode for each in both] == [0, 0]


STAYS = """
import json, sys
import psutil
from xidstream import spark_session

spark = spark_session(sys.argv[1], {"spark": "raydp"})
spark.range(100).repartition(3).count()
started = psutil.Process().create_time()  # a JVM from before is another test's
listening = {
    socket.laddr.port: socket.laddr.ip
    for process in psutil.process_iter(["name", "create_time"])
    if process.info["name"] == "java" and process.info["create_time"] >= started
    for socket in process.net_connections("inet")
    if not socket.raddr
}
print(json.dumps(listening), flush=True)
sys.stdin.readline()
spark.stop()
"""


def own_address() -> str:
    """One of this machine that other machines may reach; loopback does not count."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but loopback")


def test_whoever_reaches_the_nodes_address_and_has_no_secret_gets_nothing_from_raydps_jvms() -> None:
    ip = own_address()
    with LocalRay(ip=ip) as ray:
        session = subprocess.Popen(
            [sys.executable, "-c", STAYS, "secret"],
            env={**ray.environment, "RAY_ADDRESS": ray.gcs, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert session.stdin is not None and session.stdout is not None
        try:
            listening = next(json.loads(line) for line in session.stdout if line.startswith("{"))
            outside = [int(port) for port, address in listening.items() if not address.endswith("127.0.0.1")]
            answers, _ = asked(outside, [], ip)
            inside = [int(port) for port in listening if int(port) not in outside]
            answers |= asked(inside, [])[0]
        finally:
            session.communicate("\n", timeout=120)
    assert session.returncode == 0
    assert any(protocol == "Spark" for protocol, _ in (answers[port] for port in outside)), answers
    assert {wants for _, wants in answers.values()} <= {"secret", "token"}, answers
