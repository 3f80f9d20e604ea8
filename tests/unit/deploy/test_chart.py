"""deploy/chart: Helm itself, as a library, lints and renders it; Kubernetes' schemas judge what comes out.

Needs the extra ``deploy``. No cluster is asked, and none was: docs/cluster.md says what was tried.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from xidstream.pipeline.settings.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

helm = pytest.importorskip(
    "helm_python", reason="the extra `deploy` is not installed, or has no Helm for this machine"
)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `deploy` is not installed")

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "chart"
EXAMPLE: dict[str, Any] = yaml.safe_load((CHART / "ci" / "example-values.yaml").read_text(encoding="utf-8"))
WARNING = 2
"""Of Helm's severities."""

Values = dict[str, Any]
WITH_VOLUME = {"persistence": {"enabled": True, "storageClass": "fast"}}
WITH_CLAIM = {"persistence": {"enabled": True, "existingClaim": "mine"}}
BARE: Values = {
    "metrics": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False},
    "password": {"secretName": ""},
}
FULL: Values = {
    "image": {"repository": "REGISTRY/xidstream", "tag": "9", "pullSecrets": [{"name": "registry"}]},
    "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "envFrom": [{"secretRef": {"name": "keys"}}],
    "serviceAccount": {
        "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/xidstream"}
    },
    "networkPolicy": {"from": [{"namespaceSelector": {}}], "egressPorts": [6432]},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "only", "operator": "Exists"}],
}


def values(changed: Mapping[str, Any] = {}) -> Values:
    """The example with ``changed``, whose mappings are joined with the example's."""
    joined = copy.deepcopy(EXAMPLE)
    for name, value in changed.items():
        joined[name] = {**joined.get(name, {}), **value} if isinstance(value, dict) else value
    return joined


def rendered(changed: Mapping[str, Any] = {}) -> dict[str, dict[str, Any]]:
    """Kind → the one object of this kind."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values(changed), name="shop", namespace="prod")
    objects = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    kinds = [each["kind"] for each in objects if each]
    assert len(kinds) == len(set(kinds))
    return {each["kind"]: each for each in objects if each}


def run_settings(objects: Mapping[str, Any]) -> dict[str, Any]:
    return tomllib.loads(objects["ConfigMap"]["data"]["run.toml"])


def pod(objects: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["StatefulSet"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("changed", [{}, WITH_VOLUME, WITH_CLAIM, BARE, FULL])
def test_helm_finds_nothing_wrong_and_all_objects_fit_kubernetes(changed: Values) -> None:
    report = helm.lint(str(CHART), values(changed), strict=True)
    assert not report["errors"]
    assert [each for each in report["messages"] if each["severity"] >= WARNING] == []
    for each in rendered(changed).values():
        for version in ("1.25", "1.37"):
            kubernetes_validate.validate(each, version, strict=True)


def test_a_default_release_is_one_pod_that_may_do_little() -> None:
    objects = rendered()
    assert sorted(objects) == ["ConfigMap", "NetworkPolicy", "Service", "ServiceAccount", "StatefulSet"]
    spec = pod(objects)
    (container,) = spec["containers"]
    assert objects["StatefulSet"]["spec"]["replicas"] == 1
    assert spec["securityContext"]["runAsNonRoot"]
    user = next(
        line for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines() if line.startswith("USER")
    )
    assert user == f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    security = container["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert container["args"] == ["run", "--config", "/etc/xidstream/run.toml"]
    assert not spec["automountServiceAccountToken"] and "livenessProbe" not in container
    assert spec["terminationGracePeriodSeconds"] > 120, "what a run that is ended may take for its journal"


def test_the_settings_of_the_run_are_those_of_the_values_and_numbers_stay_whole() -> None:
    more = {
        "buffers_max": 16,
        "journal_max_bytes": 8589934592,
        "spark_executor_cpus": 0.5,
        "create_slot": True,
    }
    table = {"spark_conf": {"spark.sql.shuffle.partitions": 4}}
    objects = rendered({"settings": {**more, **table}})
    found = run_settings(objects)
    assert found.items() >= {**EXAMPLE["settings"], **more, **table}.items()
    assert type(found["buffers_max"]) is type(found["spark_conf"]["spark.sql.shuffle.partitions"]) is int
    config = Config.of(found)
    config.require("dsn", "slot", "publication", "storage", "sink")
    config.refuse_credentials()
    assert config.metrics_address.endswith(f":{pod(objects)['containers'][0]['ports'][0]['containerPort']}")
    assert config.status_address == "127.0.0.1:8275", "for `kubectl port-forward` alone"


def test_the_password_is_in_no_object_but_by_reference() -> None:
    (container,) = pod(rendered())["containers"]
    (password,) = [each for each in container["env"] if each["name"] == "PGPASSWORD"]
    assert password["valueFrom"] == {"secretKeyRef": {"name": "xidstream-postgres", "key": "password"}}
    (container,) = pod(rendered(BARE))["containers"]
    assert not [each for each in container["env"] if each["name"] == "PGPASSWORD"]


def test_every_mount_has_its_volume_and_the_home_is_where_it_was_asked_for() -> None:
    for changed, home in (({}, "emptyDir"), (WITH_VOLUME, None), (WITH_CLAIM, "persistentVolumeClaim")):
        objects = rendered(changed)
        volumes = {each["name"]: each for each in pod(objects)["volumes"]}
        claims = {
            each["metadata"]["name"]: each
            for each in objects["StatefulSet"]["spec"].get("volumeClaimTemplates", [])
        }
        (container,) = pod(objects)["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {*volumes, *claims}
        if home is None:
            assert claims["home"]["spec"]["storageClassName"] == "fast"
        else:
            assert home in volumes["home"] and not claims


def test_new_settings_are_a_new_pod() -> None:
    def sums(changed: Values) -> Any:
        return rendered(changed)["StatefulSet"]["spec"]["template"]["metadata"]["annotations"][
            "checksum/settings"
        ]

    assert sums({}) == sums({}) != sums({"settings": {"buffers_max": 3}})


def test_nothing_comes_in_but_the_metrics_and_nothing_goes_out_but_to_the_ports_named() -> None:
    policy = rendered(FULL)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [
        {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": [{"namespaceSelector": {}}]}
    ]
    assert {each["port"] for rule in policy["egress"] for each in rule["ports"]} == {53, 6432}
    assert "ingress" not in rendered({"metrics": {"enabled": False}})["NetworkPolicy"]["spec"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": {"dsn": "host=db dbname=shop user=u password=secret"}},
        {"settings": {"dsn": "postgresql://u:secret@db/shop"}},
        {"settings": {"slot": "Shop"}},
        {"settings": {"available_now": True}},
        {"image": {"repository": ""}},
        {"metric": {"enabled": True}},
        {"terminationGracePeriodSeconds": 30},
    ],
)
def test_values_that_are_secret_misspelt_or_missing_are_refused(wrong: Values) -> None:
    with pytest.raises(helm.HelmError) as refused, helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values(wrong))
        chart.render(values(wrong), name="shop", namespace="prod")
    assert "secret" not in str(refused.value)


def test_without_values_it_says_what_is_missing() -> None:
    with pytest.raises(helm.HelmError, match="dsn"), helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema({})
