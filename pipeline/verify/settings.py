"""How a verification reads and what it shows.

They are no settings of ``Config``: a run has none of them. The command's options have their names and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from xidstream.pipeline.errors import ConfigError


@dataclass(frozen=True)
class VerifySettings:
    """How a verification reads and what it shows. Raises ConfigError for a value out of range.

    - ``rows_per_range``: about how many rows a range of the key has; smaller ones are found more exactly, and there are
      ``comparison.MOST_RANGES`` at most.
    - ``pause_ms``: between ranges of pages, of 64 MiB, that are read from the source. 0: the server is read at the
      speed of one connection.
    - ``bytes_per_s``: of the source's rows at most; 0: no limit.
    - ``timeout_s``: how long it waits for the log to reach a snapshot, and for a lock on a table. Five minutes are more
      than a run that keeps up ever needs, and hold a snapshot for less than an autovacuum minds.
    - ``keys``: how many rows that differ are shown of a table. 20 fit on a screen.
    - ``show_values``: whether these rows' values are shown, and not their keys alone.
    - ``staging``: URI of a folder for the source's rows that Spark's executors can read; empty: a temporary folder,
      which a session in one JVM can read.
    """

    rows_per_range: int = 100_000
    pause_ms: int = 0
    bytes_per_s: int = 0
    timeout_s: float = 300.0
    keys: int = 20
    show_values: bool = False
    staging: str = ""

    def __post_init__(self) -> None:
        least = {"rows_per_range": 1, "pause_ms": 0, "bytes_per_s": 0, "timeout_s": 0, "keys": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {lowest}")
