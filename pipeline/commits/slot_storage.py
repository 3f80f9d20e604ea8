"""What the sequencer keeps in storage for its slot: the confirmed position, prepared transactions, the journal.

Plain blocking calls, which the sequencer's asyncio shell runs in threads. The order of writing is the guarantee:
a position is recorded before it is confirmed; a finished prepared transaction is listed in that same record before it
is deleted; a file of the journal is durable before the record names it, and deleted when the record does not name it
any more. And the slot is claimed before the record of an earlier epoch is read: from then on that one's records count
for nobody (``pipeline.storage.progress``).

A run may stand still at any place (a stopped process, a moved machine, a hanging disk), and lose the slot meanwhile. So
whatever removes something has three steps: list what there is, look whether the slot is still ours, remove by name what
was listed. The rightful run writes after its claim. So either the list does not have what it writes, or the look finds
the claim. And it needs nothing of what was listed for removal: neither the record that it read names it, nor a
manifest.

As a rule our own record comes before any removal. The former owner may have a last record on its way, which names files
that the one we read does not name. If those are removed, and this run dies before its own record is there, the next
run misses them. But a full disk has room for a claim, and none for a record. Then what dead epochs have left is removed
under the former record, and ours is written after that. Rejected: a reserve of some bytes that is given up for the
record. Others on the same disk may take it first.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.commits.journal import DamagedFile, lost_journal
from xidstream.pipeline.commits.prepared import PreparedBook, lost, spilled_messages, stamp_segments
from xidstream.pipeline.errors import ComponentLost, SegmentCorrupt, StorageFault
from xidstream.pipeline.exchange import (
    ArrowRef,
    JournalFile,
    JournalSpan,
    Opened,
    PreparedTransaction,
    Sealed,
    Tenure,
    TransactionEnd,
    UnitEnd,
)
from xidstream.pipeline.parked import ParkedTable, SkippedTransaction
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.continuity import check_positions
from xidstream.pipeline.preflight.slot_beginning import check_take_over
from xidstream.pipeline.storage.cleanup import clean_dead_epochs
from xidstream.pipeline.storage.journal_file import (
    JournalRows,
    flush_segments,
    load_journal_units,
    read_journal_files,
    stored_journal_units,
    write_journal_file,
)
from xidstream.pipeline.storage.journal_joining import JoinedRows, joined
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import delete_prepared, load_prepared, verify_prepared
from xidstream.pipeline.storage.progress import (
    ProgressRecord,
    check_owner,
    claim_slot,
    read_progress,
    take_over_progress,
    write_progress,
)
from xidstream.pipeline.storage.resumes import forget_resumes, read_resumes
from xidstream.pipeline.storage.skips import note_skipped
from xidstream.pipeline.storage.storage import Storage, is_out_of_space
from xidstream.pipeline.transactions.sealed import transaction_row, undeliverable_unit


@dataclass(frozen=True)
class TakenOver:
    """The record as it was when an epoch began. ``journal``: its files, in order. ``parked``: as in
    ``ProgressRecord``."""

    confirmed_lsn: Lsn
    delivered_lsn: Lsn
    prepared: PreparedBook
    journal: tuple[JournalFile | DamagedFile, ...]
    parked: tuple[ParkedTable, ...] = ()
    is_first: bool = False
    """Whether there was no record of the slot."""


class SlotStorage:
    """Raises StorageFault and SegmentCorrupt from every method, Superseded where another run has the slot by now."""

    def __init__(self, storage_uri: str, opened: Opened, epoch: str) -> None:
        self._storage = Storage(storage_uri)
        self._opened = opened
        self._layout = Layout(opened.identity.system_identifier, opened.identity.slot, epoch)
        self._owner = 0
        self.held_lsn = INVALID_LSN
        """The last commit that a sink that remembers is known to hold; the next record has it."""
        self._is_first = False
        self._has_given_tenure = False
        """Whether a batch loop of this epoch knows the number."""
        self._recording = threading.Lock()
        """The driver may ask for its tenure while a position is recorded."""

    @property
    def layout(self) -> Layout:
        """The keys of this epoch."""
        return self._layout

    def take_over(self, *, resumes: bool = True) -> TakenOver:
        """What is recorded; cleans up what dead runs left. ``resumes``: whether tables are resumed, if a person wants
        it, as only an epoch with a sink may.

        Raises SlotLost, with nothing written or removed, where the slot was confirmed past what this pipeline ever
        recorded, the server is older than what it delivered before, or there is no record although this is no first
        run. Raises ComponentLost where the server begins before the end of the journal.
        Raises Superseded, with nothing removed, where another run took the slot over meanwhile.
        """
        resume = read_resumes(self._storage, self._layout) if resumes else frozenset()
        # What cannot be taken over is refused with nothing written.
        self._recorded(self._check_unclaimed)
        self._owner = claim_slot(self._storage, self._layout, seen=self._opened.last_owner)
        try:
            # The former owner may have recorded until now.
            before = self._recorded(self._check_owner)
            record = self._take_record(before, resume)
            # What was asked for is in the record now.
            forget_resumes(self._storage, self._layout, resume)
            journal, prepared = self._tidy(record)
        except StorageFault:
            # Whoever has taken the slot over has removed what this run was reading.
            self._check_owner()
            raise
        return TakenOver(
            record.confirmed_lsn,
            record.delivered_lsn,
            PreparedBook(prepared, record.cover),
            journal,
            record.parked,
            self._is_first,
        )

    def _take_record(self, before: ProgressRecord | None, resume: Set[int]) -> ProgressRecord:
        try:
            return self._written(before, self._owner, resume)
        except StorageFault as fault:
            if before is None or not is_out_of_space(fault):
                raise
        self._tidy(before)
        return self._written(before, self._owner, resume)

    def _tidy(
        self, record: ProgressRecord
    ) -> tuple[tuple[JournalFile | DamagedFile, ...], tuple[PreparedTransaction, ...]]:
        """Remove what neither ``record`` nor a manifest names. Returns the journal and what is prepared."""
        journal = _bounded(self._journal_files(record), record.confirmed_lsn)
        read = [file for file in journal if isinstance(file, JournalFile)]
        journal_keys = {key for file in read for key in file.stored_keys}
        # A damaged file may be restored, and what it names may be anything.
        is_whole = len(read) == len(journal)
        prepared = load_prepared(
            self._storage,
            self._layout,
            # The journal has what lies between the two, and the server does not send it again.
            max(self._opened.confirmed_flush_lsn, self._opened.start_lsn),
            journal_keys if is_whole else None,
            before_removing=self._check_owner,
        )
        if is_whole:
            kept = journal_keys.union(*(p.stored_keys() for p in prepared))
            damaged = {p.xid for p in prepared if p.damage is not None}
            clean_dead_epochs(self._storage, self._layout, kept, damaged, before_removing=self._check_owner)
        self._clean_journal(record)
        return journal, prepared

    def _check_unclaimed(self) -> None:
        seen = self._opened.last_owner
        if seen is not None:
            check_owner(self._storage, self._layout, seen + 1)

    def _check_owner(self) -> None:
        check_owner(self._storage, self._layout, self._owner)

    def _journal_files(self, record: ProgressRecord) -> Iterator[JournalFile | DamagedFile]:
        names = [
            (span.epoch, number) for span in record.journal for number in range(span.first, span.last + 1)
        ]
        read = read_journal_files(self._storage, self._layout, names)
        # Of the first file the sink may hold a part.
        before_lsn = INVALID_LSN
        for (epoch, number), file in zip(names, read, strict=True):
            if isinstance(file, JournalFile) and (
                file.end_lsn > record.confirmed_lsn or 0 < file.first_commit_lsn <= before_lsn
            ):
                file = SegmentCorrupt(f"journal file {number} is not in the order of commits")
            if isinstance(file, SegmentCorrupt):
                first_lsn = max(before_lsn, record.delivered_lsn)
                lost = lost_journal(number, first_lsn, record.confirmed_lsn, file)
                yield DamagedFile(epoch, number, lost)
                continue
            before_lsn = max(before_lsn, file.last_commit_lsn)
            yield file

    def _clean_journal(self, record: ProgressRecord) -> None:
        """Remove files that the record does not name: a write that was cut off, or one that was delivered."""
        named = {
            self._layout_of(span.epoch).journal_key(number)
            for span in record.journal
            for number in range(span.first, span.last + 1)
        }
        stored = self._storage.list_keys(self._layout.journal_prefix)
        unfinished = self._storage.list_unfinished(self._layout.journal_prefix)
        self._check_owner()
        self._storage.delete([*(key for key in stored if key not in named), *unfinished])

    def _layout_of(self, epoch: str) -> Layout:
        return dataclasses.replace(self._layout, epoch=epoch)

    # -- the journal -----------------------------------------------------------------------------------

    def write_journal(
        self,
        number: int,
        units: Sequence[tuple[UnitEnd, Sealed]],
        fetch: Callable[[ArrowRef], pa.Table],
        absorbed: Sequence[JournalFile] = (),
        most_rows: int = 0,
    ) -> JournalFile | StorageFault:
        """Make them durable as a file, after the units of ``absorbed``, the files that come directly before them. It
        is no part of the journal before ``record`` names it. Small units are joined there, up to ``most_rows``.

        Returns why it could not be written, where it may be written again; there is no such file then. Raises
        StorageFault where a unit's segments could not be flushed: that may not be tried twice. Raises SegmentCorrupt
        where one of ``absorbed`` cannot be read, and Superseded where another run has removed it.
        """
        flush_segments(self._storage, [unit for _, unit in units])
        try:
            units = [*self._stored_units(absorbed), *units]
            if absorbed:
                units = joined(units, most_rows)
            ends, contents = [end for end, _ in units], [unit for _, unit in units]
            return write_journal_file(
                self._storage, self._layout, number, contents, ends, lambda ref: _rows(ref, fetch)
            )
        except SegmentCorrupt:
            raise
        except StorageFault as error:
            self._remove_unwritten(number)
            return error

    def _stored_units(self, files: Sequence[JournalFile]) -> Iterator[tuple[UnitEnd, Sealed]]:
        try:
            for file in files:
                yield from stored_journal_units(self._storage, self._layout, file)
        except SegmentCorrupt:
            check_owner(self._storage, self._layout, self._owner)
            raise

    def left_file(self, number: int, stored_keys: Sequence[str]) -> JournalFile:
        """What ``remove_journal`` is to remove of a file that never was part of the journal, with these objects."""
        nowhere = INVALID_LSN
        return JournalFile(
            number, self._layout.epoch, nowhere, nowhere, nowhere, 0, 0, 0, 0, 0, tuple(stored_keys)
        )

    def _remove_unwritten(self, number: int) -> None:
        """It may be there, and not on disk for sure."""
        try:
            self._storage.delete([self._layout.journal_key(number)])
        except StorageFault:
            pass  # The next epoch removes it: no record names it. The first error is the one to tell.

    def load_journal(
        self, file: JournalFile, put: Callable[[pa.Table], ArrowRef]
    ) -> list[tuple[UnitEnd, Sealed]]:
        """Raises SlotLost where the file, or what it names, is damaged or missing, and Superseded where another run has
        removed it."""
        try:
            return load_journal_units(self._storage, self._layout, file, put, self._opened.skips)
        except SegmentCorrupt as error:
            self._check_owner()
            raise lost_journal(file.number, file.first_commit_lsn, file.end_lsn, error) from error

    def remove_journal(self, files: Sequence[JournalFile]) -> None:
        """Files that the record does not name any more, and what they named."""
        self.delete([self._layout_of(file.epoch).journal_key(file.number) for file in files])
        self.delete([key for file in files for key in file.stored_keys])

    def tenure(self, last_owner: int) -> Tenure:
        """This epoch's hold on the slot, under a number above ``last_owner``, the last that the sink has seen: the
        sink may be older than the storage. Where that is this epoch's own, by an earlier batch loop, it stays: the
        sink holds more by now than the server had when the slot was opened."""
        with self._recording:
            self._check_owner()
            is_ours = self._has_given_tenure and last_owner == self._owner
            if self._owner <= last_owner and not is_ours:
                owner = claim_slot(self._storage, self._layout, above=last_owner, seen=self._owner)
                record = read_progress(self._storage, self._layout)
                if record is not None:
                    self._owner = self._written(record, owner).owner
            self._has_given_tenure = True
        opened = self._opened
        return Tenure(
            self._owner, self._layout.epoch, opened.timeline, opened.history, wal_end=opened.target_lsn
        )

    def record(
        self,
        confirmed_lsn: Lsn,
        finished: Sequence[PreparedTransaction],
        delivered_lsn: Lsn | None = None,
        journal: Sequence[JournalSpan] = (),
        journal_keys: Set[str] = frozenset(),
        parked: Sequence[ParkedTable] = (),
    ) -> None:
        """Make it durable that all up to ``confirmed_lsn`` is through; it may be confirmed when this returns.

        The sink holds it up to ``delivered_lsn``, and ``journal`` has the rest, which needs ``journal_keys``. By
        default the sink holds all of it. Rows of ``parked`` tables are nowhere.

        Raises Superseded, with nothing removed. What was written is then ignored by the new owner, and must not be
        confirmed.
        """
        with self._recording:
            write_progress(
                self._storage,
                self._layout,
                confirmed_lsn,
                finished,
                owner=self._owner,
                delivered_lsn=delivered_lsn,
                journal=journal,
                parked=parked,
                held_lsn=self.held_lsn,
                may_begin=False,
            )
        # Only now: a COMMIT PREPARED that is repeated needs its content, unless the record says it is through.
        for prepared in finished:
            self.forget(prepared, journal_keys)

    def note_skipped(self, met: Sequence[SkippedTransaction]) -> None:
        """Write down which skipped transactions this run met."""
        note_skipped(self._storage, self._layout, met)

    def replace(self, replaced: PreparedTransaction, record: PreparedTransaction) -> None:
        """Remove what is left of a prepared transaction whose PREPARE the server has sent again, as ``record``.

        Raises Superseded: the new owner of the slot may have found ``record`` incomplete, and may need the earlier
        one."""
        self._check_owner()
        if replaced.prepare_end_lsn != record.prepare_end_lsn:
            self.forget(replaced)
        else:
            named = set(record.stored_keys())
            self.delete([key for key in replaced.stored_keys() if key not in named])

    def forget(self, prepared: PreparedTransaction, keep: Set[str] = frozenset()) -> None:
        delete_prepared(self._storage, self._layout, prepared)
        self.delete([key for key in prepared.stored_keys() if key not in keep])

    def delete(self, keys: Sequence[str]) -> None:
        self._storage.delete(list(keys))

    def content_of(self, prepared: PreparedTransaction, end: TransactionEnd) -> Sealed:
        """The transaction that ``end`` (a COMMIT PREPARED) releases, without its bad tables, or why it cannot.

        Raises SegmentCorrupt for damage that a new epoch mends, because the server sends the PREPARE to it again.
        """
        damage = self._damage_of(prepared)
        if damage is not None:
            return undeliverable_unit(lost(end, damage))
        bad = tuple(dataclasses.replace(each, commit_lsn=end.commit_lsn) for each in prepared.bad_tables)
        relids = {each.relid for each in bad}
        stamped = stamp_segments(prepared, end)
        segments = tuple(part for part in stamped if part.relation.relid not in relids)
        whole_end = TransactionEnd(
            xid=end.xid,
            commit_lsn=end.commit_lsn,
            end_lsn=end.end_lsn,
            commit_timestamp_us=end.commit_timestamp_us,
            streamed=prepared.streamed,
            gid=end.gid,
            origin=prepared.origin,
        )
        messages = spilled_messages(prepared, end)
        n_rows = sum(p.n_rows for p in segments)
        tables = {p.relation.name for p in segments}
        return Sealed(
            transactions=transaction_row(
                whole_end, n_rows, tables, with_messages=bool(messages), bad_tables=bad
            ),
            memory=(),
            segments=segments,
            messages=messages,
            n_rows=n_rows,
            n_bytes=sum(p.segment.n_bytes for p in segments) + sum(p.n_bytes for p in messages),
            bad_tables=bad,
        )

    def _damage_of(self, prepared: PreparedTransaction) -> str | None:
        if prepared.damage is not None:
            return prepared.damage
        try:
            verify_prepared(self._storage, prepared)
        except SegmentCorrupt as error:
            # Whoever has taken the slot over has cleaned up after this run.
            self._check_owner()
            epochs = {self._layout.parse_segment_key(key).epoch for key in prepared.stored_keys()}
            if self._layout.epoch in epochs:
                # The PREPARE may not be confirmed yet. If it is, the next epoch has this record as an earlier one's.
                raise
            return error.message
        return None

    def _recorded(self, check: Callable[[], None]) -> ProgressRecord | None:
        """The record, if it can be taken over. ``check`` says whether it is another run's by now: its position says
        nothing against the server then."""
        slot, confirmed_lsn = self._opened.identity.slot, self._opened.confirmed_flush_lsn
        record = read_progress(self._storage, self._layout)
        check()
        if record is None:
            check_take_over(slot, self._storage, self._layout, confirmed_lsn)
            self._is_first = True
            return None
        check_positions(slot, record.confirmed_lsn, confirmed_lsn, self._opened.target_lsn)
        if record.journal and record.confirmed_lsn > max(confirmed_lsn, self._opened.start_lsn):
            # What the journal has would come again, after what is newer.
            raise ComponentLost(
                f"an earlier run recorded {record.confirmed_lsn} after this one had asked the server for what follows "
                f"{max(confirmed_lsn, self._opened.start_lsn)}"
            )
        return record

    def _written(
        self, before: ProgressRecord | None, owner: int, resume: Set[int] = frozenset()
    ) -> ProgressRecord:
        """Our record, made of ``before``, under the number that was claimed."""
        known = None if before is None else before.cover
        return take_over_progress(
            self._storage,
            self._layout,
            before,
            self._opened.confirmed_flush_lsn if before is None else before.confirmed_lsn,
            owner=owner,
            cover=self._opened.cover if known is None else known,
            resume=resume,
            gone=self._opened.gone_tables,
            gone_before=self._opened.gone_before,
        )


def _rows(ref: ArrowRef, fetch: Callable[[ArrowRef], pa.Table]) -> pa.Table:
    if isinstance(ref, JoinedRows):
        return ref.table(lambda each: _rows(each, fetch))
    return ref.table() if isinstance(ref, JournalRows) else fetch(ref)


def _bounded(
    files: Iterable[JournalFile | DamagedFile], confirmed_lsn: Lsn
) -> tuple[JournalFile | DamagedFile, ...]:
    """Damaged ones with the place before which they end: the next commit that the journal tells of, or the end of what
    is confirmed."""
    bounded: list[JournalFile | DamagedFile] = []
    up_to_lsn = confirmed_lsn
    for file in reversed(list(files)):
        if isinstance(file, DamagedFile):
            file = dataclasses.replace(file, up_to_lsn=up_to_lsn)
        elif file.first_commit_lsn:
            up_to_lsn = file.first_commit_lsn
        bounded.append(file)
    return tuple(reversed(bounded))
