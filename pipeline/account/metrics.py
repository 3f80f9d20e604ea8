"""The samples of a run's metrics, drawn from its account and nothing else. ``metric_table`` says which there are.

An account's counts begin anew with an epoch or a driver, and a counter may never fall. ``Counts`` makes increments of
them. What was counted in the last seconds before an epoch ended is not in it, because nobody looked then.
``actors.supervision.ray_metrics`` gives all of this to Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xidstream.pipeline.account.metric_table import METRICS, Metric
from xidstream.pipeline.account.model import Account


@dataclass(frozen=True)
class Sample:
    """``value``: of a counter what the account has counted so far."""

    metric: Metric
    labels: dict[str, str]
    value: float


def samples(account: Account) -> Iterator[Sample]:
    """The samples of a run. What is not known has none."""
    if account.run is None:
        return
    for metric in METRICS:
        for values, value in metric.of(account):
            if value is not None:
                labels = {"slot": account.run.slot, **dict(zip(metric.labels, values, strict=True))}
                yield Sample(metric, labels, float(value))


class Counts:
    """The growth of one run's counters since they were last asked."""

    def __init__(self) -> None:
        self._epoch = ""
        self._marks: dict[Metric, float] = {}

    def begin(self, epoch: str) -> None:
        """Before the samples of an account: with a new epoch some counts begin anew."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._marks = {metric: mark for metric, mark in self._marks.items() if not metric.per_epoch}

    def increment(self, sample: Sample) -> float:
        """A count that fell has begun anew: all of it is new."""
        before = self._marks.get(sample.metric, 0.0)
        self._marks[sample.metric] = sample.value
        return sample.value - before if sample.value >= before else sample.value
