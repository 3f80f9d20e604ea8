"""Whether a slot of which the storage has no record begins now, or has a past that the storage does not show.

A storage is empty before the first run. It is empty, too, where its volume is not mounted, its path has a typo, or
somebody removed it. Then the journal, prepared transactions and the list of parked tables are elsewhere, and to go on
from the slot's position would skip them silently. So everybody who may know of an earlier run is heard first, and one
word against a beginning is enough (SlotLost): nothing is made and nothing is deleted until a person has decided.

Who is heard:

- **What lies in the storage.** Objects below ``journal/`` or ``prepared/`` are the only copy of what they hold, and
  only the record says which of them count. No run begins over them, whatever a person says: it would delete them.
- **The storage's beginning** (``Beginning``): a first run writes down where it begins before it reads. If it died
  before its record, the slot still stands there.
- **The server.** Its statistics count the transactions that it has decoded for whoever read the slot. From PostgreSQL
  18 on it says where two-phase began, as a rule at the slot's creation. A slot that nobody has read since it was
  created, by hand or by us, shows neither. Statistics are lost in a crash of the server, and are not on a standby that
  was promoted: then they say nothing, and are no witness.
- **The sink.** Delta tables know the number of the last run of the slot, and its last commit.
- **Other servers' records** of a slot of this name: this server may have taken the place of one of them.

Rejected: to guess from the distance of ``restart_lsn`` and ``confirmed_flush_lsn``. Both look alike at a slot that was
created while transactions were open and at one that has been read. Also rejected: a note on the server (a comment, a
replication origin), which needs privileges that a reader has not.

A person who wants to begin all the same repeats the LSN that the error names (the setting ``begin_anew``). It fits one
position of one slot. So it may stay in a settings file, and decides nothing when the storage is empty another time.

The other half of this module is for a storage that has a record, beside a sink that is behind it: one that is empty,
or was restored to an older state, and one whose slot was made again further on (``gap``).

Callers: ``preflight.slot_beginning`` and the sequencer. Everything here is a function of what it is given.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from xidstream.pipeline.errors import SlotLost
from xidstream.pipeline.exchange import Beginning
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.quantities import counted

SNAPSHOTS = "take new snapshots of the tables concerned: `--snapshot initial` takes them all"
"""How a gap in the tables is healed."""
NO_RECORD = "no record of slot"


@dataclass(frozen=True)
class SinkHolds:
    """The slot as a sink that remembers knows it. ``owner``: the number of the last run that wrote to it, 0 for none.
    ``commit_lsn``: of the last transaction that it holds whole; 0/0 if it holds none."""

    owner: int
    commit_lsn: Lsn

    @property
    def knows_slot(self) -> bool:
        return bool(self.owner or self.commit_lsn)


@dataclass(frozen=True)
class Witnesses:
    """The known facts of a slot without a record. The defaults are those of a witness that knows nothing.

    ``slot_lsn``: up to where the slot is confirmed; None where there is no slot. ``n_decoded``: how many transactions
    of it the server has decoded. ``two_phase_at``: from where on it decodes PREPARE. ``n_left_behind``: objects below
    ``journal/`` and ``prepared/``. ``other_servers``: their system identifiers. ``sink``: None where it was not asked,
    or remembers nothing.
    """

    slot_lsn: Lsn | None
    n_decoded: int = 0
    two_phase_at: Lsn | None = None
    begun: Beginning | None = None
    n_left_behind: int = 0
    other_servers: Sequence[int] = ()
    sink: SinkHolds | None = None

    @property
    def anew_lsn(self) -> Lsn:
        """The position that a person repeats to begin anew: where the slot is, or where the sink ends if there is no
        slot."""
        if self.slot_lsn is not None:
            return self.slot_lsn
        return INVALID_LSN if self.sink is None else self.sink.commit_lsn


class BeginningVerdict(enum.Enum):
    """The answer of a run to a storage that has no record of its slot."""

    FIRST = "first"  # nobody knows of an earlier run
    ANEW = "anew"  # somebody does, and a person wants to begin all the same


def verdict(slot: str, storage: str, witnesses: Witnesses, begin_anew: Lsn | None) -> BeginningVerdict:
    """Raise SlotLost where it is no first run and no person has said to begin anew. ``storage``: as people may see it.

    ``begin_anew``: the setting; it counts if it is ``witnesses.anew_lsn``.
    """
    if witnesses.n_left_behind:
        raise left_behind(slot, storage, witnesses.n_left_behind)
    begun = witnesses.begun
    still_stands = begun is not None and witnesses.slot_lsn is not None and witnesses.slot_lsn <= begun.lsn
    if still_stands and begun is not None and begun.is_anew:
        return BeginningVerdict.ANEW
    against = contradictions(witnesses)
    if not against:
        return BeginningVerdict.FIRST
    if begin_anew is not None and begin_anew == witnesses.anew_lsn:
        return BeginningVerdict.ANEW
    raise no_first_run(slot, storage, against, witnesses)


def contradictions(witnesses: Witnesses) -> list[str]:
    """The reasons against a first run, each as a clause for people."""
    found = []
    slot_lsn, begun, sink = witnesses.slot_lsn, witnesses.begun, witnesses.sink
    if slot_lsn is not None and begun is not None and slot_lsn > begun.lsn:
        found.append(f"this storage began at {begun.lsn}, and the slot is confirmed up to {slot_lsn}")
    elif slot_lsn is not None and begun is None:
        # Where the storage has begun at this very position, it was its own reader that has read.
        if witnesses.n_decoded:
            n = counted(witnesses.n_decoded, "transaction")
            found.append(
                f"the server has decoded {n} of the slot for a reader, and the slot is confirmed up to {slot_lsn}"
            )
        elif witnesses.two_phase_at and slot_lsn > witnesses.two_phase_at:
            found.append(
                f"the slot decodes two-phase from {witnesses.two_phase_at} on, and is confirmed up to {slot_lsn}"
            )
    if sink is not None and (sink.owner or INVALID_LSN < sink.commit_lsn < (slot_lsn or sink.commit_lsn + 1)):
        held = f"up to {sink.commit_lsn}" if sink.commit_lsn else "none yet"
        found.append(f"the sink was written by run {sink.owner} of the slot (its transactions: {held})")
    for identifier in witnesses.other_servers[:1]:
        found.append(
            f"the storage records a slot of this name on another server (system identifier {identifier}), which this "
            "server may have replaced"
        )
    return found


def no_first_run(slot: str, storage: str, against: Sequence[str], witnesses: Witnesses) -> SlotLost:
    upgraded = ""
    if witnesses.other_servers:
        slot_too = (
            "" if witnesses.slot_lsn is not None else " and --create-slot, because no slot has come along,"
        )
        upgraded = (
            "If this server has replaced that one (pg_upgrade makes another system identifier): begin a new log, with "
            f"another --storage and another --sink,{slot_too} and take the rows from before with `--snapshot initial`. "
            "The changes that the old server had and the old log lacks are in no log; the snapshots have what came of "
            "them. If not: "
        )
    return SlotLost(
        f"storage {storage} has {NO_RECORD} {slot}, but this is no first run: {'; '.join(against)}",
        remedy=f"{upgraded}give the storage (--storage) of the last run, or mount or restore it: what is confirmed and "
        "not in the sink is in its journal alone. Nothing was made or deleted here. Only where it is gone for good, or "
        f"the slot had another consumer: `--begin-anew {witnesses.anew_lsn}` begins in this storage, without what lies "
        f"before; then {SNAPSHOTS}",
    )


def left_behind(slot: str, storage: str, n_objects: int) -> SlotLost:
    return SlotLost(
        f"storage {storage} has {NO_RECORD} {slot}, but {counted(n_objects, 'object')} of its journal and of "
        "prepared transactions: only the record says which of them count, and the server does not send them again",
        remedy="restore the slot's folder `progress/` in the storage, from a backup or an older "
        "version of the bucket. Nothing was deleted, and nothing need be: where the record is gone for good, give "
        "another --storage, and begin anew there as that run's error says",
    )


# -- a storage with a record -----------------------------------------------------------------------------


def gap(begun: Beginning | None, sink: SinkHolds) -> tuple[Lsn, Lsn] | None:
    """Between which two LSNs the tables lack what was committed, where the slot's present life began after the end of
    what an earlier one has written to them; None where nothing is missing."""
    if begun is None or not sink.commit_lsn or sink.commit_lsn >= begun.lsn:
        return None
    return sink.commit_lsn, begun.lsn


def gap_text(slot: str, lsns: tuple[Lsn, Lsn]) -> str:
    after_lsn, begins_lsn = lsns
    return (
        f"the sink's tables end at {after_lsn}, and slot {slot} begins at {begins_lsn}: what committed between is in "
        "no table"
    )


def unseen(begun: Beginning | None, sink: SinkHolds, delivered_lsn: Lsn) -> tuple[Lsn, Lsn] | None:
    """Between which two LSNs a sink that knows nothing of the slot lacks what went to another one; None where nothing
    did. ``delivered_lsn``: as recorded."""
    if begun is None or sink.knows_slot or delivered_lsn <= begun.lsn:
        return None
    return begun.lsn, delivered_lsn


def unseen_text(slot: str, lsns: tuple[Lsn, Lsn]) -> str:
    after_lsn, delivered_lsn = lsns
    return (
        f"the sink is new to slot {slot}, which was read before, from {after_lsn} up to {delivered_lsn}: what "
        "committed between went to another sink, and is in no table of this one"
    )


def check_sink(
    slot: str, held_lsn: Lsn, sink: SinkHolds, begun: Beginning | None, begin_anew: Lsn | None
) -> BeginningVerdict | None:
    """Raise SlotLost where a sink that remembers has less than one had. ANEW where a person wants to go on all the
    same, None where nothing is amiss.

    ``held_lsn``: the last commit that such a sink was known to hold whole; 0/0 where none is recorded.
    """
    if sink.commit_lsn >= held_lsn or (begun is not None and begun.is_anew and begun.lsn >= held_lsn):
        return None
    if begin_anew is not None and begin_anew == held_lsn:
        return BeginningVerdict.ANEW
    what = f"ends at {sink.commit_lsn}" if sink.commit_lsn else "holds nothing of it"
    raise SlotLost(
        f"this pipeline has delivered slot {slot} up to the commit at {held_lsn} to its Delta tables, but the "
        f"sink {what}: it is empty, another one, or was restored to an older state",
        remedy="give the sink of the last run, or mount or restore it: the server does not send again what was "
        f"delivered. Nothing was written. Only where it is gone for good, or meant: `--begin-anew {held_lsn}` "
        f"goes on into this sink, without what lies before; then {SNAPSHOTS}",
    )
