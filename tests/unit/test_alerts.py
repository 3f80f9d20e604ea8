"""Alert rules and dashboard name metrics that there are, and each alert has its chapter in docs/alerts.md.

``promtool``, of Prometheus, also plays the rules' own tests where it is on the machine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from xidstream.pipeline.account.metric_table import METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "observability"
PAGE = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
PROMTOOL = shutil.which("promtool")
LABELS = {f"ray_{metric.name}": {"slot", *metric.labels} for metric in METRICS}
LABELS["ALERTS"] = {"slot", "alertname", "alertstate"}
"""Prometheus's own, of the rules."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def dashboard_expressions() -> list[str]:
    text = (FOLDER / "dashboard.json").read_text(encoding="utf-8")
    board = json.loads(text, object_pairs_hook=dict)
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [*found, *(each["expr"] for each in board["annotations"]["list"])]


def selectors(expression: Any) -> Iterator[Any]:
    """The metrics of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
        return
    inner = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for each in [*inner, *getattr(expression, "args", ())]:
        if isinstance(each, promql_parser.Expr):
            yield from selectors(each)


def check(expression: str) -> None:
    """Against the table of metrics."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    found = list(selectors(parsed))
    assert found, expression
    for each in found:
        assert each.name in LABELS, f"{each.name} is no metric of docs/metrics.md"
        matched = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", str(each.matchers)))
        assert matched <= LABELS[each.name], (
            f"{expression}: {each.name} has no label {matched - LABELS[each.name]}"
        )
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(labels.replace(" ", "").split(",")) <= set().union(*(LABELS[each.name] for each in found))


def chapters() -> dict[str, str]:
    _, *parts = re.split(r"^## (\w+)\n", PAGE, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_names_metrics_that_there_are_and_leads_to_its_chapter(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
    assert f"| [{rule['alert']}](#{rule['alert'].lower()}) | {rule['labels']['severity']} |" in PAGE
    said = re.findall(r"^\*\*(.+?)\.\*\* \S", chapters()[rule["alert"]], re.M)
    assert said == ["What it means", "What to look at", "What to do", "When it goes"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_no_alert_compares_the_clock_of_a_run_with_that_of_prometheus(rule: dict[str, Any]) -> None:
    """Where the run's was behind by more than five minutes, XidstreamError never fired."""
    assert "time()" not in rule["expr"]


def test_no_chapter_is_of_an_alert_that_there_is_not() -> None:
    assert sorted(chapters()) == sorted(rule["alert"] for rule in rules())


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_the_dashboard_shows_metrics_that_there_are(expression: str) -> None:
    check(expression)


def test_an_expression_of_a_metric_or_label_that_is_not_in_the_table_is_found() -> None:
    for wrong in ('ray_xidstream_run_up{part="x"}', "max by (slot) (ray_xidstream_run_down)", "up == 0"):
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on this machine")
def test_each_alert_fires_when_it_should_and_none_for_a_run_that_is_well() -> None:
    assert PROMTOOL is not None
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        played = subprocess.run(
            [PROMTOOL, *command], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
        )
        assert played.returncode == 0, played.stdout + played.stderr


def test_the_rules_own_tests_fire_each_alert_and_have_each_go() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")
    }
    quiet = {case["alertname"] for case in tests[0]["alert_rule_test"]}
    gone = {case["alertname"] for case in tests[-1]["alert_rule_test"] if not case.get("exp_alerts")}
    assert fired == quiet == gone == {rule["alert"] for rule in rules()}
