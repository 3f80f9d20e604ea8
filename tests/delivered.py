"""Up to where a slot's sink holds everything, as the storage has it recorded: the server is told more than that."""

from __future__ import annotations

from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage


def delivered_lsn(storage_uri: str, slot: str) -> Lsn:
    """0/0 before the first record."""
    storage = Storage(storage_uri)
    for system in storage.list_folders():
        if system.isdigit():
            record = read_progress(storage, Layout(int(system), slot, "asked"))
            if record is not None:
                return record.delivered_lsn
    return INVALID_LSN
