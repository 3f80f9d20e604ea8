"""Reads a settings file: TOML, whose keys are the settings of ``pipeline.settings.config``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.local_paths import absolute

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file. Raises ConfigError when it cannot be read or parsed."""
    try:
        content = Path(absolute(str(path))).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError for a path that can be none
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}", remedy="give the path of a TOML file") from None
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # also what is TOML, and more than Python's parser takes
        text = f"{path} is not valid TOML: {error}"
        raise ConfigError(text, remedy="correct the file; docs/settings.md has examples") from None


def unknown_setting(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a key, as it was given, whose ``name`` is not one of ``known``; it names the nearest one."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see docs/settings.md, or `xidstream run --help-all`"
    return ConfigError(f"unknown setting {key!r}", remedy=hint)
