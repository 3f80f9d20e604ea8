"""``xidstream status`` on one machine of a Ray cluster, of a run on another one: each has a network of its own."""

from __future__ import annotations

import ipaddress
import json
import random
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.local_ray import BIN, LocalRay
from tests.postgres_fixtures import *  # noqa: F403
from tests.postgres_fixtures import Database

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
RANGE = ipaddress.ip_network("198.18.0.0/15")
"""It is set apart for such tests (RFC 2544)."""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class OtherMachine:
    """A network namespace that a cable joins to ours. ``here`` and ``there``: the addresses of the cable's ends."""

    namespace: str
    here: str
    there: str


@pytest.fixture
def other_machine() -> Iterator[OtherMachine]:
    # A test that was killed leaves its cable, and two cables with one address answer nobody.
    here, there = random.choice(list(RANGE.subnets(new_prefix=30))).hosts()
    name = f"xs{uuid.uuid4().hex[:8]}"
    try:
        made = ip("netns", "add", name)
    except FileNotFoundError:
        pytest.skip("there is no `ip` here")
    if made.returncode:
        pytest.skip(f"a network namespace cannot be made here: {made.stderr.strip()}")
    try:
        for command in (
            f"link add {name}h type veth peer name {name}t netns {name}",
            f"addr add {here}/30 dev {name}h",
            f"link set {name}h up",
            f"-n {name} addr add {there}/30 dev {name}t",
            f"-n {name} link set {name}t up",
            f"-n {name} link set lo up",
            f"-n {name} route add default via {here}",
        ):
            done = ip(*command.split())
            assert done.returncode == 0, done.stderr
        yield OtherMachine(name, str(here), str(there))
    finally:
        ip("netns", "delete", name)


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_status_finds_the_run_of_a_job_on_another_machine_of_the_cluster(
    other_machine: OtherMachine, database: Database, tmp_path: Path
) -> None:
    database.execute("create table t (id bigint primary key)")
    database.execute("create publication p for table t")
    slot = f"s_{database.name}"
    run = ["python", "-m", "xidstream", "run", "--create-slot", "--snapshot", "never"]
    run += ["--dsn", database.dsn()]
    run += ["--slot", slot, "--publication", "p", "--storage", str(tmp_path / "segments")]
    run += ["--sink", f"delta:{tmp_path / 'delta'}"]
    here, there = other_machine.here, other_machine.there
    with LocalRay(cpus=0, ip=here) as ray, ray.node(cpus=2, ip=there, namespace=other_machine.namespace):
        job = ["ray", "job", "submit", "--address", ray.address, "--submission-id", "run", "--no-wait"]
        submitted = ray.run(*job, "--entrypoint-num-cpus", "0.1", "--", *run, cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stderr
        asking = [str(BIN / "xidstream"), "status", "--slot", slot, "--json"]
        ray.environment["RAY_ADDRESS"] = ray.gcs
        deadline_s = time.monotonic() + 240
        while True:
            found = ray.run(*asking, cwd=tmp_path)
            account = json.loads(found.stdout) if found.returncode == 0 else {}
            if (account.get("run") or {}).get("state") == "reading":
                break
            assert time.monotonic() < deadline_s, (found, ray.run(*job[:2], "logs", "run", cwd=tmp_path))
            time.sleep(1)
        # The run itself reads its node's address from a file of the session, whose folder both machines share here.
        nodes = {part["node"] for part in account["processes"] if part["part"] != "run"}
        assert nodes == {there}, account["processes"]
        shown = ray.run(*asking[:-1], cwd=tmp_path)
        assert shown.returncode == 0 and slot in shown.stdout, shown
