"""HOST:PORT as a setting writes it, IPv6 in brackets."""

from __future__ import annotations

import re
from typing import Final

from xidstream.pipeline.errors import ConfigError

_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")


def host_and_port(text: str, name: str) -> tuple[str, int]:
    """``name`` is the setting's. Raises ConfigError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"{name} must be HOST:PORT, got {text!r}", remedy="for example 127.0.0.1:8275")
    return match["v6"] or match["host"], int(match["port"])
