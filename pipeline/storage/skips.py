"""The transactions that a person skips with ``xidstream slot skip``: one small object for each.

A transaction is named by its xid *and* its commit LSN, because an xid comes round again and an LSN alone is easily
mistyped: what does not fit both is not touched. The object is written by the command before a run reads it, and once
more by the run that left the transaction out. It stays as the record of what was skipped, by whom and why, until the
slot is dropped with its storage.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.parked import SkippedRows, SkippedTransaction, skipped_rows
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import Skips
from xidstream.pipeline.storage.envelope import Document, now
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class Skip:
    """``xid`` is 0 for a message outside of transactions, whose own LSN is ``commit_lsn``. Times are aware, UTC.

    ``left_out_at``: when a run met the transaction and left its rows out; None before. ``relids``: of the tables of
    these rows; None where they are not known.
    """

    xid: Xid
    commit_lsn: Lsn
    recorded_at: datetime.datetime
    recorded_by: str = ""
    reason: str = ""
    left_out_at: datetime.datetime | None = None
    relids: tuple[int, ...] | None = None


def _to_json(skip: Skip) -> dict[str, Any]:
    return {
        "xid": int(skip.xid),
        "commit_lsn": str(skip.commit_lsn),
        "recorded_at": skip.recorded_at.isoformat(),
        "recorded_by": skip.recorded_by,
        "reason": skip.reason,
        "left_out_at": None if skip.left_out_at is None else skip.left_out_at.isoformat(),
        "relids": None if skip.relids is None else list(skip.relids),
    }


def _from_json(content: dict[str, Any]) -> Skip:
    left_out_at = content["left_out_at"]
    return Skip(
        Xid(content["xid"]),
        Lsn.parse(content["commit_lsn"]),
        _time(content["recorded_at"]),
        content["recorded_by"],
        content["reason"],
        None if left_out_at is None else _time(left_out_at),
        None if content["relids"] is None else tuple(map(int, content["relids"])),
    )


def _time(text: Any) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


_SKIP: Final = Document(
    "xidstream.skipped-transaction",
    1,
    "give `xidstream slot skip` again after removing the object",
    _to_json,
    _from_json,
)


def write_skip(storage: Storage, layout: Layout, skip: Skip) -> None:
    """Durably, in place of one of the same transaction. Raises StorageFault."""
    _SKIP.write(storage, layout.skip_key(skip.xid, skip.commit_lsn), skip)


def read_skips(storage: Storage, layout: Layout) -> tuple[Skip, ...]:
    """All of the slot, in the order of their commits. Raises SegmentCorrupt, Unsupported, StorageFault."""
    keys = storage.list_keys(layout.skipped_prefix)
    found = [_SKIP.unseal(storage.read_bytes(key), key) for key in keys if key.endswith(".json")]
    return tuple(sorted(found, key=lambda skip: int(skip.commit_lsn)))


def pending_skips(storage: Storage, layout: Layout, confirmed_lsn: Lsn) -> Skips:
    """The skipped transactions that the server may still send, with all before ``confirmed_lsn`` confirmed, or that the
    journal has."""
    record = read_progress(storage, layout)
    if record is not None and record.journal:
        confirmed_lsn = min(confirmed_lsn, record.delivered_lsn)
    skips = read_skips(storage, layout)
    return frozenset((s.xid, s.commit_lsn) for s in skips if s.commit_lsn >= confirmed_lsn)


def note_skipped(storage: Storage, layout: Layout, met: Iterable[SkippedTransaction]) -> None:
    """Write down that these were met; the first time counts. Raises SegmentCorrupt, StorageFault."""
    wanted = {(each.xid, each.commit_lsn): each.relids for each in met}
    for skip in read_skips(storage, layout):
        name = skip.xid, skip.commit_lsn
        if name in wanted and skip.left_out_at is None:
            write_skip(storage, layout, dataclasses.replace(skip, left_out_at=now(), relids=wanted[name]))


def read_skipped_rows(storage: Storage, layout: Layout) -> tuple[SkippedRows, ...]:
    """The tables of which a run has left rows out because of these. Raises SegmentCorrupt, StorageFault."""
    return tuple(
        rows
        for skip in read_skips(storage, layout)
        if skip.left_out_at is not None
        for rows in skipped_rows([SkippedTransaction(skip.xid, skip.commit_lsn, skip.relids)])
    )
