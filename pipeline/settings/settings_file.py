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
        return tomllib.loads(Path(absolute(str(path))).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="give the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        text = f"{path} is not valid TOML: {error}"
        raise ConfigError(text, remedy="correct the file; docs/settings.md has examples") from None


def unknown_setting(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a key, as it was given, whose ``name`` is not one of ``known``; it names the nearest one."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see docs/settings.md, or `xidstream run --help-all`"
    return ConfigError(f"unknown setting {key!r}", remedy=hint)
