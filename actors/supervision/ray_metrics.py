"""Gives a run's metrics to Ray, whose agent on this node offers them to Prometheus.

Only the run's own process sets them: it makes the account. Ray sends a process's metrics to its node's agent every
10 s (``metrics_report_interval_ms``). The agent forgets a gauge that did not come for two of these intervals, so the
gauges of a run that has ended are gone within 30 s. Counters stay with the agent as long as Ray runs. Ray adds the
prefix ``ray_`` and labels of its own, the process's ``WorkerId`` among them: a run that is started again has series of
its own.

Rejected: a metrics port of the run's own. On a cluster nobody would find it, while Ray's agents are scraped anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from xidstream.pipeline.account.metric_table import Metric, MetricKind
from xidstream.pipeline.account.metrics import Counts, samples
from xidstream.pipeline.account.model import Account


class RayMetrics:
    """The metrics of one slot's run. ``set`` is for one thread."""

    def __init__(self) -> None:
        self._counts = Counts()

    def set(self, account: Account) -> None:
        self._counts.begin("" if account.run is None else account.run.epoch)
        for sample in samples(account):
            if sample.metric.kind is MetricKind.GAUGE:
                _of_ray(sample.metric).set(sample.value, sample.labels)
            elif (increment := self._counts.increment(sample)) > 0:  # Ray takes no other
                _of_ray(sample.metric).inc(increment, sample.labels)


@cache
def _of_ray(metric: Metric) -> Any:
    """Ray wants one of each name in a process, whatever the number of its slots."""
    kind = ray_metrics.Gauge if metric.kind is MetricKind.GAUGE else ray_metrics.Counter
    return kind(metric.name, description=metric.help, tag_keys=("slot", *metric.labels))


def metrics_url() -> str | None:
    """Where the agent of this node offers them; None where Ray collects none."""
    if not ray.is_initialized():
        return None
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["MetricsExportPort"] > 0:
            return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    return None
