"""The durable record of a prepared transaction: a JSON manifest, and the objects that it names.

After P is confirmed the server sends nothing but K or r, so ``write_prepared`` first flushes all that the
manifest names, then writes the manifest, durably; it may be confirmed when that returns. Deleting goes the
other way round: a manifest never names what is gone.

Each epoch writes a manifest of its own. A replayed PREPARE has one in several epochs, all of them of the same
rows; segments of the older ones are removed as soon as a newer one is there. A buffer of an ended epoch may be
late and write its own after that, which then names segments that are gone: the newest *complete* one is the
record. Overwriting one key was considered and rejected, because then the late one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Final

from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import PreparedTransaction
from xidstream.pipeline.parked import BadTable
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import Poison
from xidstream.pipeline.storage.envelope import Document
from xidstream.pipeline.storage.keys import Layout, PreparedName
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_parts import (
    Relations,
    messages_from_json,
    messages_to_json,
    relations_from_json,
    segment_from_json,
    segment_to_json,
    verify_stored,
)

_REMEDY: Final = (
    "the server does not send a confirmed PREPARE again: restore the object; where it is lost for good, give the "
    "transaction up when it is committed (the run's error then says how), and take a new snapshot of its tables"
)


# -- stored ----------------------------------------------------------------------------------------------


def write_prepared(storage: Storage, layout: Layout, prepared: PreparedTransaction) -> None:
    """Make it durable, with all that it names, as ``layout.epoch``'s record of it. Raises StorageFault."""
    storage.sync(prepared.stored_keys())
    key = layout.prepared_key(prepared.xid, prepared.prepare_end_lsn)
    PREPARED.write(storage, key, prepared)


def load_prepared(
    storage: Storage,
    layout: Layout,
    sent_again_after: Lsn | None = None,
    journal_keys: Set[str] | None = frozenset(),
    *,
    before_removing: Callable[[], None] = lambda: None,
) -> tuple[PreparedTransaction, ...]:
    """All of this slot, of whatever epoch, in the order of their prepares; of each its newest complete record.

    For the holder of the slot, when an epoch begins: it deletes what nobody will ask for (records that
    the record of progress lists as finished, and records that are not complete but whose PREPARE the server sends
    again). ``sent_again_after`` is the position that the server has confirmed; without it, it is taken to have what is
    recorded, which may be further.
    ``journal_keys``: segments that are the journal's by now, where such a transaction was committed; they stay. None:
    not all of them are known, and so nothing of finished transactions is deleted. ``before_removing`` is called when
    all is read and listed; if it raises, nothing is deleted.

    A transaction of which no record is complete (each is damaged, or names an object that is missing or not this
    slot's) is there with ``damage`` alone: it stops nobody before its COMMIT PREPARED. What segments hold is verified
    then (``verify_prepared``). Raises SegmentCorrupt for a manifest whose name does not tell its transaction.
    """
    progress = read_progress(storage, layout)
    finished = set(progress.finished) if progress is not None else set()
    if sent_again_after is None:
        sent_again_after = INVALID_LSN if progress is None else progress.confirmed_lsn
    stored = _stored(storage, layout)
    found = []
    through: list[_Names] = []
    useless: list[_Names] = []
    for transaction, names in stored.items():
        if transaction in finished:
            if journal_keys is not None:
                through.append(names)
            continue
        try:
            found.append(_newest_complete(storage, layout, list(names)[::-1]))
        except SegmentCorrupt as error:
            if progress is None or transaction[1] <= sent_again_after:
                found.append(_damaged(*transaction, error))
            else:
                useless.append(names)
    before_removing()
    for names in through:
        _delete_with_segments(storage, layout, names, journal_keys or frozenset())
    for names in useless:
        _delete_in_order(storage, names)
    return tuple(sorted(found, key=lambda p: int(p.prepare_end_lsn)))


def verify_prepared(storage: Storage, prepared: PreparedTransaction) -> None:
    """Read all that it names: it may have waited for a month. Raises SegmentCorrupt, StorageFault.

    One object is in memory at a time. Segments may be filled in, even for another commit, which no reader minds.
    """
    verify_stored(storage, prepared.segments, prepared.messages)


def _damaged(xid: Xid, prepare_end_lsn: Lsn, reason: SegmentCorrupt) -> PreparedTransaction:
    return PreparedTransaction(xid, "", INVALID_LSN, prepare_end_lsn, False, None, (), damage=reason.message)


def delete_prepared(storage: Storage, layout: Layout, prepared: PreparedTransaction) -> None:
    """Forget it: its manifests, of all epochs. Its segments are the caller's to delete, after this; those of other
    epochs go with their epochs."""
    stored = _stored(storage, layout)
    _delete_in_order(storage, stored.get((prepared.xid, prepared.prepare_end_lsn), {}))


