"""Removes objects that nobody needs any more: segments of ended epochs, and everything of a slot that was dropped.

An epoch's segments are useful to that epoch alone, because the next one reads from the slot again. The exceptions are
segments that a prepared transaction's manifest names. The sequencer calls this when an epoch begins and the reader
holds the slot; no other epoch of the slot reads or writes then. Nothing outside ``<system>/<slot>/epochs/`` is touched,
so pipelines may share a storage root.

A slot's record outlives the slot. A new slot of the same name begins further on. Compared with the old record that
looks like lost changes, and prepared transactions of the old slot do not belong to the new one. So the record is
removed when a slot is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Xid
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage


def clean_dead_epochs(
    storage: Storage,
    layout: Layout,
    keep: Set[str],
    keep_of: Set[Xid] = frozenset(),
    *,
    before_removing: Callable[[], None] = lambda: None,
) -> int:
    """Delete all objects of epochs other than ``layout.epoch``, except those in ``keep``. Returns how many.

    ``keep`` are the keys that prepared manifests name. Of the transactions ``keep_of`` the manifest is damaged, and may
    be restored: all that may be theirs stays. ``before_removing`` is called when the list is made. If it raises,
    nothing is removed. An epoch that is not in the list has begun since, and nothing of it is touched. Raises
    StorageFault. Some objects may be deleted by then; the next call deletes the rest.
    """
    folders = storage.list_folders(layout.epochs_prefix)
    dead = [folder for folder in folders if folder != f"{layout.epochs_prefix}/{layout.epoch}"]
    found = {folder: storage.list_keys(folder) for folder in dead}
    before_removing()
    n_deleted = 0
    for folder, keys in found.items():
        unneeded = [key for key in keys if key not in keep and _xid(layout, key) not in keep_of]
        n_deleted += len(unneeded)
        storage.delete(unneeded)
        if len(unneeded) == len(keys):
            storage.delete_empty_folder(folder)
    return n_deleted


def _xid(layout: Layout, key: str) -> Xid | None:
    try:
        return layout.parse_segment_key(key).xid
    except UsageError:
        return None  # rows of a batch on their way to Spark


def holds_slot(storage: Storage, layout: Layout) -> bool:
    """Whether an earlier run of this slot left its record here. (Segments alone are no record.)"""
    # A claim is a run that ended before it recorded anything.
    return any(
        not key.endswith(".claim")
        for folder in (layout.progress_prefix, layout.prepared_prefix, layout.journal_prefix)
        for key in storage.list_keys(folder)
    )


def remove_slot(storage: Storage, layout: Layout) -> dict[str, int]:
    """Delete everything that is stored of a dropped slot. Returns how many objects were deleted, by folder or object.

    The record is deleted last. So after a failure ``holds_slot`` is still true, and the next call does the rest.
    """
    removed = {}

    def remove_folder(folder: str) -> None:
        if n_objects := len(storage.list_keys(folder)):
            removed[folder] = n_objects
        storage.delete_folder(folder)

    for folder in (
        layout.prepared_prefix,
        layout.journal_prefix,
        layout.epochs_prefix,
        layout.skipped_prefix,
        layout.resumed_prefix,
        layout.snapshots_prefix,
    ):
        remove_folder(folder)
    for key in (layout.server_key, layout.beginning_key, layout.progress_key):
        if storage.exists(key):
            storage.delete([key])
            removed[key] = 1
    remove_folder(layout.progress_prefix)
    return removed
