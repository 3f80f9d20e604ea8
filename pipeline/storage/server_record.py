"""Which server and which database a slot's record belongs to: its system identifier (a folder's name), and in
``server.json`` the server's timeline and the database.

LSNs mean nothing on another server, and on a timeline that branched off below what was delivered they mean
something else. Neither shows in the record of progress, so it is kept beside it: written by the reader before it reads.
Whether a found difference matters is decided in ``pipeline.postgres.continuity``.

The database's name is part of the id under which a log keeps its watermarks. A database that is renamed keeps its OID
and its slots, and its log must stay the same log: under another id the sink would seem to be another one. So the first
name stays in the id, as long as the OID is the same (``known_name``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.storage.envelope import Document, a_number
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import has_record
from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class ServerRecord:
    """``database``: the name that the database had when the storage began with it. ``database_oid``: pg_database's."""

    timeline: int
    database: str
    database_oid: int

    def known_name(self, database: str, oid: int) -> str:
        """The name that the log has of the database ``oid``, which is called ``database`` now."""
        return self.database if oid == self.database_oid else database


_SERVER: Final = Document[ServerRecord](
    "xidstream.server",
    2,
    "restore the object; or, if the server was never promoted or restored and its database never renamed, remove it",
    lambda record: {
        "timeline": record.timeline,
        "database": record.database,
        "database_oid": record.database_oid,
    },
    lambda content: ServerRecord(
        a_number(content["timeline"]), str(content["database"]), a_number(content["database_oid"])
    ),
)


def read_server(storage: Storage, layout: Layout) -> ServerRecord | None:
    """The record; None before the first one. Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _SERVER.read(storage, layout.server_key)


def write_server(storage: Storage, layout: Layout, record: ServerRecord) -> None:
    """Replace the record, durably. Raises StorageFault."""
    _SERVER.write(storage, layout.server_key, record)


def other_servers(storage: Storage, layout: Layout) -> list[int]:
    """System identifiers, not the layout's own, under which the storage has a position of a slot of this name."""
    found = []
    for folder in storage.list_folders():
        if folder.isdecimal() and int(folder) != layout.system_identifier:
            other = Layout(int(folder), layout.slot, layout.epoch)
            if has_record(storage, other):
                found.append(other.system_identifier)
    return found
