"""Where a storage began with its slot (``beginning.json``): written before anything is read from the slot.

A run that dies between its first START_REPLICATION and its first record leaves a slot that was read, and a storage
without a record. This object says that the reader was ours, and where the slot stood. It is also the record of a
decision: that a person began anew, against which signs of an earlier run. What is said of a beginning is decided in
``pipeline.postgres.beginning``.

It stays when there is a record, because a sink that ends before this position lacks what was committed between.
``slot create`` writes it, and the reader where the storage has no record. ``slot drop`` removes it.
"""

from __future__ import annotations

from typing import Any, Final

from xidstream.pipeline.exchange import Beginning
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.envelope import Document, now
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage


def _to_json(beginning: Beginning) -> dict[str, Any]:
    return {
        "lsn": str(beginning.lsn),
        "is_anew": beginning.is_anew,
        "against": list(beginning.against),
        "begun_at": now().isoformat(),
    }


def _from_json(content: dict[str, Any]) -> Beginning:
    against = tuple(str(each) for each in content["against"])
    return Beginning(Lsn.parse(content["lsn"]), bool(content["is_anew"]), against)


_BEGINNING: Final = Document(
    "xidstream.beginning",
    1,
    "restore the object from a backup or an older version of the bucket; or give another --storage",
    _to_json,
    _from_json,
)


def read_beginning(storage: Storage, layout: Layout) -> Beginning | None:
    """The beginning; None where none was recorded. Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _BEGINNING.read(storage, layout.beginning_key)


def write_beginning(storage: Storage, layout: Layout, beginning: Beginning) -> None:
    """Durably, in place of an earlier one. Raises StorageFault."""
    _BEGINNING.write(storage, layout.beginning_key, beginning)


def count_left_behind(storage: Storage, layout: Layout) -> int:
    """How many objects of a journal and of prepared transactions there are. Without a record nobody can place them."""
    return sum(len(storage.list_keys(folder)) for folder in (layout.journal_prefix, layout.prepared_prefix))
