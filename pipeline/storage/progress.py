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

It keeps the last commit that a sink with a memory of its own was known to hold (``held_lsn``). So a sink that is empty,
or was restored to an older state, is told from the one that had it.

It lists the tables that are or were parked (``pipeline.parked``), with what was left out of them up to this position.

It says whose the slot is. A run that has got the slot takes it over in three steps:

1. It *claims* the slot (``claim_slot``): it writes an object without content, under the next ``owner`` number. It
   yields if another run has that number or a higher one.
2. It reads the record of the last owner.
3. It writes its own record under its number (``take_over_progress``), and looks whether it has the slot still. Only
   then it removes anything.

An owner that records looks *after* its write whether there is a higher number. If so, it yields (Superseded): it tells
the server nothing, and removes nothing. One of the two sees the other. Either the owner has written before the claim is
there: then the claimant reads that. Or the owner finds the claim. So all that the server was told is in what the
claimant reads, and all that this names is there. Rejected: a claimant that reads first. The owner, alive with a lost
link, delivered and removed files of the journal after that, and the claimant ended with status 4.

A run may be stopped for long between any two of these steps: ``pyarrow.fs`` has no conditional write. So each owner has
an object of its own, with its number and epoch in the key, and the greatest number is the slot's record. A late record
has a lower number, and counts for nobody. Rejected: one object for all owners. There a late record replaced the
rightful one, and named files of the journal that the rightful run had delivered or removed: the next run took that for
a loss, with status 4.

All of this needs a listing that shows what was written before it. Folders, S3, GCS and Azure have such listings. A
claim is empty, because a full disk still has room for a name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, Superseded, UsageError
from xidstream.pipeline.exchange import JournalSpan, PrepareCover, PreparedTransaction
from xidstream.pipeline.parked import ParkedTable, resumed, without_gone
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.storage.envelope import Document, now
from xidstream.pipeline.storage.keys import Layout, RecordName
from xidstream.pipeline.storage.storage import Storage

_ATTEMPTS: Final = 5
REMEMBERED_FINISHED: Final = 256
"""About 10 kB of JSON. A late buffer writes within seconds of its epoch's end, or never."""
_REMEDY: Final = (
    "restore the object, from a backup or an older version of the bucket, and remove nothing: only this record says "
    "what of the slot's `journal/` and `prepared/` counts, and the server does not send that again; where it is lost "
    "for good, give another --storage, and begin anew there as that run's error says"
)


@dataclass(frozen=True)
class ProgressRecord:
    """``written_at`` is aware, UTC, for people: nothing is decided by it. ``key``: the object that has it.

    ``finished``: xid and prepare end LSN of prepared transactions that need no record, the latest last.
    ``cover``: None where nothing was said of the PREPAREs before the first record.
    ``delivered_lsn``: the sink holds everything up to here; ``journal`` is what it does not hold of the rest, in order.
    ``parked``: all tables that are or were. ``held_lsn``: the last commit that a sink that remembers was known to hold
    whole; 0/0 where there was none.
    """

    confirmed_lsn: Lsn
    epoch: str
    written_at: datetime.datetime
    finished: tuple[tuple[Xid, Lsn], ...] = ()
    cover: PrepareCover | None = None
    owner: int = 1
    delivered_lsn: Lsn = INVALID_LSN
    journal: tuple[JournalSpan, ...] = ()
    parked: tuple[ParkedTable, ...] = ()
    held_lsn: Lsn = INVALID_LSN
    key: str = field(default="", compare=False)


