"""Which server a slot's record belongs to: its system identifier (a folder's name) and its timeline (``server.json``).

LSNs mean nothing on another server, and on a timeline that branched off below what was delivered they mean
something else. Neither shows in the record of progress, so it is kept beside it: written by the reader before it reads.
Whether a found difference matters is decided in ``pipeline.postgres.continuity``.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.storage.envelope import Document, a_number
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import has_record
from xidstream.pipeline.storage.storage import Storage

_TIMELINE: Final = Document[int](
    "xidstream.server",
    1,
    "restore the object; or, if the server was never promoted or restored, remove it",
    lambda timeline: {"timeline": timeline},
    lambda content: a_number(content["timeline"]),
)


def read_timeline(storage: Storage, layout: Layout) -> int | None:
    """None before the first one. Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _TIMELINE.read(storage, layout.server_key)


def write_timeline(storage: Storage, layout: Layout, timeline: int) -> None:
    """Replace the record, durably. Raises StorageFault."""
    _TIMELINE.write(storage, layout.server_key, timeline)


def other_servers(storage: Storage, layout: Layout) -> list[int]:
    """System identifiers, not the layout's own, under which the storage has a position of a slot of this name."""
    found = []
    for folder in storage.list_folders():
        if folder.isdecimal() and int(folder) != layout.system_identifier:
            other = Layout(int(folder), layout.slot, layout.epoch)
            if has_record(storage, other):
                found.append(other.system_identifier)
    return found
