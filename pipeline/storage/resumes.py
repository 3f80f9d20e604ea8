"""The tables that a person wants delivered again, after they were parked: one small object for each.

``xidstream table resume`` writes it. The next epoch with a sink ends the park in the record of the slot, and removes
the object after that. An object of a table that is not parked has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xidstream.pipeline.storage.envelope import Document, now
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

_TABLE: Final = Document[str](
    "xidstream.resumed-table",
    1,
    "remove the object, and give `xidstream table resume` again",
    lambda table: {"table": table, "asked_at": now().isoformat()},
    lambda content: str(content["table"]),
)


def request_resume(storage: Storage, layout: Layout, relid: int, table: str) -> None:
    """Durably. Raises StorageFault."""
    _TABLE.write(storage, layout.resume_key(relid), table)


def read_resumes(storage: Storage, layout: Layout) -> frozenset[int]:
    """The relids. The name of an object says all that counts. Raises StorageFault."""
    names = (key.rpartition("/")[2] for key in storage.list_keys(layout.resumed_prefix))
    return frozenset(int(stem) for name in names if (stem := name.removesuffix(".json")).isdigit())


def forget_resumes(storage: Storage, layout: Layout, relids: Iterable[int]) -> None:
    """Raises StorageFault."""
    storage.delete([layout.resume_key(relid) for relid in relids])
