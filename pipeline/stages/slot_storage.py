"""What the sequencer keeps in storage for its slot: the confirmed position, and prepared transactions.

Plain blocking calls, which the sequencer's asyncio shell runs in threads. The order of writing is the guarantee:
a position is recorded before it is confirmed, and a finished prepared transaction is listed in that same record
before it is deleted. And the record is taken over before anything of an earlier epoch is read or cleaned: from then on
that one records nothing more (``pipeline.segments.progress``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from xidstream.pipeline.buffer.transaction import transaction_row, undeliverable
from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import Opened, PreparedTransaction, Sealed, Tenure, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.segments import (
    Layout,
    ProgressRecord,
    Storage,
    check_owner,
    clean_dead_epochs,
    delete_prepared,
    load_prepared,
    note_left_out,
    read_progress,
    take_over_progress,
    verify_prepared,
    write_progress,
)
from xidstream.pipeline.sequencer import PreparedBook
from xidstream.pipeline.sequencer.prepared import lost, spilled_messages, stamp_segments
from xidstream.pipeline.slot.continuity import check_positions


class SlotStorage:
    """Raises StorageFault and SegmentCorrupt from every method, Superseded where another run has the slot by now."""

    def __init__(self, storage_uri: str, opened: Opened, epoch: str) -> None:
        self._storage = Storage(storage_uri)
        self._opened = opened
        self._layout = Layout(opened.identity.system_identifier, opened.identity.slot, epoch)
        self._owner = 0
        self._recording = threading.Lock()
        """The driver may ask for its tenure while a position is recorded."""

    def take_over(self) -> tuple[Lsn, PreparedBook]:
        """The recorded position and the prepared transactions; cleans up what dead runs left.

        Raises SlotLost where the slot was confirmed past what this pipeline ever recorded, or the server is older
        than what it delivered before.
        """
        record = self._take_over_record()
        self._owner = record.owner
        prepared = tuple(load_prepared(self._storage, self._layout, self._opened.confirmed_flush_lsn))
        kept = {key for p in prepared for key in p.stored_keys()}
        damaged = {p.xid for p in prepared if p.damage is not None}
        clean_dead_epochs(self._storage, self._layout, kept, damaged)
        return record.confirmed_lsn, PreparedBook(prepared, record.cover)

    def tenure(self, last_owner: int) -> Tenure:
        """This epoch's hold on the slot, under a number above ``last_owner``, the last that the sink has seen: the
        sink may be older than the storage."""
        with self._recording:
            record = check_owner(self._storage, self._layout, self._owner)
            if record is not None and self._owner <= last_owner:
                self._owner = self._taken_over(record, record.confirmed_lsn, above=last_owner).owner
        opened = self._opened
        return Tenure(
            self._owner, self._layout.epoch, opened.timeline, opened.history, wal_end=opened.target_lsn
        )

    def record(self, confirmed_lsn: Lsn, finished: Sequence[PreparedTransaction]) -> None:
        """Make it durable that all up to here is through; it may be confirmed when this returns."""
        with self._recording:
            write_progress(self._storage, self._layout, confirmed_lsn, finished, owner=self._owner)
        # Only now: a COMMIT PREPARED that is repeated needs its content, unless the record says it is through.
        for prepared in finished:
            self.forget(prepared)

    def note_left_out(self, pairs: Sequence[tuple[Xid, Lsn]]) -> None:
        """Xid and commit LSN of transactions that were given up, and that this run met."""
        note_left_out(self._storage, self._layout, pairs)

    def replace(self, replaced: PreparedTransaction, record: PreparedTransaction) -> None:
        """Remove what is left of a prepared transaction whose PREPARE the server has sent again, as ``record``."""
        if replaced.prepare_end_lsn != record.prepare_end_lsn:
            self.forget(replaced)
        else:
            named = set(record.stored_keys())
            self.delete([key for key in replaced.stored_keys() if key not in named])

    def forget(self, prepared: PreparedTransaction) -> None:
        delete_prepared(self._storage, self._layout, prepared)
        self.delete(prepared.stored_keys())

    def delete(self, keys: Sequence[str]) -> None:
        self._storage.delete(list(keys))

    def content_of(self, prepared: PreparedTransaction, end: TransactionEnd) -> Sealed:
        """The transaction that ``end`` (a COMMIT PREPARED) releases, or why it cannot.

        Raises SegmentCorrupt for damage that a new epoch mends, because the server sends the PREPARE to it again.
        """
        damage = self._damage_of(prepared)
        if damage is not None:
            return undeliverable(lost(end, damage))
        segments = stamp_segments(prepared, end)
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
        tables = sorted({p.relation.name for p in segments})
        return Sealed(
            transactions=transaction_row(whole_end, n_rows, tables, with_messages=bool(messages)),
            memory=(),
            segments=segments,
            messages=messages,
            n_rows=n_rows,
            n_bytes=sum(p.segment.n_bytes for p in segments) + sum(p.n_bytes for p in messages),
        )

    def _damage_of(self, prepared: PreparedTransaction) -> str | None:
        if prepared.damage is not None:
            return prepared.damage
        try:
            verify_prepared(self._storage, prepared)
        except SegmentCorrupt as error:
            # Whoever has taken the slot over has cleaned up behind this run.
            check_owner(self._storage, self._layout, self._owner)
            epochs = {self._layout.parse_segment_key(key).epoch for key in prepared.stored_keys()}
            if self._layout.epoch in epochs:
                # The PREPARE may not be confirmed yet. If it is, the next epoch has this record as an earlier one's.
                raise
            return error.message
        return None

    def _take_over_record(self) -> ProgressRecord:
        slot, confirmed_lsn = self._opened.identity.slot, self._opened.confirmed_flush_lsn
        record = read_progress(self._storage, self._layout)
        if record is None:
            return self._taken_over(None, confirmed_lsn)
        check_positions(slot, record.confirmed_lsn, confirmed_lsn, self._opened.target_lsn)
        return self._taken_over(record, record.confirmed_lsn)

    def _taken_over(
        self, before: ProgressRecord | None, confirmed_lsn: Lsn, above: int = 0
    ) -> ProgressRecord:
        known = None if before is None else before.cover
        cover = self._opened.cover if known is None else known
        return take_over_progress(
            self._storage, self._layout, before, confirmed_lsn, above=above, cover=cover
        )
