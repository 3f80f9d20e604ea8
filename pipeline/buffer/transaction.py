"""One open transaction: its decoded rows by relation version, its spilled segments, what was rolled back.

A rolled-back subtransaction is a member of a set and nothing else: no row is touched when it aborts. What the
set means for the rows is worked out once, at the end, from the runs of equal subxid that the decoder
reports: ``dropped()`` gives the runs of ordinals to leave out.

States: OPEN takes blocks and aborts; SEALED gave its content away; an illegal call raises IllegalTransition
with the transaction's story and changes nothing. Called by the buffer shell alone, from one thread.

Rejected: filtering aborted rows at the abort (rewrites what may be gigabytes), and one group per subxid
(ten thousand savepoints would be ten thousand segments).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline import rows
from xidstream.pipeline.buffer.groups import GroupKey, Groups
from xidstream.pipeline.buffer.messages import PART_BYTES, message_parts
from xidstream.pipeline.errors import IllegalTransition, XidstreamError
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
    Undeliverable,
)
from xidstream.pipeline.packs import UnitParts
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import NOBODY, BadRows, GivenUp, Poison, first_poison
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.rows import DroppedRuns, Stamp


class State(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"


@dataclass(frozen=True)
class _Spilled:
    segment: Segment
    subxids: npt.NDArray[np.uint32]
    n_rows_by_subxid: npt.NDArray[np.int64]


class OpenTransaction:
    """``xid`` is the top-level one; ``first_lsn`` makes its storage keys unique."""

    def __init__(self, xid: Xid, first_lsn: Lsn, *, streamed: bool) -> None:
        self.xid = xid
        self.first_lsn = first_lsn
        self.streamed = streamed
        self.n_rows = 0
        self.n_segments = 0
        self.n_steps = 0
        """Blocks and subtransaction aborts that it took."""
        self.state = State.OPEN
        self._groups = Groups()
        self._spilled: list[_Spilled] = []
        self._aborted: set[int] = set()
        self._runs: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._message_files: list[MessageFile] = []
        self._notes: list[BadRows] = []

    def __repr__(self) -> str:
        return (
            f"<transaction {int(self.xid)} {self.state.value}: {self.n_rows} rows, {self.n_bytes} bytes in memory, "
            f"{self.n_segments} segments, {len(self._aborted)} subtransactions rolled back>"
        )

    @property
    def n_bytes(self) -> int:
        """Decoded bytes in memory, with what Arrow needs beside them."""
        return self._groups.n_bytes

    def add(
        self,
        tables: Sequence[tuple[RelationVersion, pa.RecordBatch]],
        messages: pa.RecordBatch | None,
        runs: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]],
        n_rows: int,
    ) -> None:
        """Take one decoded block. ``runs`` are subxid, first ordinal and count, in order of ordinals."""
        self._expect_open("a block")
        for relation, batch in tables:
            self.add_rows(relation, batch)
        if messages is not None and messages.num_rows:
            self._groups.add(None, messages)
        self._runs.append(runs)
        self.n_rows += n_rows
        self.n_steps += 1

    def add_rows(self, relation: RelationVersion, batch: pa.RecordBatch) -> None:
        """Take one table of a block before ``add`` takes the rest of it: a block may have thousands of tables, and
        some may have to be spilled before the last is decoded."""
        self._expect_open("a block's rows")
        self._groups.add(relation, batch)

    def note(self, bad: Iterable[BadRows]) -> None:
        """Of the block that was added last: what cannot be delivered, if it is kept."""
        self._notes += bad

    def poison(self) -> Poison | None:
        """Why the transaction cannot be delivered as it is now; None where nothing that it keeps is bad."""
        return first_poison(self._notes, self._aborted)

    def abort_subtransactions(self, subxids: Iterable[Xid]) -> None:
        """Legal for a subxid never seen: its rows may have been filtered out by the publication."""
        self._expect_open("a subtransaction abort")
        self._aborted.update(map(int, subxids))
        self.n_steps += 1

    def group_sizes(self) -> dict[RelationVersion, int]:
        return {key: self._groups.size(key) for key in self._groups if key is not None}

    @property
    def has_too_large_block(self) -> bool:
        """Whether a block in memory is too large for it: of one relation version, or of messages."""
        return self._groups.has_too_large

    def to_spill(self) -> tuple[int, GroupKey] | None:
        """The size and relation version of what is to be spilled next; see ``Groups.to_spill``."""
        return self._groups.to_spill()

    def spillable(self) -> Iterator[GroupKey]:
        """What can be given away; None for the messages, which come last."""
        yield from (key for key in self._groups if key is not None)
        if None in self._groups:
            yield None

    def take_messages(self) -> list[pa.RecordBatch]:
        """Give away the messages; ``messages_spilled`` must follow with their file."""
        self._expect_open("a spill")
        return self._groups.take(None).batches if None in self._groups else []

    def messages_spilled(self, file: MessageFile) -> None:
        self._message_files.append(file)
        self.n_segments += 1

    def take_group(self, relation: RelationVersion) -> list[pa.RecordBatch]:
        """Give away the rows of one relation version; ``spilled`` must follow with their segment."""
        self._expect_open("a spill")
        return self._groups.take(relation).batches

    def spilled(self, segment: Segment, batches: Sequence[pa.RecordBatch]) -> None:
        """``batches`` are in ``segment`` now; only the number of rows of each subxid is kept."""
        self._spilled.append(_Spilled(segment, *_rows_by_owner(batches)))
        self.n_segments += 1

    def segment_keys(self) -> list[str]:
        """Of all that was spilled, messages too."""
        return [s.segment.key for s in self._spilled] + [file.key for file in self._message_files]

    def dropped(self) -> DroppedRuns:
        """The ordinals of rolled-back rows, adjacent runs joined."""
        if not self._aborted or not self._runs:
            return DroppedRuns()
        subxid = np.concatenate([r[0] for r in self._runs])
        first = np.concatenate([r[1] for r in self._runs])
        count = np.concatenate([r[2] for r in self._runs])
        gone = np.isin(subxid, np.fromiter(self._aborted, np.uint32, len(self._aborted)))
        first, count = first[gone], count[gone]
        if len(first) == 0:
            return DroppedRuns()
        starts = np.concatenate(([True], first[1:] != first[:-1] + count[:-1]))
        group = np.flatnonzero(starts)
        return DroppedRuns(first[group], np.add.reduceat(count, group))

    def seal(
        self,
        end: TransactionEnd,
        put: Callable[[pa.RecordBatch | pa.Table], ArrowRef],
        given_up: GivenUp = NOBODY,
    ) -> Sealed:
        """Give everything to the sequencer. ``put`` stores rows in contract layout and returns their ref.

        Of a transaction that keeps poison, and of one that was given up, there is nothing but that.
        """
        self._expect_open("a commit")
        poison = self.poison()
        if (end.xid, end.commit_lsn) in given_up:
            return self._nothing(left_out(end))
        if poison is not None:
            return self._nothing(undeliverable(poison.of(end.xid, end.commit_lsn)))
        dropped = self.dropped()
        stamp = Stamp.of_one(end.commit_lsn, end.commit_timestamp_us, end.xid)
        memory = self._memory_parts(stamp, dropped, put)
        segments = tuple(
            SegmentPart(s.segment, stamp, dropped, kept) for s, kept in self._kept_of_segments() if kept
        )
        messages = self._message_parts(end, put)
        self.state = State.SEALED
        self._runs.clear()
        n_rows = sum(p.n_rows for p in memory) + sum(p.n_rows for p in segments)
        tables = sorted({p.relation.name for p in memory} | {p.relation.name for p in segments})
        return Sealed(
            transactions=transaction_row(end, n_rows, tables, with_messages=bool(messages)),
            memory=memory,
            segments=segments,
            messages=tuple(messages),
            n_rows=n_rows,
            n_bytes=sum(p.n_bytes for p in memory)
            + sum(p.segment.n_bytes for p in segments)
            + sum(p.n_bytes for p in messages),
        )

    def _memory_parts(
        self, stamp: Stamp, dropped: DroppedRuns, put: Callable[[pa.RecordBatch | pa.Table], ArrowRef]
    ) -> tuple[MemoryPart, ...]:
        relations = [key for key in self._groups if key is not None]
        parts = UnitParts(put, len(relations))
        for relation in relations:
            # Batches are given up one by one: the copies that are put must not stand beside all of them.
            batches = self._groups.take(relation).batches
            batches.reverse()
            released, n_bytes = [], 0
            while batches:
                released.append(rows.release(batches.pop(), relation, stamp, dropped))
                # Counted once: to ask a batch for its size costs as much as to release it.
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
        """The durable record; all that is ``spillable`` must have been spilled before."""
        self._expect_open("a prepare")
        if len(self._groups):
            raise IllegalTransition(f"{self!r} was to be prepared with rows or messages still in memory")
        kept = self._kept_of_segments()
        record = PreparedTransaction(
            xid=self.xid,
            gid=gid,
            prepare_lsn=prepare_lsn,
            prepare_end_lsn=prepare_end_lsn,
            streamed=self.streamed,
            origin=origin,
            segments=tuple(s.segment for s, _ in kept),
            segment_rows=tuple(n for _, n in kept),
            dropped=self.dropped(),
            messages=tuple(self._message_files),
            poison=self.poison(),
        )
        self.state = State.SEALED
        self._runs.clear()
        return record

    def _nothing(self, sealed: Sealed) -> Sealed:
        self.state = State.SEALED
        self._groups = Groups()
        self._runs.clear()
        return sealed

    def _kept_of_segments(self) -> list[tuple[_Spilled, int]]:
        aborted = np.fromiter(self._aborted, np.uint32, len(self._aborted))
        return [(s, int(s.n_rows_by_subxid[~np.isin(s.subxids, aborted)].sum())) for s in self._spilled]

    def _message_parts(
        self, end: TransactionEnd, put: Callable[[pa.RecordBatch | pa.Table], ArrowRef]
    ) -> list[MessagePart]:
        spilled = [SpilledMessages(file, end.commit_lsn, end.xid) for file in self._message_files]
        n_bytes, batches = self._groups.size(None), self.take_messages()[::-1]
        stamped = (rows.stamp_messages(batches.pop(), end.commit_lsn, end.xid) for _ in range(len(batches)))
        return [*spilled, *message_parts(stamped, n_bytes, put)]

    def _expect_open(self, what: str) -> None:
        if self.state is not State.OPEN:
            raise IllegalTransition(f"{self!r} was given {what}")


def _rows_by_owner(
    batches: Sequence[pa.RecordBatch],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """The different owners, in ascending order, and how many rows each has. Batch by batch: a copy of all their numbers
    would stand above the buffer's limit, because the rows are still there."""
    of_batch = [np.unique(batch.column(1).to_numpy(), return_counts=True) for batch in batches]
    owners, place = np.unique(np.concatenate([owner for owner, _ in of_batch]), return_inverse=True)
    counts = np.zeros(len(owners), np.int64)
    np.add.at(counts, place, np.concatenate([n for _, n in of_batch]))
    return owners, counts


