"""Small JSON documents that can be verified: ``{format, version, n_bytes, checksum, content}``.

``n_bytes`` and ``checksum`` are those of ``content`` in canonical form (sorted keys, no spaces, ASCII). So any JSON
tool can read a document, and it can still be verified. A damaged document raises SegmentCorrupt with its key. Another
version raises Unsupported, because nobody must guess.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from xidstream.pipeline.errors import SegmentCorrupt, Unsupported


def seal(format_name: str, version: int, content: dict[str, Any]) -> bytes:
    body = _canonical(content)
    document = {
        "format": format_name,
        "version": version,
        "n_bytes": len(body),
        "checksum": f"crc32:{zlib.crc32(body):08x}",
        "content": content,
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def unseal(data: bytes, format_name: str, version: int, key: str, *, remedy: str) -> dict[str, Any]:
    """The content of a document. Raises SegmentCorrupt with ``remedy``, and Unsupported for another version."""
    try:
        document = json.loads(data)
        content = document["content"]
        body = _canonical(content)
        found = (document["format"], document["n_bytes"], document["checksum"], type(content))
        found_version = document["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SegmentCorrupt(f"object {key!r} is not a {format_name} document", remedy=remedy) from error
    if found != (format_name, len(body), f"crc32:{zlib.crc32(body):08x}", dict):
        raise SegmentCorrupt(f"object {key!r} is damaged: it differs from what was written", remedy=remedy)
    if found_version != version:
        raise Unsupported(
            f"object {key!r} has version {found_version!r} of {format_name}: this xidstream reads version {version}",
            remedy="go on with the xidstream that wrote it, or give another --storage and begin anew there, as that "
            "run's error says. Nothing was changed or deleted",
        )
    return content  # type: ignore[no-any-return]


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")
