"""For how long a Delta table keeps what its present version does not need: its log, and files that a commit removed.

A reader that has opened a version needs its files for as long as it reads, and nothing of the log. Who asks for a
version by its number, or follows the table commit by commit (Spark's ``readStream.format("delta")``), needs the log.
So the two have a time each.

The times are properties of the table, where deltalake and Spark look for them, too. ``RECORDED`` has what was written
here, so a value that a person has set is told from ours, and stays.

``config`` makes it from two settings. The Delta sink gives it to its tables (``log_tables.table_metadata``), and
removes by it (``delta.upkeep``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.log_retention import KEEP_ALL, LogRetention
from xidstream.pipeline.settings.times import duration_s

LOG: Final = "delta.logRetentionDuration"
REMOVED_FILES: Final = "delta.deletedFileRetentionDuration"
RECORDED: Final = "xidstream.retention"
PROPERTIES: Final = frozenset({LOG, REMOVED_FILES, RECORDED})
_LONGEST_H: Final = 366 * 24
DELTA_LOG: Final = "interval 30 days"
"""Delta's own time for a log."""
_UNITS_S: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_INTERVAL: Final = re.compile(rf"interval\s+(\d+)\s+({'|'.join(_UNITS_S)})s?")


@dataclass(frozen=True)
class DeltaRetention:
    """``log_h``: hours for which a commit's own file stays. ``files_h``: hours for which a file stays that a commit
    removed; 0, which no setting gives, is none. ``changes``: how long the present version keeps changes."""

    log_h: int = 1
    files_h: int = 12
    changes: LogRetention = KEEP_ALL

    @classmethod
    def of_settings(cls, log: str, files: str, changes: str = "") -> DeltaRetention:
        """Raises ConfigError for what is no whole number of hours from ``1h`` to ``366d``, and as
        ``LogRetention.parse``."""
        return cls(
            _hours(log, "delta_log_retention"),
            _hours(files, "delta_file_retention"),
            LogRetention.parse(changes),
        )

    @property
    def properties(self) -> Mapping[str, str]:
        """A table remembers for twice as long which files were removed, and for an hour at least. What a checkpoint
        does not remember is never found again, and the run may be down when the time comes."""
        remembered_h = max(1, 2 * self.files_h)
        return {LOG: f"interval {self.log_h} hours", REMOVED_FILES: f"interval {remembered_h} hours"}

    def missing(self, found: Mapping[str, str | None]) -> dict[str, str]:
        """The properties to set where the table has ``found``: none that a person has set."""
        recorded = json.loads(found.get(RECORDED) or "{}")
        ours = dict(self.properties)
        if recorded == ours:
            return {}
        set_here = {key: value for key, value in ours.items() if found.get(key) in (None, recorded.get(key))}
        return {**set_here, RECORDED: json.dumps(ours)}

    def files_s_of(self, found: Mapping[str, str | None]) -> float | None:
        """Seconds: ``files_h``, or what a person has set as the table's own time, which counts then. None for a time
        that is not understood here."""
        recorded = json.loads(found.get(RECORDED) or "{}")
        if found.get(REMOVED_FILES) in (None, recorded.get(REMOVED_FILES)):
            return self.files_h * 3600.0
        return _interval_s(found[REMOVED_FILES])

    def log_s_of(self, found: Mapping[str, str | None]) -> float | None:
        """Seconds: of the table's own time, whoever has set it. None as above."""
        return _interval_s(found.get(LOG) or DELTA_LOG)


DEFAULT_RETENTION: Final = DeltaRetention()


def kept_files_s(found: Mapping[str, str | None]) -> float | None:
    """Seconds for which the files stay that a commit removed, by what the table has of the run's setting or of a
    person's; for who does not know the setting. None for a time that is not understood here."""
    interval = found.get(REMOVED_FILES)
    if interval is None:
        return DEFAULT_RETENTION.files_h * 3600.0
    seconds = _interval_s(interval)
    is_ours = interval == json.loads(found.get(RECORDED) or "{}").get(REMOVED_FILES)
    return seconds / 2 if seconds is not None and is_ours else seconds


def _interval_s(text: str | None) -> float | None:
    match = _INTERVAL.fullmatch((text or "").strip().lower())
    return None if match is None else float(match[1]) * _UNITS_S[match[2]]


def _hours(text: str, name: str) -> int:
    hours = duration_s(text, name) / 3600
    if hours != int(hours) or not 1 <= hours <= _LONGEST_H:
        raise ConfigError(f"{name} must be whole hours from 1h to 366d, got {text!r}")
    return int(hours)
