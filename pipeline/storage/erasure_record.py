"""The record of an erasure: what was asked for, by whom, what it did, and which copies are left. No key's value.

One object for each, ``erasures/ID.json``, which stays: it is the audit. A second run of the command with the same ID
goes on with it, up to the same LSN. It is written before anything is changed, and again when that is done.

The keys are not in it, and neither is a hash of them. Keys are few enough to be guessed, so a hash with a salt that
stands beside it says as much as the key. Whoever wants to know for which person an erasure was gives it an ID of
theirs, such as a ticket's.

*Copies* are what may still have such a row: files that an erased table has replaced, and what the storage has from
before the sink got everything up to the LSN. The erasure is finished when none is there (``pipeline.erasure``).
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.envelope import Document
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOG: Final = "log"
BASE: Final = "base table"
STORAGE: Final = "storage"
IN_WORK: Final = "tables, in work"
"""A file that no commit names, and that may have been begun before: it is named, or removed, soon."""


@dataclass(frozen=True)
class Copy:
    """``where``: LOG, BASE, IN_WORK or STORAGE. ``path``: below the table's folder, or a key of the storage."""

    where: str
    path: str


@dataclass(frozen=True)
class ErasureRecord:
    """``table``: ``schema.table``. Rows with a commit LSN up to ``upto_lsn`` are erased. Times are aware, UTC.

    ``n_rows`` went from ``n_files`` files of the log, and ``base_rows`` from ``base_files`` of the base table, over all
    runs of the command. ``n_behind``: rows of the keys after the LSN, which stay. ``erased_at``: when no table had
    such a row any more; None before. ``finished_at``: when no copy was left; None before. ``cleared``: files that no
    commit names, and that had no such row when that was looked at."""

    id: str
    table: str
    n_keys: int
    upto_lsn: Lsn
    asked_at: datetime.datetime
    asked_by: str
    reason: str = ""
    n_rows: int = 0
    n_files: int = 0
    n_behind: int = 0
    n_changed: int = 0
    base_rows: int = 0
    base_files: int = 0
    erased_at: datetime.datetime | None = None
    finished_at: datetime.datetime | None = None
    copies: tuple[Copy, ...] = ()
    cleared: tuple[Copy, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The stored document, which the command prints, too."""
        return {
            "id": self.id,
            "table": self.table,
            "n_keys": self.n_keys,
            "upto_lsn": str(self.upto_lsn),
            "asked_at": self.asked_at.isoformat(),
            "asked_by": self.asked_by,
            "reason": self.reason,
            "n_rows": self.n_rows,
            "n_files": self.n_files,
            "n_behind": self.n_behind,
            "n_changed": self.n_changed,
            "base_rows": self.base_rows,
            "base_files": self.base_files,
            "erased_at": None if self.erased_at is None else self.erased_at.isoformat(),
            "finished_at": None if self.finished_at is None else self.finished_at.isoformat(),
            "copies": [[copy.where, copy.path] for copy in self.copies],
            "cleared": [[copy.where, copy.path] for copy in self.cleared],
        }


def _from_json(content: dict[str, Any]) -> ErasureRecord:
    def time(name: str) -> datetime.datetime | None:
        return None if content[name] is None else datetime.datetime.fromisoformat(content[name])

    counts = {
        name: int(content[name])
        for name in ("n_rows", "n_files", "n_behind", "n_changed", "base_rows", "base_files")
    }
    return ErasureRecord(
        id=str(content["id"]),
        table=str(content["table"]),
        n_keys=int(content["n_keys"]),
        upto_lsn=Lsn.parse(content["upto_lsn"]),
        asked_at=datetime.datetime.fromisoformat(content["asked_at"]),
        asked_by=str(content["asked_by"]),
        reason=str(content["reason"]),
        erased_at=time("erased_at"),
        finished_at=time("finished_at"),
        copies=tuple(Copy(str(where), str(path)) for where, path in content["copies"]),
        cleared=tuple(Copy(str(where), str(path)) for where, path in content["cleared"]),
        **counts,
    )


_RECORD: Final = Document(
    "xidstream.erasure",
    1,
    "give `xidstream erase` again with another --id: what is erased stays erased",
    ErasureRecord.to_json,
    _from_json,
)


def check_id(text: str) -> str:
    """Raises UsageError for what can be no part of a key."""
    if not _ID.fullmatch(text):
        raise UsageError(
            "the id of an erasure has 1 to 64 letters, digits, dots, - and _, and begins with a letter or digit"
        )
    return text


def write_erasure(storage: Storage, layout: Layout, record: ErasureRecord) -> None:
    """Durably, in place of what is there. Raises StorageFault."""
    _RECORD.write(storage, layout.erasure_key(record.id), record)


def read_erasure(storage: Storage, layout: Layout, id_: str) -> ErasureRecord | None:
    """Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _RECORD.read(storage, layout.erasure_key(id_))


def read_erasures(storage: Storage, layout: Layout) -> list[ErasureRecord]:
    """All of the slot, the oldest first. Raises SegmentCorrupt, Unsupported, StorageFault."""
    keys = [key for key in storage.list_keys(layout.erasures_prefix) if key.endswith(".json")]
    found = (_RECORD.read(storage, key) for key in keys)
    return sorted((each for each in found if each is not None), key=lambda record: record.asked_at)
