"""The durable record of the confirmed LSN: written before the server is told, read when a run starts.

A slot that is found beyond this record was moved by someone else: changes are lost, and only this record can
tell. So it never goes back, and it is on disk when ``write_progress`` returns.

It also lists the prepared transactions that are through (``finished``). COMMIT PREPARED comes once: a crash
after its confirmation and before its record was deleted would leave the record for ever, and so it is told in the
same object, in one write. The latest ``REMEMBERED_FINISHED`` stay listed after that, because a buffer of an
earlier epoch may still write a record that nobody will ask for. An LSN is never used twice, so no entry outlives
its truth; where the server repeats such a transaction, the sink's watermark says that it is held.

And it keeps what the first record said of the PREPAREs before it (``cover``, see ``PrepareCover``).

What is confirmed is in the sink or in the journal (``journal_file``). The record names the journal's files, and says up
to where the sink holds everything (``delivered_lsn``), in the same write as the position: a file that it does not name
is no part of the journal.

It says whose the slot is: whoever holds the slot takes the record over under the next ``owner`` number and its own
epoch, before it cleans or delivers anything. A run that finds another's record of its own number or a higher one was
taken over from (a lost link, a stopped process), and is refused (Superseded). The check and the write are two
operations, because ``pyarrow.fs`` has no conditional write: one record of the earlier run may still come between,
with a lower number. The rightful run writes over it. Where the sink has more by that record, it keeps that position.
What the late one's journal has was never confirmed: that run's link to the server had ended.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.errors import SegmentCorrupt, Superseded, UsageError
from xidstream.pipeline.exchange import JournalSpan, PrepareCover, PreparedTransaction
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.segments.envelope import seal, unseal
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.storage import Storage

FORMAT: Final = "xidstream.progress"
VERSION: Final = 5
"""2 has ``finished``, 3 ``cover``, 4 ``owner``, 5 the journal; an older one is read as one without."""
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
    ``cover``: None in a record of an older version. ``owner``: 0 in one that nobody has taken over.
    ``delivered_lsn``: the sink holds everything up to here; ``journal`` is what it does not hold of the rest, in order.
    """

    confirmed_lsn: Lsn
    epoch: str
    written_at: datetime.datetime
    finished: tuple[tuple[Xid, Lsn], ...] = ()
    cover: PrepareCover | None = None
    owner: int = 0
    delivered_lsn: Lsn = INVALID_LSN
    journal: tuple[JournalSpan, ...] = ()


