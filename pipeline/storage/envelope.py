"""Small JSON documents that can be verified: ``{format, version, n_bytes, checksum, content}``.

``n_bytes`` and ``checksum`` are those of ``content`` in canonical form (sorted keys, no spaces, ASCII). So any JSON
tool can read a document, and it can still be verified. A damaged document raises SegmentCorrupt with its key. Another
version raises Unsupported, because nobody must guess.

A document may be replaced while somebody else reads it (``status`` beside a run). Arrow asks an object store for an
object's size first, and then for that many bytes: of a longer one that came in between it gets the beginning. The
checksum finds that, so a reader tries again until it gets the same bytes twice. A second look at the size of every
object was rejected: it is one more request for each segment, and segments are never replaced.

``Document`` is one kind of them: the only way that they are written and read. A kind is made where its value's class
is, and says how the value becomes ``content`` and the reverse.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from xidstream.pipeline.errors import SegmentCorrupt, Unsupported, UsageError
from xidstream.pipeline.storage.storage import Storage

_T = TypeVar("_T")


@dataclass(frozen=True)
class Document(Generic[_T]):
    """``remedy``: what a person does about a damaged one. ``from_json`` may raise KeyError, IndexError, TypeError,
    ValueError, AttributeError and UsageError for what ``to_json`` never makes."""

    format: str
    version: int
    remedy: str
    to_json: Callable[[_T], dict[str, Any]]
    from_json: Callable[[dict[str, Any]], _T]

    def write(self, storage: Storage, key: str, value: _T) -> None:
        """Durably, in place of what is there. Raises StorageFault."""
        storage.write_bytes(key, self.seal(value))

    def read(self, storage: Storage, key: str) -> _T | None:
        """The document; None where there is no such object. Raises SegmentCorrupt, Unsupported, StorageFault."""
        damaged: bytes | None = None
        while True:
            buffer = storage.read_buffer(key)
            if buffer is None:
                return None
            data = bytes(buffer)
            try:
                return self.unseal(data, key)
            except SegmentCorrupt:
                if data == damaged:
                    raise
                damaged = data

    def seal(self, value: _T) -> bytes:
        return seal(self.format, self.version, self.to_json(value))

    def unseal(self, data: bytes, key: str) -> _T:
        """``key`` is for the message. Raises SegmentCorrupt, and Unsupported for another version."""
        try:
            document = json.loads(data)
            content = document["content"]
            body = _canonical(content)
            found = (document["format"], document["n_bytes"], document["checksum"], type(content))
            version = document["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._corrupt(f"object {key!r} is not a {self.format} document") from error
        if found != (self.format, len(body), _checksum(body), dict):
            raise self._corrupt(f"object {key!r} is damaged: it differs from what was written")
        if version != self.version:
            raise Unsupported(
                f"object {key!r} has version {version!r} of {self.format}: this xidstream reads version {self.version}",
                remedy="go on with the xidstream that wrote it, or give another --storage and begin anew there, as "
                "that run's error says. Nothing was changed or deleted",
            )
        try:
            return self.from_json(content)
        except (LookupError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise self._corrupt(f"object {key!r} lacks a part or has a wrong one") from error

    def _corrupt(self, message: str) -> SegmentCorrupt:
        return SegmentCorrupt(message, remedy=self.remedy)


def seal(format_name: str, version: int, content: dict[str, Any]) -> bytes:
    body = _canonical(content)
    document = {
        "format": format_name,
        "version": version,
        "n_bytes": len(body),
        "checksum": _checksum(body),
        "content": content,
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def now() -> datetime.datetime:
    """For people: nothing is decided by the time in a document. Aware, UTC."""
    return datetime.datetime.now(datetime.timezone.utc)


def a_number(value: Any) -> int:
    """Raises ValueError for anything but a whole number."""
    if type(value) is not int:
        raise ValueError("not a number")
    return value


def a_count(value: Any) -> int:
    if a_number(value) < 0:
        raise ValueError("below zero")
    return int(value)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def _checksum(body: bytes) -> str:
    return f"crc32:{zlib.crc32(body):08x}"
