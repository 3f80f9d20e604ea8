"""What a run's settings say to its sink, beside where it is: for how long tables keep what they do not need, and the
pace of their commits. Each kind of sink takes what it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION, DeltaRetention
from xidstream.pipeline.settings.log_layout import NO_LAYOUT, LogLayout


@dataclass(frozen=True)
class SinkSettings:
    """``commit_every_s``: of Iceberg tables; 0 commits each batch at once. ``layout``: of Delta tables."""

    retention: DeltaRetention = DEFAULT_RETENTION
    commit_every_s: float = 1.0
    layout: LogLayout = NO_LAYOUT


DEFAULT_SETTINGS: Final = SinkSettings()
