"""Ask all who may know of an earlier run, where the storage has no record of the slot; write down where it begins.

The rules are ``pipeline.postgres.beginning``'s. Called by the reader before the slot is created or read, by the
preflight, and by the sequencer: when it takes the storage over, and when it knows the sink. The sequencer asks no
server, so psycopg is imported by ``witnesses_of``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xidstream.pipeline.exchange import Beginning
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.beginning import (
    BeginningVerdict,
    SinkHolds,
    Witnesses,
    check_sink,
    contradictions,
    left_behind,
    no_first_run,
    verdict,
)
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.storage.beginning_record import (
    count_left_behind,
    read_beginning,
    write_beginning,
)
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.server_record import other_servers
from xidstream.pipeline.storage.storage import Storage

if TYPE_CHECKING:
    from xidstream.pipeline.postgres.admin import SlotState
    from xidstream.pipeline.postgres.login import Login


def witnesses_of(
    storage: Storage, layout: Layout, login: Login, slot: SlotState, sink: SinkHolds | None = None
) -> Witnesses:
    """The witnesses of a slot without a record. Raises StorageFault, SegmentCorrupt, and what connecting raises."""
    from xidstream.pipeline.postgres.admin import stream_stats

    stats = stream_stats(login, slot.name) if slot.exists else None
    return Witnesses(
        slot.confirmed_flush,
        0 if stats is None else stats.total_txns,
        slot.two_phase_at,
        read_beginning(storage, layout),
        count_left_behind(storage, layout),
        other_servers(storage, layout),
        sink,
    )


def shown(config: Config, storage: Storage) -> str:
    """The storage, as people may see it."""
    return redacted(config.storage) + ("" if storage.has_root() else " (there is no such folder)")


def judge(config: Config, storage: Storage, witnesses: Witnesses) -> BeginningVerdict:
    """Raises SlotLost where it is no first run."""
    return verdict(config.slot, shown(config, storage), witnesses, anew_lsn(config))


def anew_lsn(config: Config) -> Lsn | None:
    """The setting."""
    return Lsn.parse(config.begin_anew) if config.begin_anew else None


def note_beginning(
    storage: Storage, layout: Layout, lsn: Lsn, judged: BeginningVerdict, witnesses: Witnesses
) -> Beginning:
    """Write down that the slot's life in this storage begins at ``lsn``, before anything is read. Raises StorageFault.

    A beginning that still stands is not written again.
    """
    begun = witnesses.begun
    if begun is not None and lsn == begun.lsn and begun.is_anew == (judged is BeginningVerdict.ANEW):
        return begun
    is_anew = judged is BeginningVerdict.ANEW
    beginning = Beginning(lsn, is_anew, tuple(contradictions(witnesses)) if is_anew else ())
    write_beginning(storage, layout, beginning)
    return beginning


def check_take_over(slot: str, storage: Storage, layout: Layout, confirmed_lsn: Lsn) -> None:
    """Before a storage without a record is taken over by whoever holds the slot, which is at ``confirmed_lsn``.

    The reader has heard the witnesses. Here nothing may be deleted, and nobody else may have confirmed meanwhile.
    Raises SlotLost.
    """
    n_left_behind, begun = count_left_behind(storage, layout), read_beginning(storage, layout)
    where = redacted(storage.uri)
    if n_left_behind:
        raise left_behind(slot, where, n_left_behind)
    if begun is not None and confirmed_lsn > begun.lsn:
        witnesses = Witnesses(confirmed_lsn, begun=begun)
        raise no_first_run(slot, where, contradictions(witnesses), witnesses)


def check_sink_of_run(config: Config, layout: Layout, sink: SinkHolds, *, is_first: bool) -> None:
    """What a sink that a run opens says of the slot. ``is_first``: there was no record when the storage was taken over.

    Raises SlotLost; notes it where a person wants to go on all the same.
    """
    storage = Storage(config.storage)
    begun = read_beginning(storage, layout)
    if is_first:
        if begun is not None and not begun.is_anew:
            witnesses, anew = Witnesses(begun.lsn, begun=begun, sink=sink), anew_lsn(config)
            if anew == sink.commit_lsn:
                # It was named when there was no slot yet.
                anew = begun.lsn
            judged = verdict(config.slot, shown(config, storage), witnesses, anew)
            note_beginning(storage, layout, begun.lsn, judged, witnesses)
        return
    record = read_progress(storage, layout)
    if record is None:
        return
    if check_sink(config.slot, record.held_lsn, sink, begun, anew_lsn(config)) is BeginningVerdict.ANEW:
        against = f"the sink ended at {sink.commit_lsn}, and one had held all up to {record.held_lsn}"
        write_beginning(storage, layout, Beginning(record.held_lsn, True, (against,)))