def _to_json(record: ProgressRecord) -> dict[str, Any]:
    cover = record.cover
    content: dict[str, Any] = {
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
    if record.held_lsn:
        content["held_lsn"] = str(record.held_lsn)
    if record.parked:
        content["parked"] = [each.to_json() for each in record.parked]
    return content


def _from_json(content: dict[str, Any]) -> ProgressRecord:
    cover = content["cover"]
    return ProgressRecord(
        Lsn.parse(content["confirmed_lsn"]),
        content["epoch"],
        datetime.datetime.fromisoformat(content["written_at"]),
        tuple((Xid(xid), Lsn.parse(lsn)) for xid, lsn in content["finished"]),
        cover and PrepareCover(Lsn.parse(cover["since_lsn"]), frozenset(map(Xid, cover["earlier"]))),
        int(content["owner"]),
        Lsn.parse(content["delivered_lsn"]),
        tuple(JournalSpan(str(epoch), int(first), int(last)) for epoch, first, last in content["journal"]),
        tuple(ParkedTable.from_json(each) for each in content.get("parked", ())),
        Lsn.parse(content.get("held_lsn", "0/0")),
    )


PROGRESS: Final = Document("xidstream.progress", 6, _REMEDY, _to_json, _from_json)
"""Older ones were one object for all owners, ``Layout.progress_key``: it is refused."""


def read_progress(storage: Storage, layout: Layout) -> ProgressRecord | None:
    """That of the slot's last owner; None before the first one. Raises SegmentCorrupt, Unsupported, StorageFault."""
    for _ in range(_ATTEMPTS):
        newest = _newest(storage, layout)
        key = layout.progress_key if newest is None else _key(layout, newest)
        record = _read(storage, key)
        if record is not None or newest is None:
            return record
        # Somebody took the slot over meanwhile.
    raise SegmentCorrupt(f"object {key!r} is listed, and missing", remedy=_REMEDY)


def has_record(storage: Storage, layout: Layout) -> bool:
    """Whether a run of the slot has recorded a position. Raises StorageFault."""
    return _newest(storage, layout) is not None


def _newest(storage: Storage, layout: Layout) -> RecordName | None:
    """The name of the record with the greatest number."""
    return max((name for name in _names(storage, layout).values() if not name.is_claim), default=None)


def _names(storage: Storage, layout: Layout) -> dict[str, RecordName]:
    """The names of all records and claims, by their keys."""
    names = {}
    for key in storage.list_keys(layout.progress_prefix):
        try:
            names[key] = layout.parse_record_key(key)
        except UsageError:
            continue  # a copy that a person keeps there
    return names


def _key(layout: Layout, name: RecordName) -> str:
    return replace(layout, epoch=name.epoch).record_key(name.owner)


def _read(storage: Storage, key: str) -> ProgressRecord | None:
    record = PROGRESS.read(storage, key)
    return None if record is None else replace(record, key=key)


def journaled_lsn(storage: Storage, layout: Layout) -> Lsn:
    """The recorded position where a journal holds what is before it; else 0/0. Raises as ``read_progress``.

    Only the journal must not get anything twice. What the server repeats below the position of a sink shows the sink
    whether it is the same server: one that was restored has other transactions there.
    """
    record = read_progress(storage, layout)
    return record.confirmed_lsn if record is not None and record.journal else INVALID_LSN


def last_owner(storage: Storage, layout: Layout) -> int:
    """The greatest number that a run has or claims; 0 if there is none. Raises StorageFault."""
    return max((name.owner for name in _names(storage, layout).values()), default=0)


def claim_slot(storage: Storage, layout: Layout, *, above: int = 0, seen: int | None = None) -> int:
    """Take the slot for ``layout.epoch``. Returns its number, which is higher than all others, and than ``above``.

    For the holder of the slot. ``seen``: the greatest number (``last_owner``) at a moment when the caller had the slot
    for certain. Raises Superseded where there is a higher one, or another run claims the slot at the same time; then
    nothing is changed. Raises StorageFault.
    """
    names = _names(storage, layout)
    if seen is not None:
        _yield_to((name for name in names.values() if name.owner > seen), layout)
    owner = max([above, *(name.owner for name in names.values())]) + 1
    key = layout.claim_key(owner)
    storage.write_bytes(key, b"")
    try:
        _yield_to((name for name in _names(storage, layout).values() if name.owner >= owner), layout)
    except Superseded:
        # Nothing was read for it, so it means nothing to anybody.
        storage.delete([key])
        raise
    # Runs that cannot write their record, on a full disk, leave one each.
    storage.delete([key for key, name in names.items() if name.is_claim])
    return owner


def take_over_progress(
    storage: Storage,
    layout: Layout,
    before: ProgressRecord | None,
    confirmed_lsn: Lsn,
    *,
    owner: int,
    cover: PrepareCover | None = None,
    resume: AbstractSet[int] = frozenset(),
    gone: AbstractSet[int] = frozenset(),
    gone_before: Lsn = INVALID_LSN,
) -> ProgressRecord:
    """Make the record ``layout.epoch``'s, under the number that it has from ``claim_slot``. ``before`` was read after
    that claim. ``resume``: relids of parked tables that are delivered again from here on. ``gone``: of those that were
    dropped before ``gone_before``.

    Earlier owners' records and claims are removed. Raises Superseded, with nothing removed, and StorageFault.
    """
    finished = () if before is None else before.finished
    journal = () if before is None else before.journal
    delivered_lsn = before.delivered_lsn if before is not None and journal else confirmed_lsn
    parked = () if before is None else resumed(before.parked, resume, confirmed_lsn)
    parked = without_gone(parked, gone, gone_before, delivered_lsn)
    held_lsn = INVALID_LSN if before is None else before.held_lsn
    record = ProgressRecord(
        confirmed_lsn, layout.epoch, now(), finished, cover, owner, delivered_lsn, journal, parked, held_lsn
    )
    written = _write(storage, layout, record)
    unfinished = storage.list_unfinished(layout.progress_prefix)
    names = _names(storage, layout)
    _check_owner(names, layout, owner)
    # What ends with our own number: another's claim of it is its to take back.
    earlier = [key for key, name in names.items() if name.owner < owner or key == layout.claim_key(owner)]
    storage.delete([*earlier, *unfinished])
    return written


def check_owner(storage: Storage, layout: Layout, owner: int) -> None:
    """Raise Superseded if another run took the slot over from ``layout.epoch``, which has the number ``owner``.

    Whoever removes something makes the list of it before this look: what another run has written was written after its
    claim, so it is not in the list, or this look finds the claim.
    """
    _check_owner(_names(storage, layout), layout, owner)


def _check_owner(names: Mapping[str, RecordName], layout: Layout, owner: int) -> None:
    # A claim of our own number came too late: it will find ours, and yield.
    _yield_to((n for n in names.values() if n.owner > owner or (n.owner == owner and not n.is_claim)), layout)


def _yield_to(later: Iterable[RecordName], layout: Layout) -> None:
    for name in later:
        if name.epoch != layout.epoch:
            raise Superseded(
                f"another run has taken over slot {layout.slot}: it is epoch {name.epoch}'s, this is epoch "
                f"{layout.epoch}"
            )


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
    parked: Sequence[ParkedTable] = (),
    held_lsn: Lsn = INVALID_LSN,
    may_begin: bool = True,
) -> ProgressRecord:
    """Replace the record, under ``layout.epoch`` and its number ``owner``.

    ``finished``: prepared transactions whose COMMIT or ROLLBACK PREPARED is at or below ``confirmed_lsn``. Once
    this returns their records may be deleted; the next ``load_prepared`` does it where the caller could not.
    ``cover``: given once, where the record has none; it is kept from then on. ``delivered_lsn``: by default the sink
    holds all that is confirmed; else ``journal`` has the rest. ``held_lsn``: it never falls. ``may_begin``: whether
    there may be no record yet; whoever has taken the storage over finds its own.

    Raises Superseded where the slot is a later run's: what was written then counts for nobody, so it must not be
    confirmed, and nothing be removed for it. Raises, changing nothing, UsageError where our own record would go back;
    SegmentCorrupt, StorageFault, also where the record is gone.
    """
    before = _read(storage, layout.record_key(owner))
    if before is None:
        # It is the first one, or was removed by whoever has the slot now.
        check_owner(storage, layout, owner)
        before = read_progress(storage, layout)
    if before is None and not may_begin:
        raise StorageFault(
            f"record {layout.record_key(owner)!r} is gone: the storage is not the one that this epoch has taken over",
            remedy="look whether its volume is mounted; nothing was written, and nothing is confirmed",
        )
    is_ours = before is not None and before.epoch == layout.epoch
    if before is not None and is_ours and confirmed_lsn < before.confirmed_lsn:
        raise UsageError(
            f"the confirmed LSN never goes back: {before.confirmed_lsn} is recorded, epoch {layout.epoch} gave "
            f"{confirmed_lsn}"
        )
    new = [(p.xid, p.prepare_end_lsn) for p in finished]
    older = [f for f in before.finished if f not in new] if before is not None else []
    # All the new ones, whatever their number: their records are not deleted yet.
    listed = (*older, *new)[-max(len(new), REMEMBERED_FINISHED) :]
    if before is not None and before.cover is not None:
        cover = before.cover
    delivered_lsn = confirmed_lsn if delivered_lsn is None else delivered_lsn
    record = ProgressRecord(
        confirmed_lsn,
        layout.epoch,
        now(),
        listed,
        cover,
        owner,
        delivered_lsn,
        tuple(journal),
        tuple(parked),
        max(held_lsn, INVALID_LSN if before is None else before.held_lsn),
    )
    written = _write(storage, layout, record)
    check_owner(storage, layout, owner)
    return written


def _write(storage: Storage, layout: Layout, record: ProgressRecord) -> ProgressRecord:
    key = layout.record_key(record.owner)
    PROGRESS.write(storage, key, record)
    return replace(record, key=key)