_Names = dict[str, PreparedName]
"""What is stored of one prepared transaction: keys, from the oldest epoch to the newest."""


def _stored(storage: Storage, layout: Layout) -> dict[tuple[Xid, Lsn], _Names]:
    stored: dict[tuple[Xid, Lsn], _Names] = {}
    for key in storage.list_keys(layout.prepared_prefix):
        try:
            name = layout.parse_prepared_key(key)
        except UsageError as error:
            if key.endswith(".json"):
                raise SegmentCorrupt(f"manifest {key!r}: {error.message}", remedy=_REMEDY) from error
            continue
        stored.setdefault(name.transaction, {})[key] = name
    return {t: dict(sorted(names.items(), key=lambda i: i[1].epoch)) for t, names in stored.items()}


def _newest_complete(storage: Storage, layout: Layout, newest_first: list[str]) -> PreparedTransaction:
    """Raises SegmentCorrupt: the newest record's reason, where no record will do."""
    reasons: list[SegmentCorrupt] = []
    for key in newest_first:
        try:
            record = PREPARED.unseal(storage.read_bytes(key), key)
            _check_names(layout, key, record)
            _check_objects(storage, key, record)
            return record
        except SegmentCorrupt as error:
            reasons.append(error)
    raise reasons[0]


def _check_names(layout: Layout, key: str, prepared: PreparedTransaction) -> None:
    try:
        name = layout.parse_prepared_key(key)
        if name.transaction != (prepared.xid, prepared.prepare_end_lsn):
            raise UsageError("its content is another transaction's")
        for named in prepared.stored_keys():
            layout.parse_segment_key(named)
    except UsageError as error:
        raise SegmentCorrupt(f"manifest {key!r}: {error.message}", remedy=_REMEDY) from error


def _check_objects(storage: Storage, key: str, prepared: PreparedTransaction) -> None:
    """One listing for each folder: a transaction of ten thousand segments has one."""
    present: set[str] = set()
    for folder in {named.rpartition("/")[0] for named in prepared.stored_keys()}:
        present.update(storage.list_keys(folder))
    for named in prepared.stored_keys():
        if named not in present:
            raise SegmentCorrupt(f"manifest {key!r} names {named!r}, which is missing", remedy=_REMEDY)


def _delete_in_order(storage: Storage, names: _Names) -> None:
    """From the oldest to the newest: a crash leaves a complete record, or none."""
    for key in names:
        storage.delete([key])


def _delete_with_segments(storage: Storage, layout: Layout, names: _Names, keep: Set[str]) -> None:
    segments: set[str] = set()
    for key in names:
        data = storage.read_buffer(key)
        if data is None:
            continue  # the former owner removes it at this moment, and its segments after it
        try:
            record = PREPARED.unseal(bytes(data), key)
            _check_names(layout, key, record)
        except SegmentCorrupt:
            continue  # it cannot tell its segments, which go with their epoch instead
        segments.update(record.stored_keys())
    _delete_in_order(storage, names)
    storage.delete(segments - keep)


# -- as JSON ---------------------------------------------------------------------------------------------


def _to_json(prepared: PreparedTransaction) -> dict[str, Any]:
    relations = Relations()
    segments = [segment_to_json(segment, relations) for segment in prepared.segments]
    return {
        "xid": int(prepared.xid),
        "gid": prepared.gid,
        "prepare_lsn": str(prepared.prepare_lsn),
        "prepare_end_lsn": str(prepared.prepare_end_lsn),
        "streamed": bool(prepared.streamed),
        "origin": prepared.origin,
        "relations": relations.to_json(),
        "segments": segments,
        "messages": [messages_to_json(file) for file in prepared.messages],
        "poison": None if prepared.poison is None else prepared.poison.to_json(),
        "bad_tables": [each.to_json() for each in prepared.bad_tables],
    }


def _from_json(content: dict[str, Any]) -> PreparedTransaction:
    relations = relations_from_json(content["relations"])
    return PreparedTransaction(
        xid=Xid(content["xid"]),
        gid=content["gid"],
        prepare_lsn=Lsn.parse(content["prepare_lsn"]),
        prepare_end_lsn=Lsn.parse(content["prepare_end_lsn"]),
        streamed=content["streamed"],
        origin=content["origin"],
        segments=tuple(segment_from_json(s, relations) for s in content["segments"]),
        messages=tuple(messages_from_json(m) for m in content["messages"]),
        poison=None if content["poison"] is None else Poison.from_json(content["poison"]),
        bad_tables=tuple(BadTable.from_json(each, Xid(content["xid"])) for each in content["bad_tables"]),
    )


PREPARED: Final = Document("xidstream.prepared-transaction", 3, _REMEDY, _to_json, _from_json)
