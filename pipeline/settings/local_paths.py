"""Paths on a file system, as people write them in settings: absolute, and compared.

A setting is the same place in every process of a run, whatever its working directory: ``~`` is the user's home folder,
and a relative path begins in the folder where the command was typed. No shell expands the ``~`` of ``delta:~/tables``
or of a settings file, and a folder that is named ``~`` is one ``rm -r`` from a disaster.

Called by ``config``, the storage and the sink's locations. Nothing is looked up on the disk but links (``overlap``).
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote, urlsplit

from xidstream.pipeline.errors import ConfigError

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_SAME: Final = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
"""Two names of one kind of store."""


def is_path(text: str) -> bool:
    """Whether it is a path, and no URI."""
    return _SCHEME.match(text) is None


def absolute(path: str) -> str:
    """Raises ConfigError for the home folder of somebody who is not there."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{path.partition('/')[0]!r} is nobody's home folder",
            remedy=f"correct the name; for a folder with this name write ./{path}",
        )
    return os.path.abspath(expanded)


def overlap(one: str, other: str) -> bool:
    """Whether one of two places is, or is in, the other. Each is a path or a URI; credentials in it do not count."""
    a, b = _parts(one), _parts(other)
    n = min(len(a), len(b))
    return a[:n] == b[:n]


def _parts(address: str) -> list[str]:
    if is_path(address):
        return ["file", "", *_names(os.path.realpath(absolute(address)))]
    parts = urlsplit(address.partition("?")[0])
    scheme = parts.scheme.lower()
    if scheme == "file":
        return ["file", "", *_names(os.path.realpath(absolute(unquote(parts.path))))]
    # The user of abfs://container@account is part of the address; that of s3://key:secret@bucket is not.
    host = parts.netloc if scheme.startswith("abfs") else parts.netloc.rpartition("@")[2]
    return [_SAME.get(scheme, scheme), host, *_names(unquote(parts.path))]


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
