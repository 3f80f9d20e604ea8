"""Values of a setting for tables by pattern: ``PATTERN=VALUE``, several with commas, and perhaps one for all others.

A pattern is that of a shell (``*``, ``?``, ``[…]``), and a name is ``schema.table`` as the events of a run show it. The
first pattern that fits counts. So an empty value is worth saying: it takes tables out of what a later pattern asks for.

``log_retention`` and ``log_layout`` are such settings. What a value may be is theirs to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from xidstream.pipeline.errors import ConfigError

Value = TypeVar("Value")


class Parts(NamedTuple):
    """``by_pattern``: (pattern, value) in order. ``others``: the values without a pattern, none of them empty. All are
    stripped."""

    by_pattern: list[tuple[str, str]]
    others: list[str]


def parts_of(text: str, setting: str) -> Parts:
    """Raises ConfigError for a value without a pattern before its ``=``."""
    found = Parts([], [])
    for part in text.split(","):
        pattern, is_of_some, value = part.rpartition("=")
        if is_of_some and not pattern.strip():
            raise ConfigError(f"{setting} has a value without a pattern before the =: {part.strip()!r}")
        if is_of_some:
            found.by_pattern.append((pattern.strip(), value.strip()))
        elif value.strip():
            found.others.append(value.strip())
    return found


def first_fitting(table: str, by_pattern: Iterable[tuple[str, Value]], others: Value) -> Value:
    """``table``: ``schema.table``. ``others``: what counts where no pattern fits."""
    fitting = (each for pattern, each in by_pattern if fnmatchcase(table, pattern))
    return next(fitting, others)
