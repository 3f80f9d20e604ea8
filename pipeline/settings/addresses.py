"""HOST:PORT as a setting writes it, IPv6 in brackets; and what no path or URI of a setting may hold."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.local_paths import is_path

_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_address(text: str, name: str) -> None:
    """Raise ConfigError for a path or a URI with control characters, or with bytes that are no UTF-8; for a URI whose
    host is none, or that leads to another place than it seems to.

    A NUL ends no path, and a line break would make two lines of one in logs and errors. Percent-encoded they are as
    bad: who decodes the URI finds them. The text is not repeated, because it may hold a key.
    """
    if _CONTROL.search(text) or _CONTROL.search(unquote(text, errors="surrogateescape")):
        raise ConfigError(
            f"{name} must be a path or a URI without control characters, in UTF-8",
            remedy="choose another name for the folder",
        )
    if is_path(text):
        return
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket, which only an IPv6 address has in a host
        raise ConfigError(f"{name} is a URI whose host is none", remedy="correct the URI") from None
    is_file = parts.scheme.lower() == "file"
    if "#" in text or (is_file and "?" in text):
        # All that read URIs leave out what follows: the data would be in another folder.
        raise ConfigError(
            f"{name} is a URI with # or ? in the name of a folder", remedy="write %23 for #, and %3F for ?"
        )
    if not is_file and {".", ".."} & set(unquote(parts.path).split("/")):
        raise ConfigError(f"{name} is a URI with . or .. as a folder, which stores do not have")


def host_and_port(text: str, name: str) -> tuple[str, int]:
    """``name`` is the setting's. Raises ConfigError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"{name} must be HOST:PORT, got {text!r}", remedy="for example 127.0.0.1:8275")
    return match["v6"] or match["host"], int(match["port"])
