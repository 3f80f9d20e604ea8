"""Removing what nobody will ask for again: segments of ended epochs, and everything of a slot that was dropped.

An epoch's segments are useful to that epoch alone, because the next one reads from the slot again; the
exception is what a prepared transaction's manifest names. Called by the sequencer when an epoch begins and
the reader holds the slot: no other epoch of the slot reads or writes then. Nothing outside
``<system>/<slot>/epochs/`` is looked at, so pipelines may share a storage root.

A slot's record outlives the slot. A new slot of the same name begins further on, which looks like changes that
were lost; and prepared transactions of the old one are not the new one's. So whoever drops a slot removes it.
"""

from __future__ import annotations

from collections.abc import Set

from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.storage import Storage


def clean_dead_epochs(storage: Storage, layout: Layout, keep: Set[str]) -> int:
    """Delete all objects of other epochs than ``layout.epoch`` but those in ``keep``; returns how many.

    ``keep`` are the keys that prepared manifests name. Raises StorageFault; what was deleted by then is gone,
    and the next call does the rest.
    """
    n_deleted = 0
    for folder in storage.list_folders(layout.epochs_prefix):
        if folder == f"{layout.epochs_prefix}/{layout.epoch}":
            continue
        found = storage.list_keys(folder)
        dead = [key for key in found if key not in keep]
        n_deleted += len(dead)
        if len(dead) == len(found):
            storage.delete_folder(folder)
        else:
            storage.delete(dead)
    return n_deleted


def holds_slot(storage: Storage, layout: Layout) -> bool:
    """Whether an earlier run of this slot left its record here. (Segments alone are no record.)"""
    # Read, not looked up: a storage that cannot be read must not pass for an empty one.
    is_recorded = storage.read_buffer(layout.progress_key) is not None
    return is_recorded or bool(storage.list_keys(layout.prepared_prefix))


def remove_slot(storage: Storage, layout: Layout) -> dict[str, int]:
    """Delete what is stored of a slot that was dropped; returns how many objects went, by folder or object.

    The record goes last: after a failure ``holds_slot`` still says so, and the next call does the rest.
    """
    removed = {}
    for folder in (layout.prepared_prefix, layout.epochs_prefix, layout.skipped_prefix):
        if n_objects := len(storage.list_keys(folder)):
            removed[folder] = n_objects
        storage.delete_folder(folder)
    for key in (layout.server_key, layout.progress_key):
        if storage.exists(key):
            storage.delete([key])
            removed[key] = 1
    return removed
