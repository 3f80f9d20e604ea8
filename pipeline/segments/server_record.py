"""Which server a slot's record belongs to: its system identifier (a folder's name) and its timeline (``server.json``).

LSNs mean nothing on another server, and on a timeline that branched off below what was delivered they mean
something else. Neither shows in the record of progress, so it is kept beside it: written by the reader before it reads.
Whether a found difference matters is decided in ``pipeline.slot.continuity``.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.segments.envelope import seal, unseal
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.progress import has_record
from xidstream.pipeline.segments.storage import Storage

FORMAT: Final = "xidstream.server"
VERSION: Final = 1
_REMEDY: Final = "restore the object; or, if the server was never promoted or restored, remove it"


def read_timeline(storage: Storage, layout: Layout) -> int | None:
    """None before the first one. Raises SegmentCorrupt, StorageFault."""
    data = storage.read_buffer(layout.server_key)
    if data is None:
        return None
    timeline = unseal(bytes(data), FORMAT, VERSION, layout.server_key, remedy=_REMEDY).get("timeline")
    if not isinstance(timeline, int):
        raise SegmentCorrupt(f"object {layout.server_key!r} lacks a part or has a wrong one", remedy=_REMEDY)
    return timeline


def write_timeline(storage: Storage, layout: Layout, timeline: int) -> None:
    """Replace the record, durably. Raises StorageFault."""
    storage.write_bytes(layout.server_key, seal(FORMAT, VERSION, {"timeline": timeline}))


def other_servers(storage: Storage, layout: Layout) -> list[int]:
    """System identifiers, not the layout's own, under which the storage has a position of a slot of this name."""
    found = []
    for folder in storage.list_folders():
        if folder.isdecimal() and int(folder) != layout.system_identifier:
            other = Layout(int(folder), layout.slot, layout.epoch)
            if has_record(storage, other):
                found.append(other.system_identifier)
    return found