def read_progress(storage: Storage, layout: Layout) -> ProgressRecord | None:
    """None before the first one. Raises SegmentCorrupt, StorageFault."""
    key = layout.progress_key
    data = storage.read_buffer(key)
    if data is None:
        return None
    content = unseal(bytes(data), FORMAT, VERSION, key, remedy=_REMEDY, oldest=_OLDEST_VERSION)
    try:
        confirmed_lsn = Lsn.parse(content["confirmed_lsn"])
        delivered_lsn = content.get("delivered_lsn")
        return ProgressRecord(
            confirmed_lsn,
            content["epoch"],
            datetime.datetime.fromisoformat(content["written_at"]),
            tuple((Xid(xid), Lsn.parse(lsn)) for xid, lsn in content.get("finished", ())),
            _cover(content.get("cover")),
            int(content.get("owner", 0)),
            confirmed_lsn if delivered_lsn is None else Lsn.parse(delivered_lsn),
            tuple(
                JournalSpan(str(epoch), int(first), int(last))
                for epoch, first, last in content.get("journal", ())
            ),
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise SegmentCorrupt(f"object {key!r} lacks a part or has a wrong one", remedy=_REMEDY) from error


def journaled_lsn(storage: Storage, layout: Layout) -> Lsn:
    """The recorded position where a journal holds what is before it; else 0/0. Raises as ``read_progress``.

    Only the journal must not get anything twice. What the server repeats below the position of a sink shows the sink
    whether it is the same server: one that was restored has other transactions there.
    """
    record = read_progress(storage, layout)
    return record.confirmed_lsn if record is not None and record.journal else INVALID_LSN


def _cover(content: dict[str, Any] | None) -> PrepareCover | None:
    if content is None:
        return None
    return PrepareCover(Lsn.parse(content["since_lsn"]), frozenset(map(Xid, content["earlier"])))


def take_over_progress(
    storage: Storage,
    layout: Layout,
    before: ProgressRecord | None,
    confirmed_lsn: Lsn,
    *,
    above: int = 0,
    cover: PrepareCover | None = None,
) -> ProgressRecord:
    """Make the record ``layout.epoch``'s, under an owner number higher than that of ``before`` and than ``above``.

    For the holder of the slot. Raises StorageFault.
    """
    owner = max(above, 0 if before is None else before.owner) + 1
    finished = () if before is None else before.finished
    journal = () if before is None else before.journal
    delivered_lsn = before.delivered_lsn if before is not None and journal else confirmed_lsn
    record = ProgressRecord(
        confirmed_lsn, layout.epoch, _now(), finished, cover, owner, delivered_lsn, journal
    )
    return _write(storage, layout, record)


def check_owner(storage: Storage, layout: Layout, owner: int) -> ProgressRecord | None:
    """The record, if it is not that of a run that took the slot over from ``layout.epoch``; else raises Superseded."""
    record = read_progress(storage, layout)
    if record is not None and record.epoch != layout.epoch and record.owner >= owner:
        raise Superseded(
            f"another run has taken over slot {layout.slot}: what is recorded is epoch {record.epoch}'s, this is "
            f"epoch {layout.epoch}"
        )
    return record


def write_progress(
    storage: Storage,
    layout: Layout,
    confirmed_lsn: Lsn,
    finished: Sequence[PreparedTransaction] = (),
    *,
    owner: int = 1,
    cover: PrepareCover | None = None,
    delivered_lsn: Lsn | None = None,
    journal: Sequence[JournalSpan] = (),
) -> ProgressRecord:
    """Replace the record, under ``layout.epoch`` and its number ``owner``.

    ``finished``: prepared transactions whose COMMIT or ROLLBACK PREPARED is at or below ``confirmed_lsn``. Once
    this returns their records may be deleted; the next ``load_prepared`` does it where the caller could not.
    ``cover``: given once, where the record has none; it is kept from then on. ``delivered_lsn``: by default the sink
    holds all that is confirmed; else ``journal`` has the rest.

    Raises, changing nothing: Superseded where the record is a later run's, UsageError where our own would go back;
    SegmentCorrupt, StorageFault.
    """
    before = check_owner(storage, layout, owner)
    if before is not None and confirmed_lsn < before.confirmed_lsn:
        if before.epoch == layout.epoch:
            raise UsageError(
                f"the confirmed LSN never goes back: {before.confirmed_lsn} is recorded, epoch {layout.epoch} gave "
                f"{confirmed_lsn}"
            )
        confirmed_lsn = max(confirmed_lsn, before.delivered_lsn)
    new = [(p.xid, p.prepare_end_lsn) for p in finished]
    older = [f for f in before.finished if f not in new] if before is not None else []
    # All the new ones, whatever their number: their records are not deleted yet.
    listed = (*older, *new)[-max(len(new), REMEMBERED_FINISHED) :]
    if before is not None and before.cover is not None:
        cover = before.cover
    delivered_lsn = confirmed_lsn if delivered_lsn is None else delivered_lsn
    record = ProgressRecord(
        confirmed_lsn, layout.epoch, _now(), listed, cover, owner, delivered_lsn, tuple(journal)
    )
    return _write(storage, layout, record)


def _write(storage: Storage, layout: Layout, record: ProgressRecord) -> ProgressRecord:
    cover = record.cover
    content = {
        "confirmed_lsn": str(record.confirmed_lsn),
        "epoch": record.epoch,
        "written_at": record.written_at.isoformat(),
        "finished": [[int(xid), str(lsn)] for xid, lsn in record.finished],
        "cover": cover
        and {"since_lsn": str(cover.since_lsn), "earlier": sorted(int(xid) for xid in cover.earlier)},
        "owner": record.owner,
        "delivered_lsn": str(record.delivered_lsn),
        "journal": [[span.epoch, span.first, span.last] for span in record.journal],
    }
    storage.write_bytes(layout.progress_key, seal(FORMAT, VERSION, content))
    return record


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
