"""The rows of snapshots that wait in a storage for a function."""

from __future__ import annotations

from xidstream.pipeline.storage.storage import Storage


def waiting_rows(storage_uri: str) -> list[str]:
    """Their keys, of all slots."""
    storage = Storage(storage_uri)
    keys = [key for folder in storage.list_folders() for key in storage.list_keys(folder)]
    return [key for key in keys if "/snapshots/rows/" in key]
