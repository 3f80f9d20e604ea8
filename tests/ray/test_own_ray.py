"""A Ray that a run starts for itself: what it writes, who may read that, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.ray

PROGRAM = """
import json, os, signal, sys
from xidstream.actors.runtime.ray_cluster import connect_ray, keep_logs
from xidstream.actors.supervision.ray_metrics import metrics_url
import psutil, ray

def seen():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "TMPDIR"}

connect_ray(needs_spark=False, offers_metrics=sys.argv[1] == "killed")
here = set(os.environ)
there = ray.get(ray.remote(seen).remote())
folder = ray._private.worker._global_node.get_session_dir_path()
servers = sorted(ray._private.worker._global_node.all_processes)
raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
(agent,) = [
    child.memory_full_info().uss >> 20
    for child in psutil.Process(raylet).children()
    if "idle_agent.py" in " ".join(child.cmdline()) or "DashboardAgent" in " ".join(child.cmdline())
]
print(json.dumps([folder, there, "TMPDIR" in here, servers, agent, metrics_url()]), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(parent: Path, home: Path, way: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "TMPDIR"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        env={**environment, "RAY_TMPDIR": str(parent), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_nothing_is_left_after_the_end_and_the_logs_alone_after_a_kill_and_the_token_is_private(
    short_folder: Path, tmp_path: Path
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    ended = start(short_folder, tmp_path, "in order")
    assert ended.returncode == 0, ended.stderr
    session, there, is_set_here, servers, agent_mib, url = json.loads(ended.stdout)
    assert (agent_mib < 20, url) == (True, None), "nobody asked for metrics"
    assert servers == ["gcs_server", "raylet"], "and no process that one node has no use for"
    assert session.startswith(f"{short_folder}/xids-")
    assert there["TMPDIR"].startswith(f"{short_folder}/xids-") and not is_set_here
    assert there["RAY_task_events_report_interval_ms"] == there["RAY_event_stats_print_interval_ms"] == "0"
    assert list(short_folder.iterdir()) == []
    assert stat.S_IMODE(token.stat().st_mode) == 0o600

    token.chmod(0o644)  # as Ray makes it
    killed = start(short_folder, tmp_path, "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads(killed.stdout)[-1].startswith("http://127.0.0.1:")
    (folder,) = short_folder.iterdir()
    wait_until(lambda: not (folder / "r").exists(), 30)  # an agent that is left to itself lives for a minute
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert any(path.name.startswith("raylet") for path in (folder / "logs").iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
