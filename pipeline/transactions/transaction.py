"""One open transaction: its decoded rows by relation version, and its spilled segments, as rollbacks leave them.

A rollback takes all rows from some number on (``survivors``). In memory it drops batches, and the last batch that stays
becomes a view. A segment that has only rows after the cut is deleted as a whole. Of each relation version, at most one
segment has rows on both sides of the cut. Its cut is noted, and a later cut further ahead replaces the note. The cut is
carried out when the next segment of that version is written, or when the transaction ends. So there is never more than
one such segment of a version. It is carried out earlier if so many rows have come since that its cost does not matter
(``due_cuts``), so that the end seldom has to wait for it.

An example. Rows 0 to 5,999 of a table were decoded; 0 to 3,999 are in segment 0, the others in memory. A savepoint that
began at row 3,000 is rolled back: 3,000 rows stay. What is in memory goes at once. Segment 0 has rows on both sides of
the cut, so *cut at 3,000* is noted, and nothing is written. The next row gets number 3,000. Then a savepoint that began
at row 2,000 is rolled back: the note becomes *cut at 2,000*. At the commit segment 0 is written again, once, with its
first 2,000 rows, and the file with 4,000 is deleted.

States: OPEN takes blocks and rollbacks, and SEALED has handed its content over. An illegal call raises
IllegalTransition with the transaction's story, and changes nothing. The buffer's shell alone calls this, from one
thread.

Rejected: to rewrite a segment at each rollback, which takes minutes for a thousand savepoints. Also rejected: one group
for each subxid, because ten thousand savepoints would make ten thousand segments.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.errors import IllegalTransition
from xidstream.pipeline.exchange import (
    ArrowRef,
    MemoryPart,
    MessageFile,
    MessagePart,
    PreparedTransaction,
    Sealed,
    Segment,
    SegmentPart,
    SpilledMessages,
    TransactionEnd,
)
from xidstream.pipeline.packs import PartsBuilder
from xidstream.pipeline.parked import BadTable
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import (
    NO_SKIPS,
    BadRows,
    Poison,
    Skips,
    first_poison,
    kept_notes,
    notes_by_table,
)
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.schema.rows import Stamp
from xidstream.pipeline.transactions.groups import GroupKey, Groups
from xidstream.pipeline.transactions.messages import PART_BYTES, message_parts
from xidstream.pipeline.transactions.sealed import skipped_unit, transaction_row, undeliverable_unit
from xidstream.pipeline.transactions.survivors import Survivors

_ROWS_PER_REWRITTEN_ROW: Final = 1 / 8
_ROWS_PER_FILE: Final = 1000
"""After so many new rows a segment is cut: an eighth of its own rows, and 1,000 for what a file by itself takes
(2 ms)."""


class TransactionState(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"


@dataclass(frozen=True)
class _Spilled:
    """``first``: the number of its first row. ``end``: the number after its last row. ``cut``: a rollback took the rows
    from ``end`` on, and the segment still has them."""

    segment: Segment
    first: int
    end: int
    cut: bool = False

    def up_to(self, n_rows: int) -> _Spilled:
        return self if self.end <= n_rows else dataclasses.replace(self, end=n_rows, cut=True)


class OpenTransaction:
    """``xid`` is the top-level transaction's. ``first_lsn`` makes its storage keys unique."""

    def __init__(self, xid: Xid, first_lsn: Lsn, *, streamed: bool) -> None:
        self.xid = xid
        self.first_lsn = first_lsn
        self.streamed = streamed
        """Whether it came in stream blocks."""
        self.n_segments = 0
        """How many segments were written so far."""
        self.n_bytes_spilled = 0
        """The bytes of the files that its segments and messages are in now."""
        self.n_steps = 0
        """How many blocks it has taken."""
        self.state = TransactionState.OPEN
        """OPEN until ``seal``."""
        self._survivors = Survivors()
        """Whose rows these are, and how many a rollback leaves."""
        self._groups = Groups()
        """What is in memory, by relation version."""
        self._spilled: list[_Spilled] = []
        """The segments, in the order in which they were written."""
        self._n_cuts = 0
        """How many segments have a noted cut."""
        self._message_files: list[MessageFile] = []
        """The files of logical messages."""
        self._notes: list[BadRows] = []
        """The rows that cannot be delivered and that were not rolled back."""

    def __repr__(self) -> str:
        return (
            f"<transaction {int(self.xid)} {self.state.value}: {self.n_rows} rows, {self.n_bytes} bytes in memory, "
            f"{self.n_segments} segments>"
        )

    @property
    def n_rows(self) -> int:
        """Rows that were not rolled back. The next row gets this number."""
        return self._survivors.n_rows

    @property
    def n_bytes(self) -> int:
        """In memory: of rows and messages, and what tells whose rows they are."""
        return self.n_row_bytes + self._survivors.n_bytes

    @property
    def n_row_bytes(self) -> int:
        """The part of its memory that can be spilled: decoded rows and messages, with what Arrow needs beside them."""
        return self._groups.n_bytes

    def add(
        self,
        messages: pa.RecordBatch | None,
        runs: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]],
        n_rows: int,
    ) -> None:
        """Take one decoded block, whose rows ``add_rows`` has taken. They are numbered from the present ``n_rows``.
        ``runs`` are subxid and first row of each."""
        self._expect_open("a block")
        if messages is not None and messages.num_rows:
            self._groups.add(None, messages)
        self._survivors.add(*runs, n_rows)
        self.n_steps += 1

    def add_rows(self, relation: RelationVersion, batch: pa.RecordBatch) -> None:
        """Take one table of a block before ``add`` takes the rest of it: a block may have thousands of tables, and
        some may have to be spilled before the last is decoded."""
        self._expect_open("a block's rows")
        self._groups.add(relation, batch)

    def note(self, bad: Iterable[BadRows]) -> None:
        """Note which rows of the block that was added last cannot be delivered, if they are kept."""
        self._notes += bad

    def poison(self) -> Poison | None:
        """Why the transaction cannot be delivered as it is now; None if no row that it keeps is bad, but for those of
        tables that are parked in any case (``BadRows.is_table``)."""
        return first_poison(note for note in self._notes if not note.is_table)

    def bad_tables(self) -> tuple[BadTable, ...]:
        """The tables with a row that cannot be delivered. One such row disqualifies all rows of its table in this
        transaction, so ``n_changes`` counts them all. No cut may be open."""
        found = []
        for relid, notes in notes_by_table(self._notes).items():
            first = first_poison(notes)
            assert first is not None
            n_changes = sum(int(note.n_rows.sum()) for note in notes if note.is_table)
            n_changes += sum(self._groups.n_rows(key) for key in self._groups if key and key.relid == relid)
            n_changes += sum(s.segment.n_rows for s in self._spilled if s.segment.relation.relid == relid)
            found.append(BadTable(relid, notes[0].table, first.lsn, first.what, n_changes, self.xid))
        return tuple(found)

    def roll_back(self, subxids: Collection[int]) -> list[str]:
        """Forget the rows of these subtransactions. Returns the keys of segments that have no other rows.

        A subxid that was never seen is legal, because the publication may have filtered its rows out. Raises
        IllegalTransition if rows that stay come behind the first of these; then nothing has changed.
        """
        self._expect_open("a rollback")
        if not subxids:
            return []
        aborted = np.fromiter(subxids, np.uint32, len(subxids))
        try:
            n_rows = self._survivors.rows_after_abort(aborted)
        except IllegalTransition as error:
            raise IllegalTransition(f"{self!r} was given a rollback out of order: {error.message}") from None
        self._notes = kept_notes(self._notes, aborted)
        if n_rows == self.n_rows:
            return []
        self._survivors.truncate(n_rows)
        self._groups.truncate(n_rows)
        gone = [s.segment.key for s in self._spilled if s.first >= n_rows]
        self.n_bytes_spilled -= sum(s.segment.n_bytes for s in self._spilled if s.first >= n_rows)
        self._spilled = [s.up_to(n_rows) for s in self._spilled if s.first < n_rows]
        self._n_cuts = sum(s.cut for s in self._spilled)
        return gone

    def cuts(self, relation: RelationVersion | None = None) -> list[tuple[Segment, int]]:
        """The segments of ``relation``, or of all, that still have rolled-back rows, each with the number of the first
        such row. ``shortened`` must follow for each."""
        if not self._n_cuts:
            return []
        return [(s.segment, s.end) for s in self._spilled if s.cut and relation in (None, s.segment.relation)]

    def due_cuts(self) -> list[tuple[Segment, int]]:
        """All of ``cuts`` if enough rows came since the last of them to make up for the cost, else none."""
        cuts = self.cuts()
        if not cuts:
            return cuts
        cost = sum(segment.n_rows * _ROWS_PER_REWRITTEN_ROW + _ROWS_PER_FILE for segment, _ in cuts)
        return cuts if self.n_rows - max(end for _, end in cuts) >= cost else []

    def shortened(self, segment: Segment, shorter: Segment) -> None:
        """``shorter`` has the rows of ``segment`` that stay."""
        self._spilled = [
            dataclasses.replace(s, segment=shorter, cut=False) if s.segment.key == segment.key else s
            for s in self._spilled
        ]
        self._n_cuts -= 1
        self.n_segments += 1
        self.n_bytes_spilled += shorter.n_bytes - segment.n_bytes

    def group_sizes(self) -> dict[RelationVersion, int]:
        return {key: self._groups.size(key) for key in self._groups if key is not None}

    @property
    def has_too_large_block(self) -> bool:
        """Whether a block of rows or of messages is too large for memory."""
        return self._groups.has_too_large

    def to_spill(self) -> tuple[int, GroupKey] | None:
        """The size and relation version of what is to be spilled next; see ``Groups.to_spill``."""
        return self._groups.to_spill()

    def spillable(self) -> Iterator[GroupKey]:
        """The groups that can be handed over; None stands for the messages, which come last."""
        yield from (key for key in self._groups if key is not None)
        if None in self._groups:
            yield None

    def take_messages(self) -> list[pa.RecordBatch]:
        """Hand over the messages. ``messages_spilled`` must follow with their file."""
        self._expect_open("a spill")
        return self._groups.take(None).batches if None in self._groups else []

    def messages_spilled(self, file: MessageFile) -> None:
        self._message_files.append(file)
        self.n_segments += 1
        self.n_bytes_spilled += file.n_bytes

    def take_group(self, relation: RelationVersion) -> list[pa.RecordBatch]:
        """Hand over the rows of one relation version. ``spilled`` must follow with their segment."""
        self._expect_open("a spill")
        return self._groups.take(relation).batches

    def spilled(self, segment: Segment, batches: Sequence[pa.RecordBatch]) -> None:
        """``batches`` are in ``segment`` now."""
        self._spilled.append(_Spilled(segment, rows.first_seq(batches[0]), rows.last_seq(batches[-1]) + 1))
        self.n_segments += 1
        self.n_bytes_spilled += segment.n_bytes

    @property
    def has_segments(self) -> bool:
        """Whether there are segments of rows that were not rolled back."""
        return bool(self._spilled)

    def segment_keys(self) -> list[str]:
        """The keys of all that was spilled, messages included."""
        return [s.segment.key for s in self._spilled] + [file.key for file in self._message_files]

    def seal(
        self,
        end: TransactionEnd,
        put: Callable[[pa.RecordBatch | pa.Table], ArrowRef],
        skips: Skips = NO_SKIPS,
        *,
        parks: bool = False,
    ) -> Sealed:
        """Hand everything over to the sequencer. No cut may be open. ``put`` stores rows in contract layout and returns
        their reference.

        If the transaction is skipped, or keeps poison, the result says that and has no content. Where tables are
        parked, it has no rows of those with poison, but tells of them.
        """
        self._expect_open("a commit")
        poison = self.poison()
        if (end.xid, end.commit_lsn) in skips:
            return self._nothing(skipped_unit(end, self._relids()))
        if poison is not None and not parks:
            return self._nothing(undeliverable_unit(poison.of(end.xid, end.commit_lsn)))
        bad = tuple(dataclasses.replace(each, commit_lsn=end.commit_lsn) for each in self.bad_tables())
        self._drop_tables({each.relid for each in bad})
        commit = CommitStamp(end.commit_lsn, end.commit_timestamp_us)
        stamp = Stamp.of_one(end.commit_lsn, end.commit_timestamp_us, end.xid)
        segments = tuple(SegmentPart(segment, commit) for segment in self._whole_segments("committed"))
        memory = self._memory_parts(stamp, put)
        messages = self._message_parts(end, put)
        self.state = TransactionState.SEALED
        n_rows = sum(p.n_rows for p in memory) + sum(p.n_rows for p in segments)
        tables = {p.relation.name for p in memory} | {p.relation.name for p in segments}
        return Sealed(
            transactions=transaction_row(end, n_rows, tables, with_messages=bool(messages), bad_tables=bad),
            memory=memory,
            segments=segments,
            messages=tuple(messages),
            n_rows=n_rows,
            n_bytes=sum(p.n_bytes for p in memory)
            + sum(p.segment.n_bytes for p in segments)
            + sum(p.n_bytes for p in messages),
            bad_tables=bad,
        )

    def _relids(self) -> set[int]:
        """The relids of all tables that it has rows of, those that cannot be delivered included."""
        kept = {key.relid for key in self._groups if key is not None}
        return kept | {s.segment.relation.relid for s in self._spilled} | {note.relid for note in self._notes}

    def _drop_tables(self, relids: Collection[int]) -> None:
        """Forget the rows of these tables. Their segments are nobody's."""
        if not relids:
            return
        for key in [key for key in self._groups if key is not None and key.relid in relids]:
            self._groups.take(key)
        self._spilled = [s for s in self._spilled if s.segment.relation.relid not in relids]

    def _memory_parts(
        self, stamp: Stamp, put: Callable[[pa.RecordBatch | pa.Table], ArrowRef]
    ) -> tuple[MemoryPart, ...]:
        relations = [key for key in self._groups if key is not None]
        parts = PartsBuilder(put, len(relations))
        for relation in relations:
            # Batches are released one by one, so that not all of them exist beside the copies that are put.
            batches = self._groups.take(relation).batches
            batches.reverse()
            released, n_bytes = [], 0
            while batches:
                released.append(rows.release(batches.pop(), relation, stamp))
                # Asked once, because to ask a batch for its size costs as much as to release it.
                n_bytes += released[-1].nbytes
                if not batches or n_bytes >= PART_BYTES:
                    table = pa.Table.from_batches(released, schema=rows.contract_schema(relation))
                    released, n_bytes = [], 0
                    parts.add(relation, table)
                    del table
        return parts.finish()

    def prepared(
        self, gid: str, prepare_lsn: Lsn, prepare_end_lsn: Lsn, origin: str | None
    ) -> PreparedTransaction:
        """The durable record. All that is ``spillable`` must have been spilled before, and no cut may be open."""
        self._expect_open("a prepare")
        if len(self._groups):
            raise IllegalTransition(f"{self!r} was to be prepared with rows or messages still in memory")
        record = PreparedTransaction(
            xid=self.xid,
            gid=gid,
            prepare_lsn=prepare_lsn,
            prepare_end_lsn=prepare_end_lsn,
            streamed=self.streamed,
            origin=origin,
            segments=self._whole_segments("prepared"),
            messages=tuple(self._message_files),
            poison=self.poison(),
            bad_tables=self.bad_tables(),
        )
        self.state = TransactionState.SEALED
        return record

    def _nothing(self, sealed: Sealed) -> Sealed:
        self._groups = Groups()
        self.state = TransactionState.SEALED
        return sealed

    def _whole_segments(self, what: str) -> tuple[Segment, ...]:
        if self.cuts():
            raise IllegalTransition(f"{self!r} was to be {what} with rolled-back rows in its segments")
        return tuple(s.segment for s in self._spilled)

    def _message_parts(
        self, end: TransactionEnd, put: Callable[[pa.RecordBatch | pa.Table], ArrowRef]
    ) -> list[MessagePart]:
        spilled = [SpilledMessages(file, end.commit_lsn, end.xid) for file in self._message_files]
        n_bytes, batches = self._groups.size(None), self.take_messages()[::-1]
        stamped = (rows.stamp_messages(batches.pop(), end.commit_lsn, end.xid) for _ in range(len(batches)))
        return [*spilled, *message_parts(stamped, n_bytes, put)]

    def _expect_open(self, what: str) -> None:
        if self.state is not TransactionState.OPEN:
            raise IllegalTransition(f"{self!r} was given {what}")
