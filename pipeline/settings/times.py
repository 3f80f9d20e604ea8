"""Times as people write them in settings: a number and its unit, as PostgreSQL has them (``10ms``, ``5min``, ``24h``).

Every setting that gives a time takes that. One whose name ends with a unit (``buffers_idle_s``) takes a number alone,
too, which is of that unit, as a size takes a number of bytes. One whose name has none (``mirror_every``) takes no
number alone, because nobody could read it.

Example: ``status_interval_ms`` = ``"0.5s"`` and ``status_interval_ms`` = 500 are the same, and are 500 afterwards.

Called by ``config``, by the checks of settings, and by commands with such an argument.
"""

from __future__ import annotations

import re
from typing import Final

from xidstream.pipeline.errors import ConfigError

_DURATION: Final = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*(ms|s|min|h|d)\s*")
_NUMBER: Final = re.compile(r"\s*[0-9]{1,12}(?:\.[0-9]{1,3})?\s*")
_MS: Final = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
"""Milliseconds of PostgreSQL's own units of time, but for microseconds."""


def duration_s(text: str, name: str) -> float:
    """The seconds of ``60s``, ``5min``, ``24h``. Raises ConfigError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{name} must be a time with its unit (ms, s, min, h, d), such as 60s, got {text!r}"
        )
    return float(match[1]) * _MS[match[2]] / 1_000


def parse_time(value: float | str, name: str) -> float:
    """A time in the unit that ``name`` ends with: whole milliseconds (an int), or seconds. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    in_ms = name.endswith("_ms")
    if _NUMBER.fullmatch(value):
        found = float(value)
    else:
        seconds = duration_s(value, name)
        found = round(seconds * 1_000, 6) if in_ms else seconds
    if not in_ms:
        return found
    if found != int(found):
        raise ConfigError(f"{name} must be whole milliseconds, got {value!r}")
    return int(found)


def time_text(value: float, name: str) -> str:
    """A time of the unit that ``name`` ends with, as people write it: ``10ms``, ``2s``, ``1min``."""
    ms = value if name.endswith("_ms") else value * 1_000
    unit = next((unit for unit in reversed(_MS) if ms >= _MS[unit] and ms % _MS[unit] == 0), "ms")
    return f"{ms / _MS[unit]:g}{unit}" if ms else "0"
