"""What a store must be able to do for its segments to become files of a table in the same store, without their bytes
leaving it.

``S3Copies`` and ``AzureCopies`` are the two that can. Both put an object together from a range of another one and from
bytes that are sent, which are the end of the file, with the constants that COMMIT fills in. Google Cloud Storage has
nothing of the kind: its compose takes whole objects, and a segment's end is no object of its own. To write each segment
as two objects from the start was rejected, since every reader of segments would need both.

A copy appears whole or not at all. What a process leaves that was killed on the way is in no listing.

Called by ``segment_links``, for what it reads of a segment, too: so the same credentials read all of it.
"""

from __future__ import annotations

import abc
from typing import Final

from xidstream.pipeline.log_tables.locations import Location

SMALLEST_COPY_BYTES: Final = 5 << 20
"""Before the end of a file. With less, it is fetched and put: S3 takes no smaller part, and in Azure this costs one
write and one read, where a copy is three writes."""


class CopyRefused(Exception):
    """The store does not let us copy; ``str`` says why. Spark may still read and write."""


class StoreCopies(abc.ABC):
    """From one storage into the tables of one root. Any thread may call ``copy``."""

    @abc.abstractmethod
    def __init__(self, storage_uri: str, root: Location) -> None:
        """For places of which ``can_copy`` is true."""

    @staticmethod
    @abc.abstractmethod
    def may_copy(storage_uri: str, root: Location) -> bool:
        """Whether both are in stores of this kind, one or two, and its client is installed."""

    @staticmethod
    @abc.abstractmethod
    def can_copy(storage_uri: str, root: Location) -> bool:
        """Whether both are in one store of this kind, and its client is installed."""

    @abc.abstractmethod
    def read(self, name: str, start: int) -> bytes:
        """The segment ``name`` (a key of the storage) from the byte ``start`` on, in one request. pyarrow asks for its
        size before. Raises CopyRefused, SegmentCorrupt where there is no such segment, StorageFault."""

    @abc.abstractmethod
    def put(self, name: str, content: bytes, target: Location) -> None:
        """The object ``target``, which has the rows of the segment ``name``. Raises as ``copy``."""

    @abc.abstractmethod
    def copy(self, name: str, start: int, tail: bytes, target: Location) -> None:
        """The first ``start`` bytes of the segment ``name``, ``SMALLEST_COPY_BYTES`` or more, and ``tail``, as the
        object ``target``. Raises as ``read``."""
