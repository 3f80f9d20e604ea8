"""Sizes as people write them in settings: of memory and of files, and of a JVM's heap."""

from __future__ import annotations

import re
from typing import Final

from xidstream.pipeline.errors import ConfigError

_SIZE: Final = re.compile(r"\s*([0-9]{1,18})\s*([kKMGT]?i?B?)\s*")
_JVM_SIZE: Final = re.compile(r"([0-9]{1,9})([kmgt])b?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_LEAST_EXECUTOR_BYTES: Final = 450 << 20
"""Spark refuses an executor with less: one and a half times the memory that it reserves (UnifiedMemoryManager)."""


def parse_size(text: str | int, name: str) -> int:
    """``64MB``, ``4 MiB``, ``1000``: bytes, in powers of 1024 as PostgreSQL counts. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name} must be a size such as 64MB, got {text!r}")
    return int(match[1]) * _UNITS[match[2].rstrip("B").rstrip("i").upper()]


def parse_heap(text: str) -> int | None:
    """A size as the JVM takes it, with a unit (``512m``): bytes. None for what is none."""
    match = _JVM_SIZE.fullmatch(text)
    return None if match is None else int(match[1]) * _UNITS[match[2].upper()]


def check_executor_memory(text: str, name: str) -> None:
    """Raise ConfigError for what ``parse_heap`` does not take, or less than Spark accepts."""
    n_bytes = parse_heap(text)
    if n_bytes is None or n_bytes < _LEAST_EXECUTOR_BYTES:
        raise ConfigError(
            f"{name} must be a size of 450m or more with its unit (k, m, g or t), got {text!r}",
            remedy="write it as Spark does, for example 512m or 2g",
        )