def transaction_row(
    end: TransactionEnd, n_rows: int, tables: Sequence[str], *, with_messages: bool
) -> pa.RecordBatch:
    """``rows.TRANSACTIONS_SCHEMA`` with one row, or none where the transaction left nothing."""
    values: list[dict[str, object]] = []
    if n_rows or with_messages:
        values.append(
            {
                "xid": int(end.xid),
                "commit_lsn": int(end.commit_lsn),
                "end_lsn": int(end.end_lsn),
                "commit_timestamp": end.commit_timestamp_us,
                "gid": end.gid,
                "origin": end.origin,
                "streamed": end.streamed,
                "rows": n_rows,
                "tables": list(tables),
            }
        )
    return pa.RecordBatch.from_pylist(values, schema=rows.TRANSACTIONS_SCHEMA)


def nothing(end: TransactionEnd) -> Sealed:
    """A transaction that left no row."""
    return Sealed(transaction_row(end, 0, (), with_messages=False), (), (), (), 0, 0)


def left_out(end: TransactionEnd) -> Sealed:
    """A transaction that was given up."""
    return dataclasses.replace(nothing(end), left_out=((end.xid, end.commit_lsn),))


def undeliverable(error: XidstreamError) -> Sealed:
    """A transaction that cannot be delivered."""
    none = pa.RecordBatch.from_pylist([], schema=rows.TRANSACTIONS_SCHEMA)
    return Sealed(none, (), (), (), 0, 0, undeliverable=Undeliverable(error))
