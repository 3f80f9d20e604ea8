"""Whether a file is still what was written, be it filled or not.

The checksum is of the file as written. A file may have been filled since, wholly or in part, so the placeholders are
summed in place of what stands in the slots: the sum goes over slices of the file, and nothing is copied.
"""

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.parquet.row_file import RowFile


def verify(data: pa.Buffer, file: RowFile, *, name: str) -> None:
    """Raises SegmentCorrupt unless ``data`` is the file as written, but for what filling changes."""
    _verify(data, file, 0, 0, name)


def verify_tail(tail: pa.Buffer | bytes, file: RowFile, *, name: str) -> None:
    """Verify the file from ``file.head_bytes`` on, as if the head were right: a few kilobytes, with all that tells
    where the rest stands. It is for callers that have the pages of the head verified by their own sums."""
    _verify(tail, file, file.head_bytes, file.head_crc, name)


def _verify(data: Any, file: RowFile, start: int, crc: int, name: str) -> None:
    n_bytes = start + memoryview(data).nbytes
    if n_bytes != file.n_bytes:
        raise SegmentCorrupt(f"segment {name!r} has {n_bytes} bytes, {file.n_bytes} were written")
    position = start
    for slot in file.slots():
        crc = zlib.crc32(data[position - start : slot.offset - start], crc)
        crc = zlib.crc32(slot.written, crc)
        position = slot.end
    found = f"crc32:{zlib.crc32(data[position - start :], crc):08x}"
    if found != file.checksum:
        raise SegmentCorrupt(f"segment {name!r} has checksum {found}, written with {file.checksum}")
