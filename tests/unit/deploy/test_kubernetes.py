"""deploy/kubernetes: what can be known of the manifests without a Kubernetes. Starts no Ray.

Ray's own autoscaler reads a RayCluster by the function that is called here. Each manifest is held against a schema,
because an API server drops a field that it does not know without a word: KubeRay's fields against
``kuberay.schema.yaml``, which says how it was made, and pods and all else against Kubernetes' own.
"""

from __future__ import annotations

import copy
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from xidstream.actors.cli.main import cli
from xidstream.actors.cli.options import build_config
from xidstream.actors.driver.spark_secret import SECRET_VARIABLE
from xidstream.pipeline.settings.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FOLDER = DEPLOY / "kubernetes"
MANIFESTS = ("raycluster.yaml", "rayjob.yaml")

KUBERAY = jsonschema.Draft202012Validator(
    yaml.safe_load(Path(__file__).with_name("kuberay.schema.yaml").read_text())
)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def manifest(name: str) -> dict[str, Any]:
    (document,) = documents(name)
    return document


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest(name)["spec"]
    return spec if name == "raycluster.yaml" else spec["rayClusterSpec"]


def pods(name: str) -> list[dict[str, Any]]:
    return [template["spec"] for template in templates(cluster_spec(name))]


def pinned(package: str) -> str:
    found = re.findall(rf'^    "{package}==([^;"]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def settings() -> str:
    (text,) = [d["data"]["run.toml"] for d in documents("settings.yaml") if d["kind"] == "ConfigMap"]
    return str(text)


def templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_field_is_one_that_kuberay_knows_and_of_its_type(name: str) -> None:
    KUBERAY.validate(manifest(name))
    spec = cluster_spec(name)
    assert spec["authOptions"] == {"mode": "token"}
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52), "the first with tokens"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert not ({"resources", "labels"} & set(group)), "KubeRay refuses these beside rayStartParams"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec["headGroupSpec"].update(rayStartParams={"num-cpus": 4}),
        lambda spec: spec["workerGroupSpecs"][0].update(maxReplica=3),
        lambda spec: spec["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["autoscalerOptions"].update(upscalingMode="Fast"),
        lambda spec: spec.update(authOptions={"mode": "tokens"}),
        lambda spec: spec.pop("headGroupSpec"),
    ],
)
def test_a_field_that_is_misspelt_missing_or_of_another_type_is_found(spoil: Callable[[Any], Any]) -> None:
    for name in MANIFESTS:
        spoilt = copy.deepcopy(manifest(name))
        spoil(spoilt["spec"] if name == "raycluster.yaml" else spoilt["spec"]["rayClusterSpec"])
        assert not KUBERAY.is_valid(spoilt)


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_pods_settings_and_account_fit_the_schema_of_kubernetes(version: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="the extra `deploy` is not installed"
    )
    for name in MANIFESTS:
        for template in templates(cluster_spec(name)):
            pod = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "pod"},
                "template": template,
            }
            kubernetes_validate.validate(pod, version, strict=True)
    for document in documents("settings.yaml"):
        kubernetes_validate.validate(document, version, strict=True)


def test_job_and_cluster_have_the_same_nodes() -> None:
    assert cluster_spec("raycluster.yaml") == cluster_spec("rayjob.yaml")


@pytest.mark.parametrize("name", MANIFESTS)
def test_rays_autoscaler_reads_it_and_workers_come_and_go(name: str) -> None:
    cluster = {"metadata": {"name": "xidstream", "namespace": "default"}, "spec": cluster_spec(name)}
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    head, worker = (config["available_node_types"][n] for n in ("headgroup", "worker"))
    assert worker["min_workers"] == 0 < worker["max_workers"] == config["max_workers"]
    assert 0 < config["idle_timeout_minutes"] <= 10
    for node in (head, worker):
        assert node["resources"]["CPU"] >= 2
        assert node["resources"]["memory"] >= 4 << 30


@pytest.mark.parametrize("name", MANIFESTS)
def test_buffers_beyond_the_floor_fit_workers_alone_and_the_most_of_them_the_most_workers(name: str) -> None:
    config = Config.of(tomllib.loads(settings()))
    resource = config.buffer_resource
    assert resource
    cluster = {"metadata": {"name": "xidstream", "namespace": "default"}, "spec": cluster_spec(name)}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert resource not in types["headgroup"]["resources"]
    worker = types["worker"]["resources"]
    assert 1 <= worker[resource] <= worker["CPU"], "a core for each"
    assert worker[resource] * config.buffer_cpus <= worker["CPU"]
    assert config.buffers_max <= config.buffers_min + types["worker"]["max_workers"] * worker[resource]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_pod_has_the_image_the_settings_and_the_password_by_reference(name: str) -> None:
    config_map, account = documents("settings.yaml")
    for pod in pods(name):
        assert pod["restartPolicy"] == "Never"
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        (container,) = pod["containers"]
        assert re.fullmatch(r"REGISTRY/xidstream:\d+\.\d+\.\d+", container["image"])
        environment = {e["name"]: e for e in container["env"]}
        assert set(environment["PGPASSWORD"]) == {"name", "valueFrom"}
        for name in ("PGPASSWORD", SECRET_VARIABLE):
            assert "secretKeyRef" in environment[name]["valueFrom"]
        (volume,) = pod["volumes"]
        (mount,) = container["volumeMounts"]
        assert volume["configMap"]["name"] == config_map["metadata"]["name"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], "/etc/xidstream")
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_manifests_and_pins_have_one_ray() -> None:
    assert {cluster_spec(name)["rayVersion"] for name in MANIFESTS} == {pinned("ray")}


def test_the_entrypoint_and_its_settings_are_what_the_command_line_takes(tmp_path: Path) -> None:
    program, command, *arguments = shlex.split(manifest("rayjob.yaml")["spec"]["entrypoint"])
    assert (program, command) == ("xidstream", "run")
    options = cli.commands[command].make_context(command, arguments).params
    assert options.pop("config_file") == Path("/etc/xidstream/run.toml")
    file = tmp_path / "run.toml"
    file.write_text(settings(), encoding="utf-8")
    config = build_config(file, options)
    assert isinstance(config, Config)
    config.require("dsn", "slot", "publication", "storage", "sink")
    assert config.available_now
    config.refuse_credentials()
    assert "password" not in config.dsn
