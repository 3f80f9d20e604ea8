"""Clusters of several nodes on one machine: some added by Ray's own autoscaler, some by the test.

Nothing of them is where another Ray would be found: ports and the temporary directory are their own, and what was
started is ended by its process id. These tests are not part of the suite: ``make cluster-test`` runs them.
"""

from __future__ import annotations

import csv
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from ray._private.authentication_test_utils import reset_auth_token_state

from tests.postgres_fixtures import *  # noqa: F403
from xidstream.actors.runtime.java import ensure_java

HEAD_ID = "f" * 51 + "00000"
_MARK = "XIDSTREAM_TEST_MARK"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Recorder:
    """What there was over time: one row whenever it changed."""

    columns: tuple[str, ...]
    measure: Callable[[], tuple[Any, ...]]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._start_s = time.monotonic()
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()

    def end(self, name: str) -> None:
        """Print it, and keep it in the folder that XIDSTREAM_RECORDS names."""
        self._stop.set()
        self._thread.join()
        self._take()
        header = ("seconds", *self.columns)
        for row in [header, *self.rows]:
            print(*row, sep="\t")
        folder = os.environ.get("XIDSTREAM_RECORDS")
        if folder:
            with (Path(folder) / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([header, *self.rows])

    def last(self, column: str) -> Any:
        """What the newest row has there; None before there is one. A measurement that failed fails this, too."""
        if self._error is not None:
            raise self._error
        return self.rows[-1][1 + self.columns.index(column)] if self.rows else None

    def _record(self) -> None:
        try:
            while not self._stop.wait(0.25):
                self._take()
        except Exception as error:
            self._error = error

    def _take(self) -> None:
        row = self.measure()
        if not self.rows or self.rows[-1][1:] != row:
            self.rows.append((round(time.monotonic() - self._start_s, 1), *row))


def n_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


@dataclass
class Autoscaled:
    """A head without anything but its own CPUs, and worker nodes that come when something asks for them."""

    address: str
    max_workers: int


def end_marked(mark: str) -> None:
    """Everything that was started, however indirectly, with this mark in its environment."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                process.kill()
        except psutil.Error:
            continue


@pytest.fixture(scope="session")
def own_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """These clusters ask for a token that nobody else has; a process reads it once."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.delenv("RAY_ADDRESS", raising=False)
        # What this process has read before, by importing Ray.
        reset_auth_token_state()
        yield
    reset_auth_token_state()


@pytest.fixture
def autoscaled(request: pytest.FixtureRequest, own_token: None) -> Iterator[Autoscaled]:
    """``@pytest.mark.parametrize("autoscaled", [worker resources], indirect=True)``; at most three workers."""
    ensure_java()
    with tempfile.TemporaryDirectory(prefix="xs-ray-") as folder:
        port = free_port()
        address = f"127.0.0.1:{port}"
        config = Path(folder) / "autoscaling.yaml"
        config.write_text(yaml.safe_dump(_autoscaling(address, dict(request.param), 3)))
        environment = {
            **os.environ,
            _MARK: folder,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            "RAY_TMPDIR": folder,
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}/ray"),
            *(f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"),
            *("--num-cpus=2", "--object-store-memory=300000000", "--include-dashboard=false"),
            *("--min-worker-port=0", "--max-worker-port=0", f"--autoscaling-config={config}"),
            "--disable-usage-stats",
        ]
        log = Path(folder) / "start.log"
        with log.open("w") as output:
            started = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            connect(address, lambda: started.poll() is None, log)
            yield Autoscaled(address, 3)
        finally:
            ray.shutdown()
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
            end_marked(folder)


def connect(address: str, is_running: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + 90
    while True:
        try:
            with socket.create_connection(tuple(address.rsplit(":", 1)), timeout=1):  # type: ignore[arg-type]
                break
        except OSError:
            assert is_running(), log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
    while True:
        try:
            ray.init(address=address, namespace="xidstream", log_to_driver=False, logging_level="ERROR")
            return
        except (ConnectionError, RuntimeError):
            assert is_running() and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.5)


def _autoscaling(address: str, worker: dict[str, float], max_workers: int) -> dict[str, Any]:
    node = {"node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "xidstream-test",
        "max_workers": max_workers,
        "idle_timeout_minutes": 0.2,
        "provider": {
            "type": "external",
            "module": "tests.cluster.provider.Provider",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
        },
        "available_node_types": {
            "ray.head.default": {**node, "resources": {"CPU": 2}, "max_workers": 0},
            "worker": {**node, "resources": worker, "max_workers": max_workers},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 10,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
