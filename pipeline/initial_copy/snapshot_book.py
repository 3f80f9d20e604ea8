"""Which tables need a snapshot now, and what the storage is told about each: the decisions beside ``CopySchedule``.

Three things say what there is: the server's catalog (a survey), the sink's ``_snapshots``, and the storage's record. A
table needs a snapshot if one is wanted of every published table and its name has no generation that stands, or if a
person asked for one. A generation stands as long as the catalog's definition of the table is one under which the stream
continues it (``pipeline.snapshot.invalidation``), and no row of the table is left out (``pipeline.parked``). No
snapshot is taken of a table as long as it is parked.

What a survey proves (``pipeline.snapshot.proven``) it proves of the generations that it was compared with. So one that
is being committed is compared as well, before its line is in the sink (``needs``); and one that begins after the
comparison is compared with the survey that was taken after its lock (``begin``).

The storage is written before the sink, and read when a run begins. A generation that the storage knows, and of which
the sink has no line, may have its rows in the table or not: the sink finds out (``SnapshotLog.commit`` without files).

Where a person asked for a key range alone, a generation has to stand from which the other rows can be carried over. If
none does, the table is taken whole, where that is wanted of every table; else the request is refused.

One instance for a run. Several threads use it, each for tables of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xidstream.pipeline.errors import SnapshotInterrupted, UsageError
from xidstream.pipeline.initial_copy.copy_schedule import Wanted
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.invalidation import (
    is_laid_out,
    laid_out,
    reason_it_ended,
    renewed,
    signature_of,
)
from xidstream.pipeline.snapshot.key_filter import BoundComparison, KeyFilter, Repair, bound
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.skips import read_skipped_rows
from xidstream.pipeline.storage.snapshot_record import (
    TakenSnapshot,
    cancel,
    forget_request,
    forget_taken,
    read_taken,
    read_wishes,
    write_taken,
)
from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class NewLayout:
    """Columns of a table whose generation ``number`` stands, of which the log has not been told. ``found_lsn``:
    the last LSN of a commit that was before they were found. The log is whole up to there when the sink is."""

    source: PublishedSource
    number: int
    found_lsn: Lsn


@dataclass(frozen=True)
class Needs:
    """``wanted``: tables to take. ``ended``: generations to end, with their reasons. ``unwanted``: relids of tables
    that nobody wants any more, should they be in hand. ``is_proof``: whether every other generation, those that are
    being committed included, is what the survey found. ``refused``: repairs that cannot be, and why. ``layouts``: what
    the log is to be told before anything is proven; each comes again until it was (``lay_out``)."""

    wanted: tuple[Wanted, ...]
    ended: tuple[tuple[GenerationLine, str], ...]
    unwanted: tuple[int, ...]
    is_proof: bool
    refused: tuple[tuple[PublishedSource, str], ...] = ()
    layouts: tuple[NewLayout, ...] = ()


class SnapshotBook:
    """Raises StorageFault and SegmentCorrupt from its methods."""

    def __init__(self, storage: Storage, layout: Layout, decision: Decision) -> None:
        self._storage = storage
        self._layout = layout
        self._decision = decision
        self._taken = {_name(taken.generation): taken for taken in read_taken(storage, layout)}
        # What a survey is compared with, and what a generation that begins is: one of the two sees the other.
        self._comparing = threading.Lock()
        self._surveyed: tuple[Lsn, dict[int, PublishedSource]] = (INVALID_LSN, {})
        self._layouts: dict[tuple[int, int], NewLayout] = {}
        """By generation: as it was first found, for as long as the log has not been told."""

    def is_wanting(self) -> bool:
        """Whether snapshots are wanted of all tables, or of one that a person asked for."""
        return self._decision.takes_snapshots or bool(read_wishes(self._storage, self._layout).requests)

    @staticmethod
    def is_one_standing(lines: Iterable[GenerationLine]) -> bool:
        """Whether there is a generation that may end. Else nobody need be asked what is published."""
        return any(line.is_ours and line.state is GenerationState.FINISHED for line in lines)

    def leaves_messages(self, line: GenerationLine) -> bool:
        """Whether nothing ends the generation that has no place in the stream: no row of its own, and no DDL that an
        event trigger fires for. TRUNCATE of a partition, and one that is not published, has none."""
        taken = self._taken.get((line.relid, line.number))
        return (
            taken is not None
            and [relid for relid, _ in taken.signature["leaves"]] == [line.relid]
            and "truncate" not in taken.signature["left_out"]
        )

    def unfinished(self, lines: Iterable[GenerationLine]) -> list[Generation]:
        """Generations that an earlier run has begun to commit, and perhaps did not end."""
        recorded = {(line.relid, line.number) for line in lines if line.is_ours}
        return [taken.generation for name, taken in self._taken.items() if name not in recorded]

    def give_up(self, generation: Generation) -> None:
        """The sink does not have the rows of this generation."""
        del self._taken[_name(generation)]
        forget_taken(self._storage, self._layout, [generation])

    def needs(
        self,
        sources: Sequence[PublishedSource],
        lines: Iterable[GenerationLine],
        surveyed_lsn: Lsn,
        end_lsn: Lsn = INVALID_LSN,
        *,
        is_witnessed: bool = True,
    ) -> Needs:
        """The needs of the tables that are published now, as a survey found them for which the WAL ended at
        ``surveyed_lsn``. ``end_lsn``: where it ended after the survey; 0/0 where the tables were as they are before
        it. ``is_witnessed``: whether every ALTER TABLE since the survey before has left a message."""
        with self._comparing:
            return self._needs(sources, list(lines), surveyed_lsn, end_lsn or surveyed_lsn, is_witnessed)

    def _needs(
        self,
        sources: Sequence[PublishedSource],
        lines: Sequence[GenerationLine],
        surveyed_lsn: Lsn,
        end_lsn: Lsn,
        is_witnessed: bool,
    ) -> Needs:
        wishes = read_wishes(self._storage, self._layout)
        record = read_progress(self._storage, self._layout)
        skipped = read_skipped_rows(self._storage, self._layout)
        parked = (*(() if record is None else record.parked), *skipped)
        published = {source.relation.relid: source for source in sources}
        by_name = {source.name: source for source in sources}
        self._surveyed = (surveyed_lsn, published)
        standing = {
            line.relid: line for line in lines if line.is_ours and line.state is GenerationState.FINISHED
        }
        ended, layouts = [], []
        for relid, line in list(standing.items()):
            taken = self._taken.get((relid, line.number))
            spoiling = (each for each in parked if each.concerns(relid) and each.spoils(line.snapshot_lsn))
            if (spoiled_by := next(spoiling, None)) is not None:
                reason: str | None = spoiled_by.why_no_snapshot_stands
            else:
                source = published.get(relid) or by_name.get(line.table)
                reason = _reason(taken, source, is_witnessed=is_witnessed)
                if reason is None and taken is not None and source is not None:
                    self._renew(taken, source)
                    if (layout := self._new_layout(taken, source, end_lsn)) is not None:
                        layouts.append(layout)
            if reason is not None:
                del standing[relid]
                ended.append((line, reason))
        set_aside = {each.relid for each in parked if each.is_parked}
        known = {line.relid for line in lines}
        wanted, unwanted = [], sorted((wishes.cancelled.keys() - wishes.requests.keys()) | set_aside)
        refused: list[tuple[PublishedSource, str]] = []
        for relid, source in published.items():
            if relid in set_aside:
                continue
            asked = relid in wishes.requests
            missing = self._decision.takes_snapshots and relid not in standing
            where, repair = wishes.ranges.get(relid), None
            if where is not None and not missing:
                repair_or_reason = self._repair(where, source, standing.get(relid))
                if isinstance(repair_or_reason, str):
                    refused.append((source, repair_or_reason))
                    continue
                repair = repair_or_reason
            if asked or (missing and relid not in wishes.cancelled):
                was_published = self._decision.published.get(relid) == source.published_as
                # A commit that waits for a synchronous standby is in the WAL, and no snapshot sees it yet. As a rule
                # the log has it. One from within a park it has not, and the snapshot would lack it for ever. Its
                # backend holds ROW EXCLUSIVE until others see the commit, so it is found among the writers. (One from
                # before the slot: ``may_lack``.)
                # And where the table had a snapshot before: the publication may have been changed since, and who wrote
                # before that, and commits after the new snapshot, did so under the former columns and operations.
                is_lacking = any(each.concerns(relid) for each in parked)
                waits = not was_published or is_lacking or relid in known
                wanted.append(Wanted(source, waits, repair))
        recorded = {(line.relid, line.number) for line in lines}
        committing = (taken for name, taken in self._taken.items() if name not in recorded)
        is_proof = all(
            _is_as_found(each.signature, published.get(each.generation.relid), is_witnessed=is_witnessed)
            for each in committing
        )
        return Needs(tuple(wanted), tuple(ended), tuple(unwanted), is_proof, tuple(refused), tuple(layouts))

    def _new_layout(self, taken: TakenSnapshot, source: PublishedSource, end_lsn: Lsn) -> NewLayout | None:
        name = _name(taken.generation)
        if is_laid_out(self._taken[name].signature, source):
            self._layouts.pop(name, None)
            return None
        found = self._layouts.get(name)
        if found is None or found.source.relation != source.relation:
            # A COMMIT record may begin at the WAL's end, and is to come yet.
            found = self._layouts[name] = NewLayout(source, taken.generation.number, end_lsn.before)
        return found

    def lay_out(self, layout: NewLayout) -> None:
        """The log has been told."""
        name = (layout.source.relation.relid, layout.number)
        if (taken := self._taken.get(name)) is not None:
            self._taken[name] = replace(taken, signature=laid_out(taken.signature, layout.source))
            write_taken(self._storage, self._layout, self._taken[name])
        self._layouts.pop(name, None)

    def _repair(self, where: KeyFilter, source: PublishedSource, line: GenerationLine | None) -> Repair | str:
        """The range to be repaired, or why nothing can be."""
        taken = None if line is None else self._taken.get((line.relid, line.number))
        if line is None or taken is None:
            return "no snapshot of the table stands, from which the rows outside of the range could be carried over"
        try:
            bound(where, source.relation, taken.generation.key)
        except UsageError as error:
            return error.message
        return Repair(where, line.number)

    def may_lack(self, bounds: SnapshotBounds) -> bool:
        """Whether a snapshot that waited for no writers has to be taken again, with waiting: ``Decision.may_lack``."""
        return self._decision.may_lack(bounds)

    def _renew(self, taken: TakenSnapshot, source: PublishedSource) -> None:
        """Renew what is recorded of a generation that stands: the next survey is compared with this one."""
        signature = renewed(taken.signature, source)
        if signature is not None:
            self._taken[_name(taken.generation)] = replace(taken, signature=signature)
            write_taken(self._storage, self._layout, self._taken[_name(taken.generation)])

    def ended(
        self, source: PublishedSource, lines: Iterable[GenerationLine]
    ) -> tuple[GenerationLine, str] | None:
        """The table's generation that stands by ``lines``, if it does not with the table as ``source`` has it, and why.

        Of a table that is held for a new snapshot. What happened to it between the survey and its lock is compared with
        the former snapshot here, or never.
        """
        for line in lines:
            if line.is_ours and line.state is GenerationState.FINISHED and line.table == source.name:
                reason = _reason(self._taken.get((line.relid, line.number)), source)
                return None if reason is None else (line, reason)
        return None

    def begin(
        self,
        source: PublishedSource,
        bounds: SnapshotBounds,
        last_number: int,
        where: KeyFilter | None = None,
    ) -> Generation | None:
        """Record what is about to be committed. Returns the table's new generation; None where the last survey, taken
        after the snapshot's lock, found the table otherwise: take it anew.

        ``last_number``: of the last one of the table's name that the sink knows (``SnapshotOutput``). ``where``: the
        rows that were read, of a repair.
        """
        with self._comparing:
            surveyed_lsn, published = self._surveyed
            now = published.get(source.relation.relid)
            if surveyed_lsn > bounds.snapshot_lsn and not _is_as_found(
                signature_of(source), now, is_witnessed=False
            ):
                return None
            return self._begin(source, bounds, last_number, where)

    def _begin(
        self, source: PublishedSource, bounds: SnapshotBounds, last_number: int, where: KeyFilter | None
    ) -> Generation:
        relation = source.relation
        known = [taken.generation for taken in list(self._taken.values())]
        numbers = [each.number for each in known if each.name == relation.name]
        key = source.primary_key
        number = max([last_number, *numbers]) + 1
        # What an earlier snapshot saw, of whichever table, this one sees. A later one may be recorded before it.
        earlier = (each.bounds for each in known if bounds.sees_all_of(each.bounds))
        upto = max((each.contained_upto for each in earlier), default=INVALID_LSN)
        bounds = bounds.knowing(None, upto) if upto <= bounds.valid_from else bounds
        generation = Generation(relation, number, bounds, None if key is None else key.columns)
        taken = TakenSnapshot(generation, signature_of(source), where)
        write_taken(self._storage, self._layout, taken)
        self._taken[_name(generation)] = taken
        return generation

    def last_snapshot_lsn(self, source: PublishedSource) -> Lsn:
        """The highest place of a snapshot of the table's name that is known; 0/0 for none."""
        known = [taken.generation for taken in list(self._taken.values())]
        return max(
            (each.bounds.snapshot_lsn for each in known if each.name == source.name), default=INVALID_LSN
        )

    def cancel(self, source: PublishedSource) -> None:
        """No snapshot of the table is wanted, until somebody asks for one."""
        cancel(self._storage, self._layout, source.relation.relid, source.name)

    def rows_of(self, repair: Repair, source: PublishedSource) -> tuple[BoundComparison, ...]:
        """Which rows a repair reads, of the table as it is held now. Raises SnapshotInterrupted where that cannot be
        told any more: the next ``needs`` says why."""
        taken = self._taken.get((source.relation.relid, repair.number))
        try:
            if taken is not None:
                return bound(repair.key_filter, source.relation, taken.generation.key)
        except UsageError as error:
            raise SnapshotInterrupted(error.message) from None
        raise SnapshotInterrupted(f"the snapshot of table {source.name} that was to be repaired is gone")

    def refuse(self, source: PublishedSource, where: KeyFilter | None = None) -> None:
        """Forget the request for a repair; with ``where`` that for these rows alone."""
        forget_request(self._storage, self._layout, source.relation.relid, where)

    def finish(self, generation: Generation) -> None:
        """The sink has it. Whoever asked for it has it, and the table's earlier ones are of no use."""
        taken = self._taken.get(_name(generation))
        forget_request(self._storage, self._layout, generation.relid, None if taken is None else taken.where)
        earlier = [
            taken.generation
            for (relid, number), taken in list(self._taken.items())
            if relid == generation.relid and number < generation.number
        ]
        for each in earlier:
            del self._taken[_name(each)]
        forget_taken(self._storage, self._layout, earlier)


def _name(generation: Generation) -> tuple[int, int]:
    return generation.relid, generation.number


def _is_as_found(signature: Mapping[str, Any], now: PublishedSource | None, *, is_witnessed: bool) -> bool:
    """Whether the table is the same, and has the same columns."""
    reason = reason_it_ended(signature, now, is_witnessed=is_witnessed)
    return now is not None and reason is None and is_laid_out(signature, now)


def _reason(
    taken: TakenSnapshot | None, source: PublishedSource | None, *, is_witnessed: bool = True
) -> str | None:
    if taken is None:
        return "this storage has no record of it: the slot was made again, or its run began anew in another storage"
    return reason_it_ended(taken.signature, source, is_witnessed=is_witnessed)
