"""Filling a file in at COMMIT: in place, or as the end of a copy that an object store makes on its side.

``fill`` runs in any process, as often as it is called for: after a crash in the middle, or months later for a prepared
transaction. So each of its writes is of bytes that are either as written or as wanted. There is one more state. A kill
or a power cut may leave a write that crosses a block of the disk or a page of memory done on one side only. Both
begin at multiples of ``_BLOCK_BYTES``, so this is told from other content.

Everything is looked at before anything is written: a file that is refused is left as it was.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, known_reason
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.parquet.checking import verify_tail
from xidstream.pipeline.parquet.row_file import CommitStamp, PatchRange, RowFile

_BLOCK_BYTES: Final = 512
_NOT_OURS_TO_CHANGE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP})


class FillRefused(Exception):
    """The file belongs to somebody else, or to a read-only file system; ``str`` says so. It may be read."""


class FilledOtherwise(Exception):
    """The file holds the constants of another commit, as after a failover, or it is damaged where these stand. Whoever
    reads its rows takes the constants from elsewhere, and verifies the rest; ``str`` names it."""


def fill(path: str | Path, file: RowFile, commit: CommitStamp, *, name: str) -> None:
    """Fill the local file at ``path`` in, and wait until it is on disk. ``name`` is for messages.

    Raises, and changes nothing: SegmentCorrupt if the file is missing or has another length, FilledOtherwise, and
    FillRefused if it may be read but not changed. Raises StorageFault if the disk fails; then call it again.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SegmentCorrupt(f"segment {name!r} is missing") from error
    except OSError as error:
        if error.errno in _NOT_OURS_TO_CHANGE:
            raise FillRefused(f"segment {name!r} cannot be changed in place: {error.strerror}") from error
        raise _fault(name, error) from error
    try:
        n_bytes = os.fstat(descriptor).st_size
        if n_bytes != file.n_bytes:
            raise SegmentCorrupt(f"segment {name!r} has {n_bytes} bytes, {file.n_bytes} were written")
        slots = list(file.slots(commit))
        for slot in slots:
            _check(slot, _read(descriptor, slot), name)
        # Also what reads as filled in: the kernel may have failed to write it, and told that once, to a call before.
        for slot in slots:
            _write(descriptor, slot)
            reach("segment_filled_in_part")
        os.fdatasync(descriptor)
    except OSError as error:
        raise _fault(name, error) from error
    finally:
        os.close(descriptor)


def bound_tail(tail: bytes, file: RowFile, commit: CommitStamp, *, name: str) -> bytes:
    """The file from ``file.head_bytes`` on, filled in. ``tail`` are these bytes as stored; what is before them is
    taken over as it is. Raises SegmentCorrupt if they are not what was written, FilledOtherwise."""
    verify_tail(tail, file, name=name)
    content = bytearray(tail)
    for slot in file.slots(commit):
        span = slice(slot.offset - file.head_bytes, slot.end - file.head_bytes)
        _check(slot, bytes(content[span]), name)
        content[span] = slot.bound
    return bytes(content)


def _check(slot: PatchRange, found: bytes, name: str) -> None:
    """Raises FilledOtherwise if the slot holds neither what was written, nor what is wanted, nor some of each."""
    edge = -slot.offset % _BLOCK_BYTES
    torn = (slot.bound[:edge] + slot.written[edge:], slot.written[:edge] + slot.bound[edge:])
    if found not in (slot.bound, slot.written, *torn):
        raise FilledOtherwise(f"segment {name!r} holds the constants of another commit")


def _read(descriptor: int, slot: PatchRange) -> bytes:
    return os.pread(descriptor, len(slot.written), slot.offset)


def _write(descriptor: int, slot: PatchRange) -> None:
    n_written = 0
    while n_written < len(slot.bound):
        n_written += os.pwrite(descriptor, slot.bound[n_written:], slot.offset + n_written)


def _fault(name: str, error: OSError) -> StorageFault:
    return StorageFault(f"cannot fill in segment {name!r}: {known_reason(error) or type(error).__name__}")
