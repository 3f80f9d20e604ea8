"""The durable record of the confirmed LSN: written before the server is told, read when a run starts.

A slot that is found beyond this record was moved by someone else: changes are lost, and only this record can
tell. So it never goes back, and it is on disk when ``write_progress`` returns.

It also lists the prepared transactions that are through (``finished``). COMMIT PREPARED comes once: a crash
after its confirmation and before its record was deleted would leave the record for ever, and so it is told in the
same object, in one write. The latest ``REMEMBERED_FINISHED`` stay listed after that, because a buffer of an
earlier epoch may still write a record that nobody will ask for. An LSN is never used twice, so no entry outlives
its truth; where the server repeats such a transaction, the sink's watermark says that it is held.

And it keeps what the first record said of the PREPAREs before it (``cover``, see ``PrepareCover``).

The check and the write are two operations. Nobody comes between: whoever writes holds the slot, and a slot
has one holder. (Conditional writes were considered: ``pyarrow.fs`` has none.)
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import PrepareCover, PreparedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.segments.envelope import seal, unseal
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.storage import Storage

FORMAT: Final = "xidstream.progress"
VERSION: Final = 3
"""2 has ``finished``, 3 ``cover``; an older one is read as one without."""
_OLDEST_VERSION: Final = 1
REMEMBERED_FINISHED: Final = 256
"""About 10 kB of JSON. A late buffer writes within seconds of its epoch's end, or never."""
_REMEDY: Final = (
    "restore the object; or, if nothing else has read from the slot, remove it: the next run trusts the slot"
)


@dataclass(frozen=True)
class ProgressRecord:
    """``written_at`` is aware, UTC, for people: nothing is decided by it.

    ``finished``: xid and prepare end LSN of prepared transactions that need no record, the latest last.
    ``cover``: None in a record of an older version.
    """

    confirmed_lsn: Lsn
    epoch: str
    written_at: datetime.datetime
    finished: tuple[tuple[Xid, Lsn], ...] = ()
    cover: PrepareCover | None = None


def read_progress(storage: Storage, layout: Layout) -> ProgressRecord | None:
    """None before the first one. Raises SegmentCorrupt, StorageFault."""
    key = layout.progress_key
    data = storage.read_buffer(key)
    if data is None:
        return None
    content = unseal(bytes(data), FORMAT, VERSION, key, remedy=_REMEDY, oldest=_OLDEST_VERSION)
    try:
        return ProgressRecord(
            Lsn.parse(content["confirmed_lsn"]),
            content["epoch"],
            datetime.datetime.fromisoformat(content["written_at"]),
            tuple((Xid(xid), Lsn.parse(lsn)) for xid, lsn in content.get("finished", ())),
            _cover(content.get("cover")),
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise SegmentCorrupt(f"object {key!r} lacks a part or has a wrong one", remedy=_REMEDY) from error


def _cover(content: dict[str, Any] | None) -> PrepareCover | None:
    if content is None:
        return None
    return PrepareCover(Lsn.parse(content["since_lsn"]), frozenset(map(Xid, content["earlier"])))


def write_progress(
    storage: Storage,
    layout: Layout,
    confirmed_lsn: Lsn,
    finished: Sequence[PreparedTransaction] = (),
    *,
    cover: PrepareCover | None = None,
) -> ProgressRecord:
    """Replace the record, under ``layout.epoch``.

    ``finished``: prepared transactions whose COMMIT or ROLLBACK PREPARED is at or below ``confirmed_lsn``. Once
    this returns their records may be deleted; the next ``load_prepared`` does it where the caller could not.
    ``cover``: given once, where the record has none; it is kept from then on.

    Raises UsageError, changing nothing, where it would go back; SegmentCorrupt, StorageFault.
    """
    before = read_progress(storage, layout)
    if before is not None and confirmed_lsn < before.confirmed_lsn:
        raise UsageError(
            f"the confirmed LSN never goes back: {before.confirmed_lsn} is recorded (epoch {before.epoch}), "
            f"epoch {layout.epoch} gave {confirmed_lsn}"
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    new = [(p.xid, p.prepare_end_lsn) for p in finished]
    older = [f for f in before.finished if f not in new] if before is not None else []
    # All the new ones, whatever their number: their records are not deleted yet.
    listed = (*older, *new)[-max(len(new), REMEMBERED_FINISHED) :]
    if before is not None and before.cover is not None:
        cover = before.cover
    record = ProgressRecord(confirmed_lsn, layout.epoch, now, listed, cover)
    content = {
        "confirmed_lsn": str(confirmed_lsn),
        "epoch": record.epoch,
        "written_at": now.isoformat(),
        "finished": [[int(xid), str(lsn)] for xid, lsn in listed],
        "cover": cover
        and {"since_lsn": str(cover.since_lsn), "earlier": sorted(int(xid) for xid in cover.earlier)},
    }
    storage.write_bytes(layout.progress_key, seal(FORMAT, VERSION, content))
    return record
