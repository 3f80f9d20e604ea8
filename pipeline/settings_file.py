"""Reads a settings file: TOML, whose keys are the settings of ``pipeline.config``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from xidstream.pipeline.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file. Raises ConfigError when it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="give the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        text = f"{path} is not valid TOML: {error}"
        raise ConfigError(text, remedy="correct the file; docs/settings.md has examples") from None
