"""The stand-in for Ray's agent: on which Ray it stands, what it writes, and that it ends with its raylet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services

from xidstream.actors.runtime import idle_agent
from xidstream.actors.runtime.ray_cluster import _without_helpers


def _command(*, offers_metrics: bool) -> list[str]:
    with _without_helpers(offers_metrics=offers_metrics):
        command: list[str] = services._build_python_executable_command_memory_profileable(
            ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, "/session"
        )
    return command


def test_a_ray_whose_agent_writes_no_ports_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.53 gives its agent no ``--node-id``: the stand-in failed over that, and the raylet ended with it."""
    assert idle_agent.__file__ in _command(offers_metrics=False)
    assert idle_agent.__file__ not in _command(offers_metrics=True)
    monkeypatch.delattr(ray._raylet, "persist_port")
    assert idle_agent.__file__ not in _command(offers_metrics=False)


def _agent(folder: Path, raylet: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            idle_agent.__file__,
            f"--session-dir={folder}",
            "--node-id=n",
            "--minimal",
        ],
        env={**os.environ, "RAY_RAYLET_PID": str(raylet)},
    )


def test_one_whose_raylet_was_killed_before_it_looked_ends(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    agent = _agent(tmp_path, ended.pid)
    try:
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{service}_n"
        for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    )
    assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
