"""What a run's settings say to its sink, beside where it is: for how long tables keep what they do not need, and the
pace of their commits. Each kind of sink takes what it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION, DeltaRetention


@dataclass(frozen=True)
class SinkSettings:
    """``commit_every_s``: of Iceberg tables; 0 commits each batch at once."""

    retention: DeltaRetention = DEFAULT_RETENTION
    commit_every_s: float = 1.0


DEFAULT_SETTINGS: Final = SinkSettings()
